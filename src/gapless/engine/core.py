"""The engine: requests in, tokens out, one step at a time.

``step`` is the whole loop body: schedule → launch → accept → collect, where what is accepted may be the
result of an earlier step: a runner on a GPU is fed one step ahead, so that the host works while the device
does. Stop conditions are then seen one step late, and the extra token is dropped. (A step in which a grammar
waits for its token is accepted before the next is scheduled.) The core owns nothing of
the device; it binds the scheduler (what runs next), the runner (runs it) and the choices (what callers see).
Invariants: one bad request never harms another; when a step fails as a whole, the sequences in it end with an
error, their blocks come back and the engine goes on; a result for a sequence that was aborted or preempted
meanwhile is dropped. Not thread-safe: one thread calls it (``abort_request`` may be called from inside a
step). Read ``scheduler.py`` and ``choice.py`` next.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import repeat
from typing import Any

from gapless.engine.choice import Choice
from gapless.engine.detokenizer import TokenizerLike
from gapless.engine.grammar import GrammarCompiler
from gapless.engine.intake import Intake, Prompt
from gapless.engine.outputs import ChoiceDelta, RequestOutput
from gapless.engine.request import Request, Sequence, SequenceState, make_sequences
from gapless.engine.scheduler import Scheduler
from gapless.engine.step import MediaFeed, PendingStep, ScheduledBatch, StepResult, StepRunner
from gapless.errors import GaplessError, RequestError
from gapless.sampling.params import SamplingParams

logger = logging.getLogger(__name__)


class EngineCore:
    """Drives one runner. ``seed`` makes the draws of requests without a seed of their own repeatable.

    Several may share a runner, one after the other: while one has requests, others are refused. With
    ``enable_prefix_caching``, ``reset_prefix_cache`` must be called after steps that no engine has run. With
    ``favors_throughput``, requests of which none streams have their prompts computed before the first of them
    decodes, as far as they fill whole steps.
    """

    def __init__(
        self,
        runner: StepRunner,
        *,
        tokenizer: TokenizerLike | None = None,
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        enable_prefix_caching: bool = False,
        makes_text: bool = True,
        favors_throughput: bool = False,
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        media = self._media = runner.media
        self.scheduler = Scheduler(
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_num_reqs=runner.max_num_reqs,
            max_num_batched_tokens=runner.max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            on_release=None if media is None else media.release,
        )
        known_eos_ids = frozenset(t for t in eos_token_ids if 0 <= t < runner.vocab_size)
        self.grammars = GrammarCompiler(tokenizer, vocab_size=runner.vocab_size, eos_token_ids=known_eos_ids)
        self.intake = Intake(
            tokenizer=tokenizer,
            vocab_size=runner.vocab_size,
            eos_token_ids=known_eos_ids,
            max_model_len=runner.max_model_len,
            capacity_tokens=self.scheduler.allocator.capacity_tokens,
            grammars=self.grammars,
            takes_media=media is not None,
            makes_text=makes_text,
        )
        self._random = random.Random(seed)
        # Of the tokenizer, not of this object, which would then live on until its cycle is collected.
        self._token_text = lru_cache(maxsize=1 << 16)(partial(_decode_token, tokenizer))
        self._favors_throughput = favors_throughput
        self._active: dict[str, _Active] = {}
        self._streaming: set[str] = set()
        """Ids of active requests whose tokens somebody waits for one by one."""
        self._choices: dict[Sequence, Choice] = {}
        self._in_flight: deque[tuple[ScheduledBatch, PendingStep]] = deque()
        self._changed: dict[str, _Active] = {}  # since the last step returned; a dict for its order
        self._is_sound = True
        """False while a step is being worked on, so that an interruption there is noticed."""
        self.num_failed_steps = 0
        """Steps that have failed as a whole, one after the other: a device that has broken fails them all."""

    def has_unfinished(self) -> bool:
        """True while a request runs or waits, or an output (of an abort) has not been returned by ``step``
        yet."""
        return bool(self._active)

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        prompt_text: str | None = None,
        cache_extra: bytes = b"",
    ) -> Request:
        """Check a request without adding it. Waits until its grammar has been compiled. ``cache_extra`` as
        in ``Request``. Raises ``RequestError``."""
        if request_id in self._active:
            raise RequestError(f"request_id={request_id!r} is already in use; wait until it has finished")
        params = SamplingParams() if params is None else params
        return self.intake.make_request(
            request_id, prompt, params, prompt_text=prompt_text, cache_extra=cache_extra
        )

    def add(self, request: Request, *, streams: bool = True) -> list[Sequence]:
        """Queue a prepared request; returns one sequence per choice. ``streams`` false: only its last output
        is returned (cheaper). Raises ``GaplessError`` while another engine has requests on this runner."""
        if request.request_id in self._active:
            raise RequestError(
                f"request_id={request.request_id!r} is already in use; wait until it has finished"
            )
        if not self._active:
            self._take_runner()
        seed = request.params.seed
        sequences = make_sequences(request, base_seed=self._random.getrandbits(63) if seed is None else seed)
        choices = [
            Choice(sequence, tokenizer=self.tokenizer, token_text=self._token_text, streams=streams)
            for sequence in sequences
        ]
        self._active[request.request_id] = _Active(request=request, choices=choices, streams=streams)
        if streams:
            self._streaming.add(request.request_id)
        for choice in choices:
            self._choices[choice.sequence] = choice
            self.scheduler.add(choice.sequence)
        return sequences

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        prompt_text: str | None = None,
        streams: bool = True,
    ) -> None:
        """``prepare`` and ``add``. ``prompt``: text, token ids or a ``MediaPrompt``. Raises ``RequestError``;
        nothing is queued then."""
        self.add(self.prepare(request_id, prompt, params, prompt_text=prompt_text), streams=streams)

    def abort_request(self, request_id: str) -> bool:
        """End all choices of a request now; its last output comes with the next ``step``. False when it is
        not running (it may just have finished)."""
        active = self._active.get(request_id)
        if active is None:
            return False
        for choice in active.choices:
            self.scheduler.finish(choice.sequence, reason="abort")
        self._changed[request_id] = active
        return True

    def abort_all(self) -> None:
        """``abort_request`` for everything that runs or waits."""
        for request_id in list(self._active):
            self.abort_request(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, those of running requests included, and embeddings of images: weights
        have changed, or two runs are to do equal work."""
        if self._media is not None:
            self._media.forget()
        if self.scheduler.prefix_cache is not None:
            self.scheduler.prefix_cache.reset()

    def check(self) -> None:
        """Raises ``GaplessError`` when the runner knows that it can run no further step."""
        check = getattr(self.runner, "check", None)
        if check is not None:
            check()

    def report(self) -> dict[str, Any]:
        """The runner's report with what the prefix cache has found; ``prefix_cache`` is None without one."""
        cache = self.scheduler.prefix_cache
        return {**self.runner.report(), "prefix_cache": None if cache is None else cache.report()}

    def reset_report(self) -> None:
        """Count steps and lookups from now on."""
        self.runner.reset_report()
        if self.scheduler.prefix_cache is not None:
            self.scheduler.prefix_cache.reset_counts()

    def step(self) -> list[RequestOutput]:
        """Launch the next step and accept what is due; return a snapshot of each request that changed (only
        the last one if it does not stream)."""
        return [active.snapshot() for active in self._advance()]

    def step_deltas(self) -> list[ChoiceDelta]:
        """``step``, but returns what is new in each choice. One engine is driven by one of the two."""
        return [delta for active in self._advance() for delta in active.take_deltas()]

    def _advance(self) -> list[_Active]:
        """Launch the next step and accept what is due; the requests that have something to tell."""
        self._is_sound = False
        try:
            self._run_step()
            return self._collect()
        except BaseException as error:
            if not self._is_sound:
                self._start_over(error)
            raise

    def _run_step(self) -> None:
        self.scheduler.prompts_first = self._favors_throughput and not self._streaming
        batch = self.scheduler.schedule()
        if batch is not None:
            self._launch(batch)
        else:
            assert self._in_flight or not self.scheduler.has_unfinished, (
                "nothing can be scheduled, yet requests are unfinished"
            )
        may_run_ahead = batch is not None and not batch.is_host_dependent
        self._finish_steps(most_in_flight=self.runner.max_steps_ahead if may_run_ahead else 0)
        if not self.scheduler.has_unfinished:
            self._finish_steps(most_in_flight=0)

    def _launch(self, batch: ScheduledBatch) -> None:
        try:
            if self._media is not None:
                self._prepare_media(self._media, batch)
            self._in_flight.append((batch, self.runner.launch(batch)))
        except BaseException as error:
            self._finish_steps(most_in_flight=0)  # steps end in order
            self._fail(batch, error)
            self.scheduler.complete(batch)
            if not isinstance(error, Exception):
                self._is_sound = True
                raise
        else:
            self.scheduler.launched(batch)

    def _prepare_media(self, media: MediaFeed, batch: ScheduledBatch) -> None:
        """Sequences whose images cannot be encoded end before the step is launched, so that nobody finds in
        the cache what they leave in their blocks."""
        for position, error in media.prepare(batch).items():
            self._finish(batch.entries[position].sequence, error=error)

    def _finish_steps(self, *, most_in_flight: int) -> None:
        while len(self._in_flight) > most_in_flight:
            batch, pending = self._in_flight.popleft()
            result: StepResult | None = None
            try:
                result = pending.wait()
                num_sampled = len(batch.sampled_positions)
                if len(result.token_ids) != num_sampled:
                    raise RuntimeError(
                        f"the runner drew {len(result.token_ids)} tokens for {num_sampled} sequences"
                    )
                self._accept(batch, result)
                self.num_failed_steps = 0
            except BaseException as error:
                if result is not None and not isinstance(error, Exception):
                    raise  # half accepted
                self._fail(batch, error)
                self.scheduler.distrust(batch)
                if not isinstance(error, Exception):
                    self._is_sound = True
                    raise
            finally:
                self.scheduler.complete(batch)

    def _accept(self, batch: ScheduledBatch, result: StepResult) -> None:
        entries, errors, vocab_size = batch.entries, result.errors, self.runner.vocab_size
        if result.prompt_logprobs or result.pooled:
            self._accept_taps(batch, result)
        for position in errors:
            if not entries[position].is_stale:
                self._finish(entries[position].sequence, error=errors[position])
        drawn = zip(batch.sampled_entries, result.token_ids, result.logprobs or repeat(None), strict=False)
        for (sequence, _, _, _, generation, _), token_id, candidates in drawn:  # once for each token: lean
            if sequence.generation != generation or sequence.state is SequenceState.FINISHED:
                continue  # stale
            if not 0 <= token_id < vocab_size:
                message = f"the sampler drew token {token_id}, which is not in the vocabulary"
                self._finish(sequence, error=message)
                continue
            choice = self._choices[sequence]
            try:
                finish = choice.accept(token_id, candidates)
            except Exception as error:  # of the tokenizer: this text cannot be made, the others can
                self._finish(sequence, error=_text_error(error))
                continue
            if finish is not None:
                self.scheduler.finish(sequence, reason=finish.reason, stop_reason=finish.stop_reason)
            if finish is not None or choice.streams:
                self._mark_changed(sequence)

    def _accept_taps(self, batch: ScheduledBatch, result: StepResult) -> None:
        for position, rows in result.prompt_logprobs.items():
            entry = batch.entries[position]
            if not entry.is_stale:
                self._choices[entry.sequence].accept_prompt_logprobs(entry.start + 1, rows)
        for position, values in result.pooled.items():
            entry = batch.entries[position]
            if not entry.is_stale:
                self._choices[entry.sequence].embedding = values

    def _fail(self, batch: ScheduledBatch, error: BaseException) -> None:
        self.num_failed_steps += 1
        if isinstance(error, Exception):
            logger.error("step %d with %d sequences failed", batch.step_id, batch.num_reqs, exc_info=error)
            message = f"step {batch.step_id} failed: {type(error).__name__}: {error}"
        else:
            message = f"step {batch.step_id} was interrupted"
        for entry in batch.entries:
            if not entry.is_stale:
                self._finish(entry.sequence, error=message)

    def _start_over(self, error: BaseException) -> None:
        """The bookkeeping was interrupted half-way, so nothing of it can be relied on: what waits goes on
        waiting, what ran ends with an error, and all blocks are free."""
        message = f"a step was interrupted while the engine worked on it: {type(error).__name__}"
        while self._in_flight:
            _, pending = self._in_flight.popleft()
            with suppress(Exception):  # of a step whose sequences end here anyway
                pending.wait()
        self.scheduler = self.scheduler.renewed()
        if self._media is not None:
            self._media.release_all()
        for request_id, active in self._active.items():
            for choice in active.choices:
                sequence = choice.sequence
                if sequence.finish_reason is None and not self.scheduler.add_again(sequence):
                    sequence.state, sequence.block_table = SequenceState.FINISHED, []
                    sequence.finish_reason, sequence.error = "error", message
                if sequence.is_finished:
                    self._choices.setdefault(sequence, choice)  # to be closed, if that was interrupted
                    self._changed[request_id] = active

    def _finish(self, sequence: Sequence, *, error: str) -> None:
        self.scheduler.finish(sequence, reason="error", error=error)
        self._mark_changed(sequence)

    def _mark_changed(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        self._changed[request_id] = self._active[request_id]

    def _collect(self) -> list[_Active]:
        """The requests that have something to tell."""
        telling = []
        changed, self._changed = self._changed, {}  # an abort meanwhile belongs to the next step
        for request_id, active in changed.items():
            if self._active.get(request_id) is not active:
                continue  # aborted while its last output was being collected
            is_finished = True
            for choice in active.choices:
                if not choice.sequence.is_finished:
                    is_finished = False
                elif self._choices.pop(choice.sequence, None) is not None:
                    self._close(choice)
            if is_finished:
                del self._active[request_id]
                self._streaming.discard(request_id)
            if is_finished or active.streams:
                telling.append(active)
        return telling

    def _close(self, choice: Choice) -> None:
        try:
            choice.close()
        except Exception as error:
            sequence = choice.sequence
            sequence.finish_reason, sequence.error = "error", sequence.error or _text_error(error)

    def _take_runner(self) -> None:
        """Nobody else may run steps as long as this engine has requests: each engine hands out all blocks of
        the runner's cache, and the device knows the tokens of the step launched last only."""
        last = _in_charge.get(self.runner)
        other = None if last is None else last()
        if other is not None and other is not self and other.has_unfinished():
            raise GaplessError(
                f"another engine has {len(other._active)} unfinished request(s) on this runner, and two at "
                "once would overwrite each other's KV cache; finish or abort those first (abort_all, then "
                "step until has_unfinished is false), or give all requests to one engine"
            )
        if other is not self:
            self.reset_prefix_cache()  # somebody else has written to the blocks
        _in_charge[self.runner] = weakref.ref(self)


_in_charge: weakref.WeakKeyDictionary[StepRunner, weakref.ref[EngineCore]] = weakref.WeakKeyDictionary()
"""Which engine has used a runner last."""


def _decode_token(tokenizer: TokenizerLike | None, token_id: int) -> str | None:
    return None if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)


def _text_error(error: Exception) -> str:
    return f"the tokens cannot be turned into text: {type(error).__name__}: {error}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Active:
    """A request that has not been returned as finished yet."""

    request: Request
    choices: list[Choice]
    streams: bool

    def snapshot(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[choice.snapshot() for choice in self.choices],
            prompt_logprobs=self.choices[0].prompt_logprobs,
            num_cached_tokens=self.choices[0].sequence.num_cached_tokens,
        )

    def take_deltas(self) -> list[ChoiceDelta]:
        return [delta for choice in self.choices if (delta := choice.take_delta()) is not None]

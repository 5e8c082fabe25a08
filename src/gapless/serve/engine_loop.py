"""The loop around the engine: messages in, steps, deltas out.

It never waits for a message while there is work, and waits for nothing else when there is none, so an idle
engine costs nothing and a busy one looks at its inbox once per step: an abort frees its blocks before the
next step. Grammars compile in threads meanwhile, and their requests enter the engine afterwards. Invariants:
every request that came in gets its last delta, or one ``Refused``; whatever goes wrong with one request is
told to that request; an error of the loop itself leaves ``run``, for the process to report. Read
``engine_process.py`` for what surrounds it, ``engine/core.py`` for a step.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gapless.engine.core import EngineCore
from gapless.engine.grammar import CompiledGrammar
from gapless.engine.outputs import ChoiceDelta, FinishReason, Logprob
from gapless.engine.request import Sequence as RequestSequence
from gapless.engine.request import SequenceState
from gapless.errors import GaplessError, RequestError
from gapless.sampling.params import SamplingParams
from gapless.sampling.structured import StructuredOutputsParams
from gapless.serve.messages import (
    AbortRequest,
    Answer,
    Delta,
    Embedding,
    EmbedRequest,
    FromEngine,
    GenerateRequest,
    Grammar,
    Heartbeat,
    Query,
    Refused,
    ResetPrefixCache,
    Shutdown,
    StepOutput,
    ToEngine,
    TokenLogprob,
)
from gapless.serve.recent_steps import RecentSteps
from gapless.serve.stats import EngineCounters, EngineStats, collect_stats

if TYPE_CHECKING:
    from gapless.graphs.report import StepLog

HEARTBEAT_S = 1.0
COMPILE_POLL_S = 0.005
MAX_COMPILE_S = 60.0
"""A grammar that is not compiled by then is refused."""
MAX_FAILED_STEPS = 8
"""After so many steps in a row that failed as a whole the device is taken for broken (a CUDA error stays)."""

logger = logging.getLogger(__name__)


class Channel(Protocol):
    """Where messages come from and go to."""

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """Everything that has arrived; when that is nothing, whatever arrives first within ``timeout_s``."""

    def send(self, message: FromEngine) -> None:
        """Never blocks."""


class EngineLoop:
    """Drives ``core`` from messages until it is told to shut down."""

    def __init__(
        self,
        core: EngineCore,
        channel: Channel,
        *,
        report: Callable[[], dict[str, Any]],
        log: StepLog | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core, self._channel = core, channel
        self._report, self._log = report, log
        self._heartbeat_s, self._clock = heartbeat_s, clock
        self._counters = EngineCounters()
        self._recent = RecentSteps(log)
        self._queue: deque[tuple[RequestSequence, float]] = deque()  # not in a step yet, and since when
        self._embedding_ids: set[str] = set()
        self._compiling: dict[str, _Compiling] = {}  # requests that wait for their grammar
        started = report()
        self._capture = {**started.get("memory", {}), "num_graphs": len(started.get("graphs", ()))}
        self._start_s = clock()
        self._next_beat_s = self._start_s
        self._deadline_s: float | None = None  # of the shutdown, once there is one

    def run(self) -> None:
        """Until ``Shutdown`` has been received and its work is done. Raises what the engine's own code
        raises."""
        while self._deadline_s is None or self._core.has_unfinished() or self._compiling:
            self._beat()
            self._core.check()
            for message in self._channel.receive(self._wait_s()):
                self._handle(message)
            if self._deadline_s is not None and self._clock() >= self._deadline_s:
                self._core.abort_all()
                for request_id in list(self._compiling):
                    self._abort(request_id)
            if self._compiling:
                self._start_compiled()
            if self._core.has_unfinished():
                self._step()

    def stats(self) -> EngineStats:
        stats = collect_stats(
            self._core,
            self._counters,
            log=self._log,
            capture=self._capture,
            uptime_s=self._clock() - self._start_s,
            recent_steps=self._recent.records,
        )
        stats["num_waiting"] += len(self._compiling)
        return stats

    def _wait_s(self) -> float:
        if self._core.has_unfinished():
            return 0.0
        longest = COMPILE_POLL_S if self._compiling else math.inf
        return max(0.0, min(longest, self._next_beat_s - self._clock()))

    def _beat(self) -> None:
        now = self._clock()
        if now >= self._next_beat_s:
            self._next_beat_s = now + self._heartbeat_s
            self._channel.send(Heartbeat(dict(self.stats())))

    def _handle(self, message: ToEngine) -> None:
        match message:
            case GenerateRequest():
                self._start_request(message)
            case AbortRequest():
                self._abort(message.request_id)
            case EmbedRequest():
                self._start_embedding(message)
            case Query():
                value = self._report() if message.what == "report" else dict(self.stats())
                self._channel.send(Answer(message.query_id, value))
            case ResetPrefixCache():
                self._core.reset_prefix_cache()
                self._channel.send(Answer(message.query_id, {}))
            case Shutdown():
                deadline_s = self._clock() + message.drain_s
                self._deadline_s = min(deadline_s, self._deadline_s or deadline_s)

    def _start_request(self, message: GenerateRequest) -> None:
        try:
            params = _sampling_params(message)
            compiling = self._compile_grammar(message.request_id, params)
            if compiling is not None and not compiling.done():
                deadline_s = self._clock() + MAX_COMPILE_S
                self._compiling[message.request_id] = _Compiling(message, compiling, deadline_s)
                return
            if compiling is not None:
                compiling.result()  # what has failed is forgotten, and would be compiled anew
            self._add(message, params, streams=message.stream)
        except RequestError as error:
            self._refuse(message.request_id, str(error))
        except Exception as error:  # a bug, of a tokenizer for instance: this request fails, others go on
            logger.error("request %s could not be started", message.request_id, exc_info=error)
            self._fail_request(message, f"{type(error).__name__}: {error}")

    def _compile_grammar(self, request_id: str, params: SamplingParams) -> Future[CompiledGrammar] | None:
        if params.structured_outputs is None:
            return None
        if request_id in self._compiling:
            raise RequestError(f"request_id={request_id!r} is already in use; wait until it has finished")
        return self._core.grammars.start(params.structured_outputs)

    def _start_compiled(self) -> None:
        """Requests whose grammar is ready enter the engine; those that have waited too long are refused."""
        for request_id, waiting in list(self._compiling.items()):
            if waiting.grammar.done():
                del self._compiling[request_id]
                error = waiting.grammar.exception()
                if error is None:
                    self._start_request(waiting.message)
                elif isinstance(error, RequestError):
                    self._refuse(request_id, str(error))
                else:
                    self._fail_request(waiting.message, f"{type(error).__name__}: {error}")
            elif self._clock() >= waiting.deadline_s:
                del self._compiling[request_id]
                self._refuse(
                    request_id,
                    f"the grammar takes more than {MAX_COMPILE_S:.0f} s to compile; make it smaller",
                )

    def _abort(self, request_id: str) -> None:
        waiting = self._compiling.pop(request_id, None)
        if waiting is None:
            self._core.abort_request(request_id)
        else:
            self._end_unstarted(waiting.message, "abort")

    def _start_embedding(self, message: EmbedRequest) -> None:
        """A request for one token that nobody sees; it batches with all others."""
        try:
            self._add(message, _EMBEDDING, streams=False)
        except RequestError as error:
            self._refuse(message.request_id, str(error))
        else:
            self._embedding_ids.add(message.request_id)

    def _add(self, message: GenerateRequest | EmbedRequest, params: SamplingParams, *, streams: bool) -> None:
        token_ids = message.prompt_token_ids
        media = message.media if isinstance(message, GenerateRequest) else None
        prompt = token_ids if media is None else media.prompt(token_ids)
        request = self._core.prepare(message.request_id, prompt, params, cache_extra=message.cache_extra)
        sequences = self._core.add(request, streams=streams)
        self._counters.prompt_tokens += len(token_ids)
        self._queue.append((sequences[0], self._clock()))

    def _fail_request(self, message: GenerateRequest, error: str) -> None:
        self._core.abort_request(message.request_id)
        self._end_unstarted(message, "error", error)

    def _end_unstarted(
        self, message: GenerateRequest, reason: FinishReason, error: str | None = None
    ) -> None:
        num_choices = message.params.get("n", 1)
        ends = [
            Delta(message.request_id, index, "", [], finish_reason=reason, error=error)
            for index in range(num_choices)
        ]
        self._channel.send(StepOutput(ends))

    def _refuse(self, request_id: str, message: str) -> None:
        self._counters.requests_refused += 1
        self._channel.send(Refused(request_id, message))

    def _step(self) -> None:
        start = self._clock()
        new = self._core.step_deltas()
        seconds = self._clock() - start
        self._counters.step_time_s.observe(seconds)
        self._counters.num_steps += 1
        self._recent.add(seconds)
        if self._queue:
            self._observe_queue(start)
        if new and self._embedding_ids:
            new = self._without_embeddings(new)
        if new:
            self._channel.send(StepOutput([self._delta(delta) for delta in new]))
        if self._core.num_failed_steps >= MAX_FAILED_STEPS:
            raise GaplessError(
                f"{self._core.num_failed_steps} steps in a row have failed, the device seems to be broken; "
                "see the log for the first of them"
            )

    def _observe_queue(self, start: float) -> None:
        """Requests enter steps in the order of their arrival."""
        while self._queue:
            sequence, arrived = self._queue[0]
            if sequence.state is SequenceState.WAITING and sequence.last_step_id < 0:
                return
            self._queue.popleft()
            if sequence.last_step_id >= 0:
                self._counters.queue_time_s.observe(start - arrived)

    def _without_embeddings(self, new: list[ChoiceDelta]) -> list[ChoiceDelta]:
        """Send the embeddings among them; each has one delta, its last."""
        text = []
        for delta in new:
            if delta.request_id not in self._embedding_ids:
                text.append(delta)
                continue
            self._embedding_ids.remove(delta.request_id)
            reason = delta.finish_reason or "error"
            self._counters.requests_finished[reason] += 1
            error = None if delta.embedding is not None else delta.error or f"it ended by {reason}"
            self._channel.send(Embedding(delta.request_id, delta.embedding or [], error))
        return text

    def _delta(self, new: ChoiceDelta) -> Delta:
        self._counters.generation_tokens += len(new.token_ids)
        if new.finish_reason is not None:
            self._counters.requests_finished[new.finish_reason] += 1
        logprobs = None if new.logprobs is None else [_candidates(step) for step in new.logprobs]
        prompt_logprobs = None
        if new.prompt_logprobs is not None:
            prompt_logprobs = [None if row is None else _candidates(row) for row in new.prompt_logprobs]
        return Delta(
            new.request_id,
            new.choice,
            new.text,
            new.token_ids,
            logprobs,
            new.finish_reason,
            new.stop_reason,
            new.error,
            prompt_logprobs,
            new.num_cached_tokens,
        )


_EMBEDDING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, pooling="last")


@dataclass(frozen=True, slots=True)
class _Compiling:
    """A request that enters the engine once its grammar has been compiled, beside the steps of others."""

    message: GenerateRequest
    grammar: Future[CompiledGrammar]
    deadline_s: float


def _sampling_params(message: GenerateRequest) -> SamplingParams:
    wanted = None if message.grammar is None else _structured_outputs(message.grammar)
    try:
        return SamplingParams(
            **message.params, prompt_logprobs=message.prompt_logprobs, structured_outputs=wanted
        )
    except TypeError as error:
        raise RequestError(f"sampling parameters: {error}") from None


def _structured_outputs(grammar: Grammar) -> StructuredOutputsParams:
    match grammar.kind:
        case "json_schema":
            return StructuredOutputsParams(json=grammar.text)
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "regex":
            return StructuredOutputsParams(regex=grammar.text)
        case "ebnf":
            return StructuredOutputsParams(grammar=grammar.text)


def _candidates(row: dict[int, Logprob]) -> list[TokenLogprob]:
    return [TokenLogprob(token, e.logprob, e.rank, e.decoded_token) for token, e in row.items()]

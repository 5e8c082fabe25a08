"""From logits to tokens: which rows need more than the greedy token the graph already holds, and doing it.

Greedy rows cost nothing here. Rows that sample go through a graph whose parameters (temperature, seed, token
index, filters) are static inputs. Penalties, banned ids and log-probabilities run eagerly on the few rows
concerned; each such step is counted with its reason. None of them needs a token that the host does not know:
penalties read counts that the device keeps (``penalties.py``). A draw depends on the seed and the token's
index only, never on the row or the size of the batch. Masks of grammars do need the last token: a step with
one is launched when the host knows it, and is counted as ``host_dependent_sampling``.
Invariant: whoever reads logits is among the ``LogitReaders`` that were found before the step was launched,
because graphs write logits only where there are some.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from gapless.engine.grammar_masks import GrammarMasks
from gapless.engine.graph_set import INVALID_TOKEN, GraphSet, greedy_or_invalid
from gapless.engine.penalties import PenaltyTable
from gapless.engine.readback import Readback, ReadbackRing
from gapless.engine.row_graphs import RowGraphs
from gapless.engine.step import PendingStep, ScheduledSequence, StepResult, TokenLogprob
from gapless.graphs.modes import Phase
from gapless.graphs.report import StepLog
from gapless.sampling.params import SamplingParams
from gapless.sampling.sampler import mask_tokens, to_device, token_logprobs

HOST_DEPENDENT_SAMPLING = "host_dependent_sampling"
"""A grammar's mask needs the last token on the host, so the step could not be launched ahead."""
_NAN_LOGITS = "the model produced NaN logits for this request"


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitReaders:
    """Who reads the logits of a step: rows by what is done with them, in the order of the sampled entries."""

    is_sampled: bool
    """Some row is not greedy; the draw then reads all rows, also those of greedy requests."""
    penalised: list[int]
    banned: list[int]
    """Rows some of whose tokens would end the choice before ``min_tokens``."""
    constrained: list[int]
    """By a grammar."""
    asking: list[int]
    """For log-probabilities."""


def find_logit_readers(entries: Seq[ScheduledSequence], params: list[SamplingParams]) -> LogitReaders | None:
    """None if the best token of each row is all that is drawn of ``entries``, those of a step that sample.
    ``params`` are theirs, each object once."""
    is_sampled = not all(p.is_greedy for p in params)
    penalised: list[int] = []
    if any(p.has_penalties for p in params):
        penalised = [r for r, e in enumerate(entries) if e.sequence.params.has_penalties]
    banned: list[int] = []
    if any(p.min_tokens for p in params):
        banned = [r for r, e in enumerate(entries) if _banned_ids(e)]
    constrained: list[int] = []
    if any(p.structured_outputs is not None for p in params):
        constrained = [r for r, e in enumerate(entries) if e.sequence.matcher is not None]
    asking: list[int] = []
    if any(p.logprobs is not None for p in params):
        asking = [r for r, e in enumerate(entries) if e.sequence.params.logprobs is not None]
    if not (is_sampled or penalised or banned or constrained or asking):
        return None
    return LogitReaders(
        is_sampled=is_sampled, penalised=penalised, banned=banned, constrained=constrained, asking=asking
    )


class TokenDrawer:
    """Draws one token per sampled entry from the shared logits buffer."""

    def __init__(self, graphs: GraphSet, rows: RowGraphs, log: StepLog) -> None:
        self._graphs, self._rows, self._log = graphs, rows, log
        self._readback = ReadbackRing(graphs.limits.max_num_reqs, graphs.store.device, graphs.store.peers)
        self._penalties = PenaltyTable(
            max_num_reqs=graphs.limits.max_num_reqs,
            vocab_size=graphs.vocab_size,
            torch_device=graphs.store.device.torch_device,
            has_fused_kernels=graphs.has_fused_sampling,
        )
        self._grammar_masks = GrammarMasks(
            max_num_reqs=graphs.limits.max_num_reqs,
            vocab_size=graphs.vocab_size,
            torch_device=graphs.store.device.torch_device,
            has_fused_kernels=graphs.has_fused_sampling,
        )

    def draw(
        self,
        entries: Seq[ScheduledSequence],
        positions: Seq[int],
        greedy_R: Tensor,
        *,
        readers: LogitReaders | None,
    ) -> PendingStep:
        """``entries[r]`` samples from logits row ``r`` and is number ``positions[r]`` of its batch.
        ``readers`` are what ``find_logit_readers`` has found: without any the logits may be of another step.

        ``greedy_R`` holds the best tokens. The tokens also stay on the device, in the first rows of the
        shared buffer, for a next step that is launched before the host has seen them.
        """
        if readers is None:
            return DrawnTokens(self._readback.start(greedy_R), positions, None, {})
        logits_RV = self._graphs.logits[: len(entries)]
        asking, constrained = readers.asking, readers.constrained
        index_K = to_device(np.asarray(asking), logits_RV.device) if asking else None
        raw_KV = None if index_K is None else logits_RV[index_K]  # before it is adjusted: the model's own
        self._adjust(entries, readers, logits_RV)
        errors: dict[int, str] = {}
        if constrained:
            errors = self._constrain(entries, constrained, logits_RV)
        tokens_R = greedy_R
        is_adjusted = bool(readers.penalised or readers.banned or constrained)
        if readers.is_sampled or (is_adjusted and self._graphs.has_fused_sampling):
            tokens_R = self._sample(entries)
        elif is_adjusted:
            tokens_R = self._graphs.tokens[: len(entries)].copy_(greedy_or_invalid(logits_RV))
        if readers.penalised:
            self._penalties.count(tokens_R)
        logprobs = None
        if index_K is not None and raw_KV is not None:
            self._log.count_eager(Phase.SAMPLE, "logprobs")
            logprobs = _start_logprobs(entries, asking, raw_KV, tokens_R[index_K])
        return DrawnTokens(
            self._readback.start(tokens_R), positions, logprobs, {positions[r]: e for r, e in errors.items()}
        )

    def _sample(self, entries: Seq[ScheduledSequence]) -> Tensor:
        params = [e.sequence.params for e in entries]
        values: dict[str, np.ndarray] = {
            "temperature": np.asarray([0.0 if p.is_greedy else p.temperature for p in params], np.float32),
            "seed": np.asarray([e.sequence.seed for e in entries], np.int64),
            "index": np.asarray([_output_index(e) for e in entries], np.int32),
        }
        filtered = any(p.top_k > 1 or p.top_p < 1.0 or p.min_p > 0.0 for p in params)
        if not filtered:
            return self._rows.run(self._graphs.sample, values, len(entries))[0]
        values["top_k"] = np.asarray([max(p.top_k, 0) for p in params], np.int32)
        values["top_p"] = np.asarray([p.top_p for p in params], np.float32)
        values["min_p"] = np.asarray([p.min_p for p in params], np.float32)
        return self._rows.run(self._graphs.sample_filtered, values, len(entries))[0]

    def _adjust(self, entries: Seq[ScheduledSequence], readers: LogitReaders, logits_RV: Tensor) -> None:
        """Penalise and mask the logits of the rows concerned, in place; a grammar masks its own."""
        if readers.penalised:
            self._log.count_eager(Phase.SAMPLE, "penalties")
            self._penalties.apply(entries, readers.penalised, logits_RV)
        banned = [r for r in readers.banned if entries[r].sequence.matcher is None]
        if banned:
            self._log.count_eager(Phase.SAMPLE, "min_tokens")
            mask_tokens(logits_RV, [(r, sorted(_banned_ids(entries[r]))) for r in banned])

    def _constrain(
        self, entries: Seq[ScheduledSequence], rows: list[int], logits_RV: Tensor
    ) -> dict[int, str]:
        """Leave the tokens that fit each row's grammar, in place; what went wrong, by row.

        The grammar is stronger than ``min_tokens``: where only the end fits, the end is drawn.
        """
        self._log.count_eager(Phase.SAMPLE, HOST_DEPENDENT_SAMPLING)
        banned = {r: ids for r in rows if (ids := _banned_ids(entries[r]))}
        return self._grammar_masks.apply(entries, rows, logits_RV, banned=banned)


def _start_logprobs(
    entries: Seq[ScheduledSequence], asking: list[int], logits_KV: Tensor, tokens_K: Tensor
) -> Callable[[], list[list[TokenLogprob] | None]]:
    """Of the rows that ask for them; computed now, read when the step is waited for."""
    wanted = [entries[r].sequence.params.logprobs or 0 for r in asking]
    computed = token_logprobs(logits_KV, tokens_K.clamp(min=0), max(wanted))
    num_rows = len(entries)

    def read() -> list[list[TokenLogprob] | None]:
        values, ids, ranks = (t.tolist() for t in computed)
        result: list[list[TokenLogprob] | None] = [None] * num_rows
        for place, (row, k) in enumerate(zip(asking, wanted, strict=True)):
            items = zip(ids[place][: k + 1], values[place], ranks[place], strict=False)
            result[row] = [TokenLogprob(*item) for item in items]
        return result

    return read


class DrawnTokens:
    """A step whose tokens are on their way to the host. Implements ``PendingStep``."""

    def __init__(
        self,
        readback: Readback,
        positions: Seq[int],
        logprobs: Callable[[], list[list[TokenLogprob] | None]] | None,
        errors: dict[int, str],
    ) -> None:
        self._readback, self._positions, self._logprobs = readback, positions, logprobs
        self._errors = errors

    def wait(self) -> StepResult:
        token_ids = self._readback.wait()
        logprobs = None if self._logprobs is None else self._logprobs()
        errors = self._errors
        if INVALID_TOKEN in token_ids:
            invalid = [self._positions[r] for r, token in enumerate(token_ids) if token == INVALID_TOKEN]
            errors = {**dict.fromkeys(invalid, _NAN_LOGITS), **errors}
        return StepResult(token_ids=token_ids, logprobs=logprobs, errors=errors)


def _output_index(entry: ScheduledSequence) -> int:
    """Which output token of its sequence is drawn (from 0), also while earlier ones are unknown here."""
    return entry.end - entry.sequence.num_prompt_tokens


def _banned_ids(entry: ScheduledSequence) -> frozenset[int]:
    """What would end the choice before ``min_tokens``."""
    if _output_index(entry) < entry.sequence.params.min_tokens:
        return entry.sequence.request.stop_token_ids
    return frozenset()

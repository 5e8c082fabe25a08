"""From logits to tokens: which rows need more than the greedy token the graph already holds, and doing it.

Greedy rows cost nothing here. Rows that sample go through a graph whose parameters (temperature, seed, token
index, filters) are static inputs. Penalties, banned ids and log-probabilities depend on host-side token lists
and run eagerly on the few rows concerned; each such step is counted with its reason. A draw depends on the
seed and the token's index only, never on the row or the size of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from gapless.engine.graph_set import INVALID_TOKEN, GraphSet, greedy_or_invalid
from gapless.engine.readback import Readback, ReadbackRing
from gapless.engine.request import distinct_params
from gapless.engine.row_graphs import RowGraphs
from gapless.engine.step import PendingStep, ScheduledSequence, StepResult, TokenLogprob
from gapless.graphs.modes import Phase
from gapless.graphs.report import StepLog
from gapless.sampling.sampler import apply_penalties, mask_tokens, token_logprobs

_NAN_LOGITS = "the model produced NaN logits for this request"


class TokenDrawer:
    """Draws one token per sampled entry from the shared logits buffer."""

    def __init__(self, graphs: GraphSet, rows: RowGraphs, log: StepLog) -> None:
        self._graphs, self._rows, self._log = graphs, rows, log
        self._readback = ReadbackRing(graphs.limits.max_num_reqs, graphs.store.device)

    def draw(self, entries: Seq[ScheduledSequence], positions: Seq[int], greedy_R: Tensor) -> PendingStep:
        """``entries[r]`` samples from logits row ``r`` and is number ``positions[r]`` of its batch.

        ``greedy_R`` holds the best tokens. The tokens also stay on the device, in the first rows of the
        shared buffer, for a next step that is launched before the host has seen them.
        """
        logits_RV = self._graphs.logits[: len(entries)]
        params = distinct_params(e.sequence for e in entries)
        asks_logprobs = any(p.logprobs is not None for p in params)
        raw_RV = logits_RV
        adjusted: list[int] = []
        if any(p.has_penalties or p.min_tokens for p in params):
            adjusted = [r for r, e in enumerate(entries) if _needs_adjusting(e)]
        if adjusted:
            if asks_logprobs:
                raw_RV = logits_RV.clone()  # log-probabilities are the model's own
            self._adjust(entries, adjusted, logits_RV)
        tokens_R = greedy_R
        if not all(p.is_greedy for p in params):
            tokens_R = self._sample(entries)
        elif adjusted:
            tokens_R = self._graphs.tokens[: len(entries)].copy_(greedy_or_invalid(logits_RV))
        logprobs = None
        if asks_logprobs:
            self._log.count_eager(Phase.SAMPLE, "logprobs")
            logprobs = self._logprobs(entries, raw_RV, tokens_R)
        return DrawnTokens(self._readback.start(tokens_R), list(positions), logprobs)

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

    def _adjust(self, entries: Seq[ScheduledSequence], rows: list[int], logits_RV: Tensor) -> None:
        """Write penalised and masked logits back into the rows concerned, in place."""
        device = logits_RV.device
        penalised = [r for r in rows if entries[r].sequence.params.has_penalties]
        if penalised:
            self._log.count_eager(Phase.SAMPLE, "penalties")
            index = torch.tensor(penalised, device=device)
            params = [entries[r].sequence.params for r in penalised]
            logits_RV[index] = apply_penalties(
                logits_RV[index],
                prompt_ids=[entries[r].sequence.request.prompt_token_ids for r in penalised],
                output_ids=[entries[r].sequence.output_token_ids for r in penalised],
                repetition_R=torch.tensor([p.repetition_penalty for p in params], device=device),
                presence_R=torch.tensor([p.presence_penalty for p in params], device=device),
                frequency_R=torch.tensor([p.frequency_penalty for p in params], device=device),
            )
        banned = [(r, ids) for r in rows if (ids := _banned_ids(entries[r]))]
        if banned:
            self._log.count_eager(Phase.SAMPLE, "min_tokens")
            mask_tokens(logits_RV, [(r, sorted(ids)) for r, ids in banned])

    def _logprobs(
        self, entries: Seq[ScheduledSequence], logits_RV: Tensor, tokens_R: Tensor
    ) -> Callable[[], list[list[TokenLogprob] | None]]:
        """Computed now, read when the step is waited for."""
        wanted = [e.sequence.params.logprobs for e in entries]
        most = max(k for k in wanted if k is not None)
        computed = token_logprobs(logits_RV, tokens_R.clamp(min=0), most)

        def read() -> list[list[TokenLogprob] | None]:
            values, ids, ranks = (t.tolist() for t in computed)
            return [
                None
                if k is None
                else [TokenLogprob(*item) for item in zip(ids[r][: k + 1], values[r], ranks[r], strict=False)]
                for r, k in enumerate(wanted)
            ]

        return read


class DrawnTokens:
    """A step whose tokens are on their way to the host. Implements ``PendingStep``."""

    def __init__(
        self,
        readback: Readback,
        positions: list[int],
        logprobs: Callable[[], list[list[TokenLogprob] | None]] | None,
    ) -> None:
        self._readback, self._positions, self._logprobs = readback, positions, logprobs

    def wait(self) -> StepResult:
        token_ids = self._readback.wait()
        logprobs = None if self._logprobs is None else self._logprobs()
        errors = {
            self._positions[r]: _NAN_LOGITS for r, token in enumerate(token_ids) if token == INVALID_TOKEN
        }
        return StepResult(token_ids=token_ids, logprobs=logprobs, errors=errors)


def _output_index(entry: ScheduledSequence) -> int:
    """Which output token of its sequence is drawn (from 0), also while earlier ones are unknown here."""
    return entry.end - entry.sequence.num_prompt_tokens


def _banned_ids(entry: ScheduledSequence) -> frozenset[int]:
    """What would end the choice before ``min_tokens``."""
    if _output_index(entry) < entry.sequence.params.min_tokens:
        return entry.sequence.request.stop_token_ids
    return frozenset()


def _needs_adjusting(entry: ScheduledSequence) -> bool:
    return entry.sequence.params.has_penalties or bool(_banned_ids(entry))

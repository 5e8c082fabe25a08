"""What a request may want of the hidden states besides its next token: scores of its own prompt, or the last
state itself as an embedding.

Both read what a prefill step leaves behind of its tokens, chunk by chunk, so they work with every strategy
and batch with everything else. The head, and a tail if there is one, run eagerly over the prompt's rows, a
block at a time (a vocabulary of 150,000 takes 0.6 MB a row), and each such step is counted. Invariant: a step
with taps never runs as a decode graph, which keeps its hidden states to itself. Read ``runner.py`` next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gapless.engine.graph_set import GraphSet
from gapless.engine.step import PendingStep, ScheduledBatch, ScheduledSequence, StepResult, TokenLogprob
from gapless.graphs.modes import Phase
from gapless.graphs.report import StepLog
from gapless.sampling.sampler import token_logprobs

_ROWS_AT_ONCE = 32


class Tap(NamedTuple):
    """``entry`` is number ``position`` of its batch; its tokens begin at ``row`` of the hidden states."""

    position: int
    row: int
    entry: ScheduledSequence


def find_taps(batch: ScheduledBatch) -> list[Tap]:
    """The entries of a step that want hidden states; nearly always none."""
    if batch.run is not None and not any(params.pooling for params in batch.sampling_params):
        return []
    taps = []
    row = 0
    for position, entry in enumerate(batch.entries):
        params = entry.sequence.params
        if (params.pooling and entry.samples) or (params.prompt_logprobs is not None and _num_scored(entry)):
            taps.append(Tap(position, row, entry))
        row += entry.num_new_tokens
    return taps


class HiddenTaps:
    """Computes what taps want from the hidden states of the step that has just been launched."""

    def __init__(self, graphs: GraphSet, log: StepLog) -> None:
        self._graphs, self._log = graphs, log

    def read(self, taps: Sequence[Tap]) -> TapResults:
        """Launch all that ``taps`` want of the step that was launched last. Call it before the tokens' way to
        the host begins: whoever has waited for the tokens may then read this too."""
        scores: dict[int, Callable[[], list[list[TokenLogprob]]]] = {}
        pooled: dict[int, Tensor] = {}
        for position, row, entry in taps:
            params = entry.sequence.params
            if params.prompt_logprobs is not None and (count := _num_scored(entry)):
                scores[position] = self._score(row, count, entry, params.prompt_logprobs)
            if params.pooling and entry.samples:
                end = row + entry.num_new_tokens
                last_E = self._graphs.hidden_between(end - 1, end)[0].float()
                pooled[position] = last_E / last_E.norm().clamp(min=1e-12)
        if scores:
            self._log.count_eager(Phase.HEAD, "prompt_logprobs")
        if pooled and self._graphs.has_tail:
            self._log.count_eager(Phase.HEAD, "hidden_states")
        return TapResults(scores=scores, pooled=pooled)

    def _score(
        self, row: int, count: int, entry: ScheduledSequence, k: int
    ) -> Callable[[], list[list[TokenLogprob]]]:
        """Log-probabilities of the tokens that follow ``count`` rows from ``row`` on."""
        first = entry.start + 1
        targets = entry.sequence.token_ids[first : first + count]
        target_N = torch.tensor(targets, device=self._graphs.logits.device)
        blocks = []
        for target_R in target_N.split(_ROWS_AT_ONCE):
            hidden_RE = self._graphs.hidden_between(row, row + len(target_R))
            row += len(target_R)
            blocks.append(token_logprobs(self._graphs.head_eagerly(hidden_RE), target_R, k))

        def read() -> list[list[TokenLogprob]]:
            rows = []
            for block in blocks:
                for values, ids, ranks in zip(*(tensor.tolist() for tensor in block), strict=True):
                    rows.append([TokenLogprob(*c) for c in zip(ids, values, ranks, strict=True)])
            return rows

        return read


@dataclass(frozen=True, kw_only=True, slots=True)
class TapResults:
    """On the device still; by position in the batch."""

    scores: dict[int, Callable[[], list[list[TokenLogprob]]]]
    pooled: dict[int, Tensor]

    def of(self, step: PendingStep) -> TappedStep:
        return TappedStep(step=step, results=self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TappedStep:
    """A step with taps. Implements ``PendingStep``."""

    step: PendingStep
    results: TapResults

    def wait(self) -> StepResult:
        result = self.step.wait()
        return replace(
            result,
            prompt_logprobs={position: read() for position, read in self.results.scores.items()},
            pooled={position: vector.tolist() for position, vector in self.results.pooled.items()},
        )


def _num_scored(entry: ScheduledSequence) -> int:
    """How many of the entry's rows have a prompt token after them; of one choice, since all share it."""
    sequence = entry.sequence
    if sequence.index:
        return 0
    return max(0, min(entry.end, sequence.num_prompt_tokens - 1) - entry.start)

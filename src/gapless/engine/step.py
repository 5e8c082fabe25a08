"""What passes between the scheduler and the runner in one step, and the runner as the engine sees it.

The scheduler decides *which tokens of which sequences* are computed (``ScheduledBatch``); the runner computes
them and draws a token wherever an entry reaches the end of what is known (``StepResult``). Neither knows how
the other works: the runner never allocates blocks, the scheduler never sees a tensor. Invariant: the runner
reads blocks through ``entry.block_table``, not through the sequence, because a sequence may be aborted or
preempted while the step runs and the entry's table stays valid until the step has ended. Read ``runner.py``
(CUDA graphs) or ``core.py`` (the loop) next.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from gapless.engine.request import Sequence, SequenceState, distinct_params
from gapless.sampling.params import SamplingParams


class ScheduledSequence(NamedTuple):
    """Compute tokens ``start : start + num_new_tokens`` of one sequence.

    A named tuple because one is made for each sequence in each step, and a frozen dataclass takes three times
    as long. Their ids are ``sequence.token_ids[start : start + num_new_tokens]``. When steps overlap, the
    last one may not be known to the host yet (``start == len(token_ids)``): then it is the token drawn by the
    step before.
    """

    sequence: Sequence
    start: int
    num_new_tokens: int
    samples: bool
    """The chunk reaches the end of the known tokens, so a token is drawn from its last row."""
    generation: int
    block_table: list[int]
    """Covers at least ``start + num_new_tokens`` tokens; may grow, is never shortened or reused."""

    @property
    def end(self) -> int:
        return self.start + self.num_new_tokens

    @property
    def is_decode(self) -> bool:
        """One token in, one token out (a one-token prompt or a last chunk of one token computes the same)."""
        return self.num_new_tokens == 1 and self.samples

    @property
    def is_stale(self) -> bool:
        """The sequence was aborted or preempted after this was scheduled: its result must be dropped."""
        sequence = self.sequence
        return sequence.state is SequenceState.FINISHED or sequence.generation != self.generation


class DecodeRun:
    """Consecutive steps that decode the same sequences, each one token further and in the same order.

    Compared by identity: whoever keeps what he made of one step knows that only positions have moved on in
    the next, when its ``step_id`` is one higher.
    """

    __slots__ = ("num_steps_left", "params")

    def __init__(self, *, num_steps_left: int) -> None:
        self.num_steps_left = num_steps_left
        """Further steps before some sequence reaches its longest length."""
        self.params: list[SamplingParams] | None = None
        """What ``ScheduledBatch.sampling_params`` has found; the same in every step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledBatch:
    """One step. Decodes come first, then prefill chunks; each group in order of arrival, but where all are
    decodes the longest sequence comes first."""

    step_id: int
    entries: tuple[ScheduledSequence, ...]
    run: DecodeRun | None = None
    """What a step of pure decode belongs to, if its scheduler keeps account of that."""

    @property
    def num_reqs(self) -> int:
        return len(self.entries)

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_new_tokens for entry in self.entries)

    @property
    def is_decode(self) -> bool:
        """Pure decode: every entry is one. Anything else is a prefill step."""
        return self.run is not None or all(entry.is_decode for entry in self.entries)

    @property
    def sampled_entries(self) -> Seq[ScheduledSequence]:
        if self.run is not None:
            return self.entries
        return [entry for entry in self.entries if entry.samples]

    @property
    def sampled_positions(self) -> Seq[int]:
        """Where in ``entries`` the sampled ones are."""
        if self.run is not None:
            return range(len(self.entries))
        return [position for position, entry in enumerate(self.entries) if entry.samples]

    @property
    def is_host_dependent(self) -> bool:
        """Some entry's next mask depends on the token drawn here, so the host must know it first."""
        return any(params.structured_outputs is not None for params in self.sampling_params)

    @property
    def sampling_params(self) -> list[SamplingParams]:
        """Of the sampled entries, each object once."""
        run = self.run
        if run is None:
            return distinct_params(entry.sequence for entry in self.sampled_entries)
        if run.params is None:
            run.params = distinct_params(entry.sequence for entry in self.entries)
        return run.params


class TokenLogprob(NamedTuple):
    """One candidate at one position; ``rank`` 1 is the most likely."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """``token_ids`` and ``logprobs`` have one item per *sampled* entry, in the order of
    ``batch.sampled_entries``."""

    token_ids: list[int]
    logprobs: list[list[TokenLogprob] | None] | None = None
    """Per sampled entry: the drawn token first, then the ``params.logprobs`` best; None where not asked
    for."""
    prompt_logprobs: Mapping[int, list[list[TokenLogprob]]] = field(default_factory=dict)
    """Position in ``batch.entries`` → scores of the prompt tokens from ``entry.start + 1`` on."""
    pooled: Mapping[int, list[float]] = field(default_factory=dict)
    """Position in ``batch.entries`` → its embedding."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """Position in ``batch.entries`` → what went wrong for that entry alone (for example NaN logits)."""


class PendingStep(Protocol):
    """A step that was launched and may still be running."""

    def wait(self) -> StepResult:
        """Its tokens, once they are on the host. When it raises, nothing of the step is still running."""


class MediaFeed(Protocol):
    """What a step shows of images and videos, as the engine's loop sees it."""

    def prepare(self, batch: ScheduledBatch) -> Mapping[int, str]:
        """Make what ``batch``, which is launched next, needs. What went wrong, by position in its entries:
        those sequences must end."""

    def release(self, sequence: Sequence) -> None:
        """``sequence`` has ended or was preempted."""

    def release_all(self) -> None:
        """No sequence runs any more."""

    def forget(self) -> None:
        """Weights may have changed: nothing is kept that no running sequence needs."""

    def report(self) -> dict[str, Any]:
        """``embedding_cache`` and ``encoder``: what each did."""


class StepRunner(Protocol):
    """The engine's view of a model on a device. The facts are fixed when it is built."""

    num_blocks: int
    """Including the sink block."""
    block_size: int
    max_model_len: int
    max_num_reqs: int
    max_num_batched_tokens: int
    vocab_size: int

    max_steps_ahead: int
    """Steps that may be launched before the tokens of an earlier one are known; 0: one at a time."""

    @property
    def media(self) -> MediaFeed | None:
        """None for a model that takes text only."""

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Start one step. Entries whose last token the host does not know yet take it from the step launched
        just before. When it raises, nothing of this step is running."""

    def padded_eager(self) -> AbstractContextManager[None]:
        """Within the block every step runs without graphs on its padded size: the oracle of every graph."""

    def report(self) -> dict[str, Any]:
        """What ran as which graph, what ran eagerly and why."""

    def reset_report(self) -> None:
        """Forget the steps counted so far."""

    def shutdown(self) -> None:
        """Release graphs and memory. Safe to call twice."""

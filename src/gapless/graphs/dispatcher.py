"""Which graphs exist, and which of them serves a step. ``Dispatcher`` is the only source of truth for both.

Keys are built once from a plan, by the two functions at the end of this file, for capture and for lookup
alike, so a captured graph is always found. A *set* of graphs belongs to one phase (its ``owner``) and is
captured by one strategy:

- uniform sets (full decode): key ``(R * q, R, uniform=True)``; serve batches in which every query length is
  ``q``.
- token sets (breakable, piecewise, full prefill): key ``(T, min(T, max_reqs), uniform=False)``. The request
  count is a *capacity*, a function of the tokens, so one graph serves any number of requests with up to that
  many tokens.

A step prefers FULL over PIECEWISE over NONE, and within a mode the smallest graph that fits; decode steps may
use the token sets of prefill, never the reverse. Eligibility is decided here, before a single byte is staged,
and a step that runs eagerly says why.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from gapless.graphs.batch import BatchDescriptor, BatchShape
from gapless.graphs.graph_plan import PLANNED_PHASES, GraphPlan
from gapless.graphs.modes import Phase, RuntimeMode, Strategy

MAX_PADDING_RATIO = 2
MAX_PADDING_TOKENS = 64
"""A prefill graph over twice the real tokens *and* more than this many above them is slower than eager unless
measured otherwise."""


_MAX_KEPT = 4096
"""Decisions that are remembered."""


class EagerReason(enum.StrEnum):
    """Why a step runs without a graph."""

    MODE_NONE = "mode_none"
    """Graphs are off in both phases."""
    PHASE_DISABLED = "phase_disabled"
    EMPTY = "empty"
    """The step has no tokens."""
    LARGER_THAN_LARGEST = "larger_than_largest"
    TOO_MANY_REQUESTS = "too_many_requests"
    PADDING_TOO_LARGE = "padding_too_large"
    CASCADE = "cascade"
    """Shared-prefix attention cannot be in a full graph and no piecewise graph fits."""
    CAPTURE_FAILED = "capture_failed"
    HIDDEN_STATES = "hidden_states"
    """A decode-shaped step whose hidden states are wanted, which a decode graph does not give out. Counted
    of the head: the end of the last layer, for an embedding (``hidden_taps.py``)."""
    MEDIA_ROWS = "media_rows"
    """A decode-shaped step that ends a prompt in an image, whose rows a decode graph does not take."""
    LORA = "lora"
    """The batch uses adapters and no graph was captured with them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """What one step runs as. ``phase`` is the kind of step; ``owner`` the phase whose set holds the graph.

    With mode NONE there is a ``reason`` and no ``descriptor`` or ``owner``; otherwise the other way round.
    """

    mode: RuntimeMode
    phase: Phase
    descriptor: BatchDescriptor | None = None
    owner: Phase | None = None
    reason: EagerReason | None = None


class Dispatcher:
    """Make one with ``build``. ``drop`` and ``allow_padding`` are for start-up; ``dispatch`` never changes
    what it will say."""

    def __init__(
        self, plan: GraphPlan, *, max_reqs: int, sets: tuple[_GraphSet, ...], has_lora_graphs: bool
    ) -> None:
        self._plan, self._query_len = plan, plan.uniform_query_len
        self._max_reqs = max_reqs
        self._sets = sets
        self._has_lora_graphs = has_lora_graphs
        self._found: dict[tuple[bool, int, int, bool, bool], Dispatch] = {}
        """Decisions made since the sets last changed; serving asks the same few over and over."""
        self._last: tuple[tuple[int, ...], bool, bool, Dispatch] | None = None
        """The last question and its answer: lengths that are the same object need not be counted again."""
        self._by_phase = {
            phase: _in_order(sets, phase, plan.phase(phase).strategy.runtime_mode) for phase in PLANNED_PHASES
        }

    @classmethod
    def build(cls, plan: GraphPlan, *, max_reqs: int, with_lora: bool = False) -> Dispatcher:
        """All keys of ``plan``. ``max_reqs`` is the most requests one step can hold. ``with_lora``: every
        size gets a second graph, for batches that use adapters."""
        lora_cases = (False, True) if with_lora else (False,)
        sets = tuple(_graph_sets(plan, max_reqs=max_reqs, lora_cases=lora_cases))
        return cls(plan, max_reqs=max_reqs, sets=sets, has_lora_graphs=with_lora)

    def strategy(self, owner: Phase) -> Strategy:
        """How the graphs owned by ``owner`` are captured."""
        return self._plan.phase(owner).strategy

    def capture_descriptors(self, phase: Phase) -> tuple[BatchDescriptor, ...]:
        """Graphs owned by ``phase`` that exist (or are to be captured), largest first."""
        keys = (
            key for graph_set in self._sets if graph_set.owner is phase for key in graph_set.descriptors()
        )
        return tuple(sorted(keys, reverse=True))

    def drop(self, descriptor: BatchDescriptor, *, phase: Phase) -> None:
        """Forget a graph of ``phase`` whose capture failed; the next larger one serves its batches, or
        none."""
        self._forget()
        self._set_of(descriptor, phase).drop(descriptor)

    def allow_padding(self, descriptor: BatchDescriptor, *, up_to: int) -> None:
        """A prefill graph was measured: with up to ``up_to`` pad tokens it is still faster than an eager
        step."""
        self._forget()
        self._set_of(descriptor, Phase.PREFILL).allowed_padding[descriptor] = up_to

    def dispatch(self, shape: BatchShape) -> Dispatch:
        """The graph for this step, or the reason for running it eagerly."""
        lens, has_lora, uses_cascade = shape.query_lens, shape.has_lora, shape.uses_cascade
        last = self._last
        if last is not None and lens is last[0] and has_lora is last[1] and uses_cascade is last[2]:
            return last[3]  # as in every step of a decode run
        query_len, num_reqs = self._query_len, len(lens)
        if num_reqs == 1:
            (num_tokens,) = lens
            is_decode = num_tokens == query_len
        else:
            is_decode = shape.is_uniform(query_len)
            num_tokens = query_len * num_reqs if is_decode else sum(lens)
        question = (is_decode, num_tokens, num_reqs, has_lora, uses_cascade)
        found = self._found.get(question)
        if found is None:
            if len(self._found) >= _MAX_KEPT:
                self._found.clear()
            found = self._found[question] = self._decide(shape, is_decode=is_decode)
        if type(lens) is tuple:  # a list may be another question the next time
            self._last = lens, has_lora, uses_cascade, found
        return found

    def _decide(self, shape: BatchShape, *, is_decode: bool) -> Dispatch:
        """Depends on the counts and facts that ``dispatch`` asks by, and on nothing else of ``shape``."""
        phase = Phase.DECODE if is_decode else Phase.PREFILL
        reason = self._ineligible(shape, phase)
        if reason is not None:
            return Dispatch(mode=RuntimeMode.NONE, phase=phase, reason=reason)
        for graph_set in self._by_phase[phase]:
            found = graph_set.find(shape, limits_padding=not is_decode)
            if isinstance(found, EagerReason):
                reason = reason or found
            elif shape.uses_cascade and graph_set.mode is RuntimeMode.FULL:
                reason = EagerReason.CASCADE
            else:
                return Dispatch(mode=graph_set.mode, phase=phase, descriptor=found, owner=graph_set.owner)
        return Dispatch(mode=RuntimeMode.NONE, phase=phase, reason=reason)

    def _ineligible(self, shape: BatchShape, phase: Phase) -> EagerReason | None:
        if shape.num_tokens == 0:
            return EagerReason.EMPTY
        if not self._sets:
            return EagerReason.MODE_NONE
        if self._plan.phase(phase).strategy is Strategy.DISABLED:
            return EagerReason.PHASE_DISABLED
        if shape.num_reqs > self._max_reqs:
            return EagerReason.TOO_MANY_REQUESTS
        if shape.has_lora and not self._has_lora_graphs:
            return EagerReason.LORA
        return None

    def _forget(self) -> None:
        self._found.clear()
        self._last = None

    def _set_of(self, descriptor: BatchDescriptor, phase: Phase) -> _GraphSet:
        for graph_set in self._sets:
            if graph_set.owner is phase and descriptor in graph_set.descriptors():
                return graph_set
        raise KeyError(f"{descriptor} is not a graph of {phase}")


@dataclass(kw_only=True, slots=True)
class _GraphSet:
    """Graphs of one owner and one kind of key. A *count* is requests in a uniform set and tokens in a token
    set."""

    owner: Phase
    mode: RuntimeMode
    query_len: int | None
    """Of a uniform set; None for a token set."""
    max_reqs: int
    planned: tuple[int, ...]
    live: dict[bool, list[int]]
    """Counts whose graphs exist, ascending, by ``has_lora``."""
    allowed_padding: dict[BatchDescriptor, int] = field(default_factory=dict)

    def key(self, count: int, *, has_lora: bool) -> BatchDescriptor:
        if self.query_len is not None:
            return _uniform_key(count, query_len=self.query_len, has_lora=has_lora)
        return _token_key(count, max_reqs=self.max_reqs, has_lora=has_lora)

    def descriptors(self) -> Iterator[BatchDescriptor]:
        return (self.key(count, has_lora=lora) for lora, counts in self.live.items() for count in counts)

    def drop(self, descriptor: BatchDescriptor) -> None:
        counts = self.live[descriptor.has_lora]
        counts.remove(next(c for c in counts if self.key(c, has_lora=descriptor.has_lora) == descriptor))

    def find(self, shape: BatchShape, *, limits_padding: bool) -> BatchDescriptor | EagerReason:
        # A token graph has room for min(T, max_reqs) requests, so a batch with empty requests needs T >=
        # num_reqs.
        count = shape.num_reqs if self.query_len is not None else max(shape.num_tokens, shape.num_reqs)
        best, planned = _fit(self.live[shape.has_lora], count), _fit(self.planned, count)
        if planned is None:
            return EagerReason.LARGER_THAN_LARGEST
        if best is None:
            return EagerReason.CAPTURE_FAILED
        descriptor = self.key(best, has_lora=shape.has_lora)
        if not limits_padding or self._may_pad(descriptor, shape.num_tokens):
            return descriptor
        intended = self.key(planned, has_lora=shape.has_lora)
        if self._may_pad(intended, shape.num_tokens):
            return EagerReason.CAPTURE_FAILED
        return EagerReason.PADDING_TOO_LARGE

    def _may_pad(self, descriptor: BatchDescriptor, num_tokens: int) -> bool:
        padding = descriptor.num_tokens - num_tokens
        is_small = padding <= MAX_PADDING_TOKENS or descriptor.num_tokens <= MAX_PADDING_RATIO * num_tokens
        return is_small or padding <= self.allowed_padding.get(descriptor, 0)


def _graph_sets(plan: GraphPlan, *, max_reqs: int, lora_cases: tuple[bool, ...]) -> Iterator[_GraphSet]:
    prefill, decode, query_len = plan.prefill, plan.decode, plan.uniform_query_len
    decode_tokens = tuple(size * query_len for size in decode.ladder.sizes)

    def graph_set(owner: Phase, counts: tuple[int, ...], query_len: int | None = None) -> _GraphSet:
        planned = tuple(sorted(set(counts)))
        return _GraphSet(
            owner=owner,
            mode=plan.phase(owner).strategy.runtime_mode,
            query_len=query_len,
            max_reqs=max_reqs,
            planned=planned,
            live={case: list(planned) for case in lora_cases},
        )

    if prefill.strategy is not Strategy.DISABLED:
        yield graph_set(Phase.PREFILL, prefill.ladder.sizes + (decode_tokens if plan.is_one_set else ()))
    if decode.strategy is Strategy.DISABLED or plan.is_one_set:
        return
    if decode.strategy is Strategy.FULL:
        yield graph_set(Phase.DECODE, decode.ladder.sizes, query_len)
    else:
        yield graph_set(Phase.DECODE, decode_tokens)


def _in_order(sets: tuple[_GraphSet, ...], phase: Phase, highest: RuntimeMode) -> tuple[_GraphSet, ...]:
    """The sets that may serve ``phase``: the higher mode first, then the phase's own.

    ``highest`` is the mode of the phase's strategy: a phase that was planned piecewise never runs full.
    """
    usable = [s for s in sets if s.mode <= highest and (phase is Phase.DECODE or s.query_len is None)]
    return tuple(sorted(usable, key=lambda s: (-s.mode, s.owner is not phase)))


def _fit(counts: tuple[int, ...] | list[int], count: int) -> int | None:
    index = bisect_left(counts, count)
    return counts[index] if index < len(counts) else None


def _uniform_key(num_reqs: int, *, query_len: int, has_lora: bool) -> BatchDescriptor:
    return BatchDescriptor(
        num_tokens=num_reqs * query_len, num_reqs=num_reqs, uniform=True, has_lora=has_lora
    )


def _token_key(num_tokens: int, *, max_reqs: int, has_lora: bool) -> BatchDescriptor:
    return BatchDescriptor(
        num_tokens=num_tokens, num_reqs=min(num_tokens, max_reqs), uniform=False, has_lora=has_lora
    )

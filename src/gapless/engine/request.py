"""A request (one prompt) and its sequences (one per choice).

A ``Request`` never changes. A ``Sequence`` is the unit of scheduling: its known tokens, how many of them have
their keys and values in the cache, and its block table. Only the scheduler moves a sequence between states
and touches its blocks; only the core appends tokens. Invariant: ``num_computed_tokens <= num_tokens +
num_pending_tokens`` and the block table covers every computed token. ``generation`` grows at each preemption,
so a result that was computed for an earlier life of the sequence can be told apart and dropped. Read
``scheduler.py`` next.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

import numpy as np

from gapless.engine.grammar import CompiledGrammar, GrammarMatcher
from gapless.engine.outputs import FinishReason
from gapless.multimodal.items import MediaItem
from gapless.sampling.params import SamplingParams

_SEED_BITS = 64


class SequenceState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class MediaSpan(NamedTuple):
    """The prompt's tokens ``start : end`` are rows of ``item`` from number ``row`` on."""

    start: int
    end: int
    row: int
    item: MediaItem


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt as it came in, already validated."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_total_tokens: int
    """Prompt and output together: the smaller of the model's limit and ``prompt + max_tokens``."""
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end a choice: the request's own, and EOS unless it is ignored."""
    eos_token_ids: frozenset[int] = frozenset()
    """Those among them that mean "end of text" and are not reported as a stop reason."""
    grammar: CompiledGrammar | None = None
    """What the text of every choice must match."""
    grammar_end_ids: frozenset[int] = frozenset()
    """Tokens that may end a text once it matches."""
    cache_extra: bytes = b""
    """Names whatever changes keys and values besides the tokens: requests that differ here share no cache."""
    media: tuple[MediaItem, ...] = ()
    """Images and videos, in the order of their first placeholder among the prompt's tokens."""
    rope_positions_3T: np.ndarray | None = field(default=None, compare=False)
    """int32 position of every prompt token on three axes. None: its index on all of them."""
    rope_delta: int = 0
    """Token ``i`` behind the prompt has position ``i + rope_delta`` on all axes."""
    media_spans: tuple[MediaSpan, ...] = field(init=False, compare=False)
    """Where rows of media lie in the prompt, ascending."""
    media_end: int = field(init=False, compare=False)
    """Index behind the last placeholder; 0 without media."""
    prompt_ids: np.ndarray = field(init=False, compare=False, repr=False)
    """``prompt_token_ids`` as int32, never written."""
    given_ids: InitVar[np.ndarray | None] = None
    """``prompt_ids``, from a caller that has made them already."""

    def __post_init__(self, given_ids: np.ndarray | None) -> None:
        if given_ids is None:
            given_ids = np.fromiter(self.prompt_token_ids, dtype=np.int32, count=len(self.prompt_token_ids))
        object.__setattr__(self, "prompt_ids", given_ids)
        spans = sorted(_spans_of(self.media), key=lambda span: span.start) if self.media else []
        object.__setattr__(self, "media_spans", tuple(spans))
        object.__setattr__(self, "media_end", spans[-1].end if spans else 0)

    def media_within(self, start: int, end: int) -> Iterator[MediaSpan]:
        """The spans of which some row lies among the tokens ``start : end``; a long video has hundreds."""
        spans = self.media_spans
        for index in range(bisect_right(spans, start, key=lambda span: span.end), len(spans)):
            if spans[index].start >= end:
                return
            yield spans[index]


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """One choice of a request. Compared by identity."""

    request: Request
    index: int
    """Which choice of the request."""
    seed: int
    """Always set; signed 64-bit. A draw depends on it and on ``num_output_tokens`` only."""
    token_ids: list[int]
    """Prompt and output; only ever appended to."""
    arrival: int = -1
    """Order of arrival, given by the scheduler; unique, so it also serves as the sequence's name in a
    runner."""
    state: SequenceState = SequenceState.WAITING
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache once every scheduled step has finished."""
    num_pending_tokens: int = 0
    """Tokens drawn by steps in flight, not yet known to the host (0 when steps run one at a time)."""
    block_table: list[int]
    generation: int = 0
    last_step_id: int = -1
    """The latest step that touches this sequence's blocks."""
    admitted_step_id: int = -1
    """The first step of its present life."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Of its first full blocks, as far as they were needed; tokens never change, so they last."""
    num_published_blocks: int = 0
    """Blocks at the start of its table that others may find, or that it found."""
    cache_epoch: int = -1
    """Of the prefix cache, when this life began."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the cache when it first ran."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    matcher: GrammarMatcher | None = None
    """Has taken exactly the output tokens in ``token_ids``."""

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def is_finished(self) -> bool:
        return self.state is SequenceState.FINISHED

    def append_token(self, token_id: int) -> None:
        """A drawn token has become known."""
        self.token_ids.append(token_id)
        self.num_pending_tokens -= 1


def distinct_params(sequences: Iterable[Sequence]) -> list[SamplingParams]:
    """The parameters of ``sequences``, each object once: a batch of hundreds usually shares a single one, so
    what a step asks of all is asked of it alone."""
    return list({id(s.request.params): s.request.params for s in sequences}.values())


def make_sequences(request: Request, *, base_seed: int) -> list[Sequence]:
    """One sequence per choice; choice ``i`` draws with seed ``base_seed + i`` (wrapped to signed 64-bit)."""
    return [
        Sequence(
            request=request,
            index=index,
            seed=_wrap(base_seed + index),
            token_ids=list(request.prompt_token_ids),
            block_table=[],
            matcher=_make_matcher(request),
        )
        for index in range(request.params.n)
    ]


def _spans_of(items: Iterable[MediaItem]) -> Iterator[MediaSpan]:
    for item in items:
        row = 0
        for start, length in item.ranges:
            yield MediaSpan(start, start + length, row, item)
            row += length


def _make_matcher(request: Request) -> GrammarMatcher | None:
    return None if request.grammar is None else GrammarMatcher(request.grammar, request.grammar_end_ids)


def _wrap(seed: int) -> int:
    half = 1 << (_SEED_BITS - 1)
    return (seed + half) % (1 << _SEED_BITS) - half

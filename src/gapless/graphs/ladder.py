"""Capture sizes: which padded sizes get a graph, and the size that serves a batch of ``n``.

A ladder is an ascending tuple of sizes. Prefill ladders count tokens; decode ladders count requests (a graph
of ``r`` requests holds ``r * query_len`` tokens). The invariant, whoever made the list: integers above zero,
strictly ascending, none above what a step can reach, and each value that was asked for but left out is kept
in ``dropped`` with its reason. Sizes a caller lists are an order, so bad ones are errors; sizes made here
always contain their maximum. Read ``plan.py`` next: it decides which ladder each phase gets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, takewhile

from gapless.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """A size that was asked for and is not captured (or not as asked), and why."""

    size: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ladder:
    """Ascending capture sizes. ``is_explicit``: the caller listed them, so no size may be added later."""

    sizes: tuple[int, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    is_explicit: bool = False

    def __post_init__(self) -> None:
        assert all(a < b for a, b in zip((0, *self.sizes), self.sizes, strict=False)), self.sizes

    @property
    def largest(self) -> int:
        """The largest size; 0 for an empty ladder."""
        return self.sizes[-1] if self.sizes else 0

    def fit(self, n: int) -> int | None:
        """The smallest size that is at least ``n``; None above the largest."""
        index = bisect_left(self.sizes, n)
        return self.sizes[index] if index < len(self.sizes) else None

    def without(self, size: int, *, reason: str) -> Ladder:
        """The ladder without one size, which may leave it empty."""
        if size not in self.sizes:
            return self
        sizes = tuple(kept for kept in self.sizes if kept != size)
        return replace(self, sizes=sizes, dropped=(*self.dropped, Dropped(size=size, reason=reason)))

    def capped(self, limit: int, *, reason: str) -> Ladder:
        """The ladder without sizes above ``limit``, for limits known only later (the size of the KV cache).

        A ladder made here then ends at ``limit`` itself; a listed one only loses sizes. Raises
        ``ConfigError`` when nothing is left.
        """
        if self.largest <= limit:
            return self
        kept = [size for size in self.sizes if size <= limit]
        if not self.is_explicit and limit > 0 and limit not in kept:
            kept.append(limit)
        if not kept:
            raise ConfigError(f"no capture size of {list(self.sizes)} is left: {reason} (limit {limit})")
        lost = tuple(Dropped(size=size, reason=reason) for size in self.sizes if size > limit)
        return replace(self, sizes=tuple(kept), dropped=self.dropped + lost)


def prefill_ladder(
    *,
    limit: int,
    default_max: int | None = None,
    max_size: int | None = None,
    sizes: Sequence[int] | None = None,
    multiple_of: int = 1,
    sizes_name: str = "--cuda-graph-bs-prefill",
) -> Ladder:
    """Token counts: steps of 4 to 32, 16 to 256, 32 to 512, 64 to 1024, 256 to 4096, then 512.

    ``limit`` is the most tokens one step can hold. The ladder ends at ``max_size``, else at ``default_max``,
    else at ``limit``. ``multiple_of``: every size must divide by it (sequence parallelism), so steps are
    rounded up.
    """
    return _ladder(
        _prefill_steps(),
        limit=limit,
        top=max_size if max_size is not None else default_max,
        max_size=max_size,
        sizes=sizes,
        multiple_of=multiple_of,
        sizes_name=sizes_name,
        phase="prefill",
        limit_name="the most tokens of one step",
    )


def decode_ladder(
    *,
    max_reqs: int,
    max_size: int | None = None,
    sizes: Sequence[int] | None = None,
    multiple_of: int = 1,
    sizes_name: str = "--cuda-graph-bs-decode",
) -> Ladder:
    """Request counts: 1, 2, 4, 8, then steps of 8 to 256, then 16; up to ``max_size``, else ``max_reqs``."""
    return _ladder(
        _decode_steps(),
        limit=max_reqs,
        top=max_size,
        max_size=max_size,
        sizes=sizes,
        multiple_of=multiple_of,
        sizes_name=sizes_name,
        phase="decode",
        limit_name="the most requests of one step",
    )


def requests_from_tokens(
    sizes: Sequence[int], *, query_len: int, sizes_name: str
) -> tuple[tuple[int, ...], tuple[Dropped, ...]]:
    """Token sizes as request counts of ``query_len`` tokens each, rounded up to whole requests (and
    reported)."""
    values = _checked_sizes(sizes, sizes_name)
    rounded = tuple(
        Dropped(
            size=size,
            reason=f"not a multiple of the query length {query_len}: rounded up to "
            f"{_round_up(size, query_len)} tokens",
        )
        for size in values
        if size % query_len
    )
    return tuple(sorted({_round_up(size, query_len) // query_len for size in values})), rounded


def check_listed(phase: str, sizes: Sequence[int], max_size: int | None) -> None:
    """Raise ``ConfigError`` for an impossible size and for a maximum that disagrees with the list."""
    sizes_name = f"--cuda-graph-bs-{phase}"
    values = _checked_sizes(sizes, sizes_name)
    _check_maximum(values, max_size, sizes_name=sizes_name, max_name=f"--cuda-graph-max-bs-{phase}")


def _ladder(
    steps: Iterator[int],
    *,
    limit: int,
    top: int | None,
    max_size: int | None,
    sizes: Sequence[int] | None,
    multiple_of: int,
    sizes_name: str,
    phase: str,
    limit_name: str,
) -> Ladder:
    max_name = f"--cuda-graph-max-bs-{phase}"
    if max_size is not None:
        _check_positive(max_size, max_name)
    if sizes is not None:
        return _listed(
            sizes,
            limit=limit,
            max_size=max_size,
            multiple_of=multiple_of,
            sizes_name=sizes_name,
            phase=phase,
            limit_name=limit_name,
        )
    top = limit if top is None else top
    dropped: tuple[Dropped, ...] = ()
    if top > limit:
        dropped = (Dropped(size=top, reason=f"above {limit}, {limit_name}"),)
        top = limit
    if top % multiple_of:
        raise ConfigError(
            f"largest capture size {top} is not a multiple of {multiple_of}, which every size must be; "
            f"set {max_name} (and the limit {limit}) to a multiple such as {top // multiple_of * multiple_of}"
        )
    below_top = takewhile(lambda size: size < top, steps)
    rounded = {_round_up(size, multiple_of) for size in below_top} | {top}
    return Ladder(sizes=tuple(sorted(size for size in rounded if size <= top)), dropped=dropped)


def _listed(
    sizes: Sequence[int],
    *,
    limit: int,
    max_size: int | None,
    multiple_of: int,
    sizes_name: str,
    phase: str,
    limit_name: str,
) -> Ladder:
    values = _checked_sizes(sizes, sizes_name)
    _check_maximum(values, max_size, sizes_name=sizes_name, max_name=f"--cuda-graph-max-bs-{phase}")
    dropped: list[Dropped] = []
    kept: set[int] = set()
    for size in values:
        rounded = _round_up(size, multiple_of)
        if rounded > limit:
            dropped.append(Dropped(size=size, reason=f"above {limit}, {limit_name}"))
            continue
        if rounded != size:
            dropped.append(
                Dropped(size=size, reason=f"not a multiple of {multiple_of}: rounded up to {rounded}")
            )
        kept.add(rounded)
    if not kept:
        own_name = f"--cuda-graph-bs-{phase}"
        own_list = "" if sizes_name == own_name else f"or give {own_name} a list of its own, "
        raise ConfigError(
            f"{sizes_name}={list(values)}: every size is above {limit}, {limit_name}; list smaller sizes, "
            f"{own_list}or disable graphs for {phase}"
        )
    return Ladder(sizes=tuple(sorted(kept)), dropped=tuple(dropped), is_explicit=True)


def _check_maximum(values: list[int], max_size: int | None, *, sizes_name: str, max_name: str) -> None:
    if max_size is not None and max_size != values[-1]:
        raise ConfigError(
            f"{max_name}={max_size} disagrees with {sizes_name}, whose largest size is {values[-1]}; "
            "a list sets its own maximum, so leave one of the two out"
        )


def _checked_sizes(sizes: Sequence[int], name: str) -> list[int]:
    if not sizes:
        raise ConfigError(f"{name} is an empty list; list at least one size or disable graphs for this phase")
    for size in sizes:
        _check_positive(size, name)
    return sorted(set(sizes))


def _check_positive(value: object, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{name}: {value!r} is not a capture size; sizes are integers of at least 1")


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _prefill_steps() -> Iterator[int]:
    return chain(
        range(4, 33, 4),
        range(48, 257, 16),
        range(288, 513, 32),
        range(576, 1025, 64),
        range(1280, 4097, 256),
        count(4608, 512),
    )


def _decode_steps() -> Iterator[int]:
    return chain((1, 2, 4), range(8, 257, 8), count(272, 16))

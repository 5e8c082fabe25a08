"""Buckets: the padded sizes of a graphed callable, one ladder per dynamic dimension.

With one dimension a bucket is a size; with two it is a pair, and every pair of sizes is captured. More
dimensions are refused: their product is hundreds of graphs. A call is served by the smallest bucket that fits
in every dimension; a bucket whose capture failed is skipped. Read ``graphed.py`` next.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from gapless.errors import ConfigError
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.ladder import Ladder, prefill_ladder

MAX_SYMBOLS = 2

Sizes = int | Sequence[int]
"""The largest size (a default ladder ends there), or exactly these."""


class Buckets:
    """``ladders`` per symbol, in the order in which the inputs declare them."""

    def __init__(self, ladders: Mapping[str, Ladder]) -> None:
        self.ladders = dict(ladders)
        self._failed: set[BatchDescriptor] = set()

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(self.ladders)

    @property
    def max_sizes(self) -> dict[str, int]:
        return {symbol: ladder.largest for symbol, ladder in self.ladders.items()}

    def descriptors(self) -> list[BatchDescriptor]:
        """All buckets, largest first."""
        combinations = itertools.product(*(ladder.sizes for ladder in self.ladders.values()))
        return sorted(
            (self.descriptor(dict(zip(self.ladders, c, strict=True))) for c in combinations), reverse=True
        )

    def live_descriptors(self) -> list[BatchDescriptor]:
        """The buckets that have a graph."""
        return [descriptor for descriptor in self.descriptors() if descriptor not in self._failed]

    def descriptor(self, sizes: Mapping[str, int]) -> BatchDescriptor:
        """The key of exactly these sizes. The first symbol counts as tokens, the second as requests."""
        counts = [sizes[symbol] for symbol in self.ladders]
        return BatchDescriptor(num_tokens=counts[0], num_reqs=counts[1] if len(counts) > 1 else 1)

    def sizes_of(self, descriptor: BatchDescriptor) -> dict[str, int]:
        return dict(zip(self.ladders, descriptor, strict=False))

    def drop(self, descriptor: BatchDescriptor) -> None:
        """Never choose a bucket whose capture failed."""
        self._failed.add(descriptor)

    def find(self, sizes: Mapping[str, int]) -> BatchDescriptor | None:
        """The smallest live bucket that holds ``sizes``."""
        fitting = [
            ladder.sizes[bisect_left(ladder.sizes, sizes[symbol]) :]
            for symbol, ladder in self.ladders.items()
        ]
        if not all(fitting):
            return None
        if not self._failed:
            return BatchDescriptor(fitting[0][0], fitting[1][0] if len(fitting) > 1 else 1)
        for counts in itertools.product(*fitting):
            descriptor = self.descriptor(dict(zip(self.ladders, counts, strict=True)))
            if descriptor not in self._failed:
                return descriptor
        return None

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """True when no size is above its ladder."""
        return all(sizes[symbol] <= ladder.largest for symbol, ladder in self.ladders.items())


def make_buckets(
    symbols: Sequence[str], sizes: Sizes | Mapping[str, Sizes] | None, example: Mapping[str, int]
) -> Buckets:
    """Ladders from what the user gave; without it they end at the example's sizes.

    Raises ``ConfigError`` for an impossible size, an unknown dimension, or too many dimensions.
    """
    check_symbols(symbols)
    if not isinstance(sizes, Mapping):
        if sizes is not None and len(symbols) > 1:
            raise ConfigError(
                f"sizes={sizes!r}: with several dimensions give one entry for each of {list(symbols)}"
            )
        sizes = {} if sizes is None else {symbols[0]: sizes}
    unknown = sizes.keys() - set(symbols)
    if unknown:
        raise ConfigError(f"sizes names {sorted(unknown)}; the dynamic dimensions are {list(symbols)}")
    missing = [symbol for symbol in symbols if symbol not in sizes and symbol not in example]
    if missing:
        raise ConfigError(
            f"sizes says nothing of {', '.join(missing)}, and there is no example to take it from"
        )
    return Buckets({symbol: _ladder(symbol, sizes.get(symbol), example.get(symbol, 0)) for symbol in symbols})


def check_symbols(symbols: Sequence[str]) -> None:
    if len(symbols) > MAX_SYMBOLS:
        raise ConfigError(
            f"{len(symbols)} dynamic dimensions ({', '.join(symbols)}); at most {MAX_SYMBOLS} are supported, "
            "because every combination of sizes is a graph. Fix some of them"
        )


def _ladder(symbol: str, sizes: Sizes | None, example_size: int) -> Ladder:
    name = f"sizes[{symbol!r}]"
    if sizes is None:
        sizes = example_size
    if not isinstance(sizes, int) or isinstance(sizes, bool):
        listed = _integers(sizes, name)
        return prefill_ladder(limit=max(listed), sizes=listed, sizes_name=name)
    if sizes < 1:
        raise ConfigError(f"{name}={sizes}: the largest size must be at least 1")
    steps = prefill_ladder(limit=sizes).sizes
    return Ladder(sizes=tuple(sorted({n for n in (1, 2) if n <= sizes} | set(steps))))


def _integers(sizes: object, name: str) -> list[int]:
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
        raise ConfigError(f"{name}={sizes!r}: give the largest size, or a list of sizes")
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{name}: {size!r} is not a size; sizes are integers of at least 1")
    return list(sizes)

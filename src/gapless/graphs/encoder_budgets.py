"""Token budgets of an encoder, and which items share one: plain arithmetic.

A budget is a size that is captured at start-up; a *pack* is a run of consecutive items that one replay
serves. Every division rounds up and every budget is a whole number of granules (what a tower merges into one
output row), for rounding down gave budgets of no tokens and items that did not fit their own budget (vLLM
38040). Invariants: items keep their order; a pack fits its budget in every count, not only in tokens; the
packs cost at most what one run per item would, for that is one of the ways that are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from gapless.errors import ConfigError

Sizes = Mapping[str, int]
"""Counts by name; those of several items add up."""

DEFAULT_SMALLEST = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """One captured size."""

    tokens: int
    sizes: Sizes
    """The most of everything that a run in it may have."""
    cost: float
    """Of one replay, in any unit that all budgets share."""


class Pack(NamedTuple):
    """Items ``first : first + num_items`` run together, in ``budget`` (its index) or in none: too large."""

    first: int
    num_items: int
    budget: int | None

    @property
    def own(self) -> slice:
        return slice(self.first, self.first + self.num_items)


def ceil_to(value: int, granule: int) -> int:
    """``value`` rounded up to whole granules, at least one."""
    return max(-(-value // granule), 1) * granule


DEFAULT_FINE_FROM = 512
"""Below, a replay costs about what its kernels cost to start, padding or not; above, what its rows do."""
_STEPS_AT_FIRST, _STEPS = (40, 49, 56), (48,)
"""On the way to the next power of two, in 32nds of the size: where pictures are most often, and above. 49
makes 784 of 512, which is a picture of 448 pixels squared at 16 a patch."""


def budget_ladder(
    *, smallest: int, largest: int, granule: int = 1, fine_from: int | None = None
) -> tuple[int, ...]:
    """``smallest`` doubled again and again, and ``largest`` itself; from ``fine_from`` to twice that also
    three sizes between one and the next, from there on the one halfway. Whole granules, ascending.

    Raises ``ConfigError`` for a size that is not positive.
    """
    _check_positive(smallest, "the smallest budget")
    _check_positive(largest, "the largest budget")
    ladder = {ceil_to(largest, granule)}
    size = ceil_to(smallest, granule)
    while size < largest:
        ladder.add(ceil_to(size, granule))
        if fine_from is not None and size >= fine_from:
            steps = _STEPS_AT_FIRST if size < 2 * fine_from else _STEPS
            between = (ceil_to(size * step // 32, granule) for step in steps)
            ladder.update(budget for budget in between if budget < largest)
        size *= 2
    return tuple(sorted(ladder))


def normalise_budgets(budgets: Sequence[int], *, granule: int = 1) -> tuple[int, ...]:
    """An explicit list, sorted, without duplicates, rounded up to whole granules.

    Raises ``ConfigError`` for an empty list and for entries that are no positive integers.
    """
    if not budgets:
        raise ConfigError("the list of token budgets is empty; leave it out for the default ladder")
    for budget in budgets:
        _check_positive(budget, "a token budget")
    return tuple(sorted({ceil_to(budget, granule) for budget in budgets}))


def fits(sizes: Sizes, limits: Sizes) -> bool:
    return all(count <= limits[name] for name, count in sizes.items())


def total(sizes: Sequence[Sizes]) -> dict[str, int]:
    """The counts of several items together."""
    return {name: sum(item[name] for item in sizes) for name in sizes[0]}


def plan_packs(items: Sequence[Sizes], budgets: Sequence[Budget]) -> list[Pack]:
    """The cheapest way to run ``items`` in order; of equally cheap ways one with the fewest runs.

    ``budgets`` ascend. An item that no budget holds is a pack of its own without one, at no cost: it runs
    eagerly whatever the others do. Fewer items never cost more, so of all packs that end at an item and share
    a budget the longest is the best, and the time grows with the number of items, not with its square.
    """
    names = items[0] if items else ()
    counts = {name: list(accumulate((item[name] for item in items), initial=0)) for name in names}
    longest = [_Longest(counts, budget.sizes) for budget in budgets]
    # best[i]: cost, number of runs and last pack of the cheapest way to run the first i items.
    best: list[tuple[float, int, Pack | None]] = [(0.0, 0, None)]
    for end in range(1, len(items) + 1):
        found: tuple[float, int, int, int] | None = None
        for index, budget in enumerate(budgets):
            if found is not None and budget.cost > found[0]:
                continue  # alone it costs more than all that was found; nearly always so
            first = longest[index].first_of_pack(end)
            if first == end:
                continue
            before, num_runs, _ = best[first]
            cost = before + budget.cost
            if found is None or (cost, num_runs + 1) < found[:2]:
                found = cost, num_runs + 1, first, index
        if found is None:
            best.append((best[end - 1][0], best[end - 1][1] + 1, Pack(end - 1, 1, None)))
        else:
            cost, num_runs, first, index = found
            best.append((cost, num_runs, Pack(first, end - first, index)))
    packs: list[Pack] = []
    end = len(items)
    while end:
        pack = best[end][2]
        assert pack is not None
        packs.append(pack)
        end = pack.first
    return packs[::-1]


def greedy_packs(items: Sequence[Sizes], limits: Sizes) -> list[Pack]:
    """Packs without budgets, for eager runs: as many items as ``limits`` hold, at least one each."""
    packs: list[Pack] = []
    first = 0
    while first < len(items):
        count, together = 1, dict(items[first])
        for following in items[first + 1 :]:
            together = {name: together[name] + following[name] for name in together}
            if not fits(together, limits):
                break
            count += 1
        packs.append(Pack(first, count, None))
        first += count
    return packs


class _Longest:
    """The longest pack within ``limits`` that ends at each item, asked for in ascending order."""

    def __init__(self, counts: Mapping[str, Sequence[int]], limits: Sizes) -> None:
        """``counts``: by name, those of the first ``i`` items together."""
        self._bounded = [(sums, limits[name]) for name, sums in counts.items()]
        self._first = 0

    def first_of_pack(self, end: int) -> int:
        """Where the pack before ``end`` begins; ``end`` when not even the last item fits."""
        first = self._first
        for sums, limit in self._bounded:
            lowest = sums[end] - limit
            while sums[first] < lowest:  # it ends at ``end`` at the latest, for no limit is negative
                first += 1
        self._first = first
        return first


def _check_positive(value: int, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{what} is {value!r}; it must be a positive number of tokens")

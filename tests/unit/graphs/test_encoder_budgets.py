"""Budget arithmetic: ladders, and the cheapest way to pack items that keep their order."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.errors import ConfigError
from gapless.graphs.encoder_budgets import (
    Budget,
    Sizes,
    budget_ladder,
    ceil_to,
    fits,
    greedy_packs,
    normalise_budgets,
    plan_packs,
    total,
)
from gapless.graphs.encoder_options import EncoderMode, EncoderOptions

few = settings(max_examples=50, deadline=None)
sizes = st.builds(
    lambda units, segments: {"tokens": 4 * units, "segments": min(segments, units)},
    st.integers(1, 40),
    st.integers(1, 40),
)


def budget_of(tokens: int, *, cost: float | None = None, segments: int | None = None) -> Budget:
    limits = {"tokens": tokens, "segments": tokens // 4 if segments is None else segments}
    return Budget(tokens=tokens, sizes=limits, cost=tokens if cost is None else cost)


def cheapest_budget(sizes: Sizes, budgets: list[Budget]) -> int | None:
    """Index of the cheapest that holds ``sizes``, by trying all."""
    holding = [index for index, budget in enumerate(budgets) if fits(sizes, budget.sizes)]
    return min(holding, key=lambda index: budgets[index].cost, default=None)


ladders = st.lists(
    st.tuples(st.integers(1, 30), st.floats(0.1, 100)), min_size=1, max_size=4, unique_by=lambda pair: pair[0]
).map(lambda pairs: [budget_of(4 * units, cost=cost) for units, cost in sorted(pairs)])


@few
@given(st.integers(1, 500), st.integers(1, 5000), st.integers(1, 36))
def test_a_ladder_has_whole_granules_doubles_and_ends_at_the_maximum(smallest, largest, granule) -> None:
    ladder = budget_ladder(smallest=smallest, largest=largest, granule=granule)
    assert all(size % granule == 0 and size >= granule for size in ladder)
    assert list(ladder) == sorted(set(ladder))
    assert ladder[-1] == ceil_to(max(smallest, largest) if smallest >= largest else largest, granule) or (
        ladder[-1] >= largest
    )
    assert any(size >= largest for size in ladder)
    for lower, upper in itertools.pairwise(ladder):
        assert upper <= 2 * lower + granule


@pytest.mark.parametrize(
    ("smallest", "largest", "granule", "expected"),
    [
        (64, 512, 4, (64, 128, 256, 512)),
        (64, 600, 4, (64, 128, 256, 512, 600)),
        (64, 64, 4, (64,)),
        (1, 9, 4, (4, 8, 12)),
        (3, 10, 1, (3, 6, 10)),
    ],
)
def test_ladders(smallest, largest, granule, expected) -> None:
    assert budget_ladder(smallest=smallest, largest=largest, granule=granule) == expected


@pytest.mark.parametrize(
    ("largest", "granule", "fine_from", "expected"),
    [
        (8192, 4, 1024, (512, 1024, 1280, 1568, 1792, 2048, 3072, 4096, 6144, 8192)),
        (8192, 4, None, (512, 1024, 2048, 4096, 8192)),
        (5476, 4, 1024, (512, 1024, 1280, 1568, 1792, 2048, 3072, 4096, 5476)),
        (1200, 4, 1024, (512, 1024, 1200)),
        (1536, 4, 1024, (512, 1024, 1280, 1536)),
        (2100, 36, 600, (540, 1080, 1368, 1656, 1908, 2124)),
    ],
)
def test_large_sizes_have_steps_in_between(largest, granule, fine_from, expected) -> None:
    ladder = budget_ladder(smallest=512, largest=largest, granule=granule, fine_from=fine_from)
    assert ladder == expected


@few
@given(st.integers(1, 64), st.integers(1, 9000), st.integers(1, 36))
def test_steps_in_between_only_add_sizes(smallest, largest, granule) -> None:
    sizes = {"smallest": smallest, "largest": largest, "granule": granule}
    fine, coarse = budget_ladder(**sizes, fine_from=1024), budget_ladder(**sizes)
    assert set(coarse) <= set(fine)
    assert fine[-1] == coarse[-1]
    assert all(size % granule == 0 and size > 1024 for size in set(fine) - set(coarse))
    for lower, upper in itertools.pairwise(size for size in fine if size >= 2048):
        assert upper <= 1.5 * lower + 2 * granule
    for lower, upper in itertools.pairwise(size for size in fine if 1024 <= size < 2048):
        assert upper <= 1.25 * lower + 2 * granule


def test_images_of_1024_pixels_run_in_fewer_rows_than_the_next_power_of_two() -> None:
    ladder = EncoderOptions().ladder(4)
    assert next(size for size in ladder if size >= 5476) == 6144
    assert ladder == (64, 128, 256, 512, 640, 784, 896, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
    assert EncoderOptions(fine_from=None).ladder(4) == (64, 128, 256, 512, 1024, 2048, 4096, 8192)


def test_where_steps_become_fine_must_be_a_size() -> None:
    with pytest.raises(ConfigError, match="fine_from=0"):
        EncoderOptions(fine_from=0)


@few
@given(st.integers(1, 10_000), st.integers(1, 64))
def test_rounding_goes_up_and_never_to_nothing(value, granule) -> None:
    rounded = ceil_to(value, granule)
    assert rounded % granule == 0
    assert value <= rounded < value + granule


def test_an_explicit_list_is_sorted_rounded_up_and_without_duplicates() -> None:
    assert normalise_budgets([30, 5, 8, 7], granule=4) == (8, 32)


@pytest.mark.parametrize("budgets", [[], [0], [-4], [True], [1.5]])
def test_budgets_that_are_no_sizes_are_refused(budgets) -> None:
    with pytest.raises(ConfigError, match="budget"):
        normalise_budgets(budgets)


@pytest.mark.parametrize("name", ["max_tokens", "smallest_budget", "max_graphs", "max_bytes"])
def test_options_must_be_positive(name) -> None:
    with pytest.raises(ConfigError, match=name):
        EncoderOptions(**{name: 0})


@pytest.mark.parametrize("mode", list(EncoderMode))
@pytest.mark.parametrize("value", ["8", 10.5, True])
def test_options_are_whole_numbers_in_every_mode(mode, value) -> None:
    with pytest.raises(ConfigError, match="max_tokens="):
        EncoderOptions(mode=mode, max_tokens=value)


@pytest.mark.parametrize("budgets", [64, "64,128"])
def test_budgets_are_a_list(budgets) -> None:
    with pytest.raises(ConfigError, match="must be a list of sizes"):
        EncoderOptions(budgets=budgets)


def test_a_list_of_budgets_belongs_to_budget_mode() -> None:
    with pytest.raises(ConfigError, match="exact"):
        EncoderOptions(mode=EncoderMode.EXACT, budgets=(64,))


@few
@given(st.lists(sizes, max_size=9), ladders)
def test_packs_keep_the_order_hold_everything_and_fit(items, budgets) -> None:
    packs = plan_packs(items, budgets)
    covered = [i for pack in packs for i in range(pack.first, pack.first + pack.num_items)]
    assert covered == list(range(len(items)))
    for pack in packs:
        own = items[pack.first : pack.first + pack.num_items]
        if pack.budget is None:
            assert len(own) == 1
            assert cheapest_budget(own[0], budgets) is None
        else:
            assert fits(total(own), budgets[pack.budget].sizes)


@few
@given(st.lists(sizes, min_size=1, max_size=7), ladders)
def test_no_way_in_this_order_is_cheaper_least_of_all_separate_runs(items, budgets) -> None:
    def cost_of(cuts: tuple[int, ...]) -> float | None:
        cost = 0.0
        for first, end in itertools.pairwise((0, *cuts, len(items))):
            own = items[first:end]
            found = cheapest_budget(total(own), budgets)
            if found is None and len(own) > 1:
                return None
            cost += budgets[found].cost if found is not None else 0.0
        return cost

    packs = plan_packs(items, budgets)
    cost = sum(budgets[pack.budget].cost for pack in packs if pack.budget is not None)
    inner = range(1, len(items))
    ways = [cost_of(cuts) for n in range(len(items)) for cuts in itertools.combinations(inner, n)]
    assert cost == pytest.approx(min(way for way in ways if way is not None))
    assert cost <= cost_of(tuple(inner)) + 1e-9


def test_of_equally_cheap_ways_the_fewest_runs_are_chosen() -> None:
    items = [{"tokens": 32, "segments": 1}] * 4
    assert len(plan_packs(items, [budget_of(32), budget_of(64), budget_of(128)])) == 1
    assert len(plan_packs(items[:3], [budget_of(32), budget_of(64), budget_of(128)])) == 2


def test_a_replay_that_is_measured_to_be_cheap_attracts_items() -> None:
    items = [{"tokens": 32, "segments": 1}] * 3
    budgets = [budget_of(32, cost=1.0), budget_of(128, cost=1.2)]
    assert [pack.num_items for pack in plan_packs(items, budgets)] == [3]
    budgets = [budget_of(32, cost=1.0), budget_of(128, cost=3.5)]
    assert [pack.num_items for pack in plan_packs(items, budgets)] == [1, 1, 1]


def test_every_count_limits_a_pack_not_only_tokens() -> None:
    items = [{"tokens": 16, "segments": 4}] * 2
    assert len(plan_packs(items, [budget_of(64, segments=4)])) == 2
    assert plan_packs(items[:1], [budget_of(64, segments=3)])[0].budget is None


def test_an_item_too_large_for_all_budgets_stands_alone_and_hinders_nobody() -> None:
    items = [{"tokens": n, "segments": 1} for n in (8, 8, 400, 8, 8)]
    packs = plan_packs(items, [budget_of(16), budget_of(64)])
    assert [(pack.num_items, pack.budget) for pack in packs] == [(2, 0), (1, None), (2, 0)]


class CountedLimit(int):
    """Counts how often something is compared with it, or with what a sum exceeds it by."""

    num_looks = 0

    def __rsub__(self, other: int) -> CountedLimit:
        return CountedLimit(int(other) - int(self))

    def __gt__(self, other: int) -> bool:
        CountedLimit.num_looks += 1
        return int(self) > int(other)


def test_the_time_to_plan_grows_with_the_items_and_not_with_their_square(monkeypatch) -> None:
    """A thousand thumbnails took seconds to plan, longer than each of them alone takes to run."""
    monkeypatch.setattr(CountedLimit, "num_looks", 0)
    budgets = [
        replace(budget, sizes={name: CountedLimit(limit) for name, limit in budget.sizes.items()})
        for budget in (budget_of(4 * 2**n) for n in range(8))
    ]
    items = [{"tokens": 4 * (1 + n % 3), "segments": 1} for n in range(600)]
    packs = plan_packs(items, budgets)
    assert sum(pack.num_items for pack in packs) == 600
    assert len(items) <= CountedLimit.num_looks <= 4 * len(items) * len(budgets)


@few
@given(st.lists(sizes, max_size=9), st.integers(1, 40))
def test_eager_packs_hold_what_the_limits_allow(items, units) -> None:
    limits = {"tokens": 4 * units, "segments": units}
    packs = greedy_packs(items, limits)
    covered = [i for pack in packs for i in range(pack.first, pack.first + pack.num_items)]
    assert covered == list(range(len(items)))
    for pack in packs:
        own = items[pack.first : pack.first + pack.num_items]
        assert len(own) == 1 or fits(total(own), limits)

"""Graphs of vision towers: exact mode equals eager, budgets equal padded eager, and nothing leaks between."""

from __future__ import annotations

import pytest
import torch

from encoder_cases import (
    CONFIGS,
    GRIDS,
    assert_close,
    assert_equal,
    check_random_sets,
    media,
    runner_of,
    tiny_tower,
)
from gapless.graphs.device import get_device
from gapless.graphs.encoder import EncoderFallback, EncoderOptions, EncoderRunner
from gapless.graphs.encoder_packed import BudgetGraphs
from gapless.graphs.modes import Phase
from gapless.models.vision.base import MediaEncoder
from gapless.models.vision.encoder import TowerEncoder
from gapless.models.vision.tower import VisionTower

CPU = get_device("cpu")
SAME_LENGTH = [(1, 4, 4), (2, 2, 4), (1, 8, 2), (4, 2, 2)]
"""Sixteen patches, in other segments, windows and positions."""


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def tower(request: pytest.FixtureRequest) -> VisionTower:
    return tiny_tower(request.param, device=CPU)


@pytest.fixture(scope="module")
def budget(tower: VisionTower) -> EncoderRunner:
    return runner_of(tower, "budget", device=CPU)


@pytest.fixture(scope="module")
def exact(tower: VisionTower) -> EncoderRunner:
    return runner_of(tower, "exact", device=CPU)


def test_budgets_equal_padded_eager_on_random_sets(budget: EncoderRunner) -> None:
    num_graphs = len(budget.report()["graphs"])
    check_random_sets(budget, count=150, seed=1)
    assert len(budget.report()["graphs"]) == num_graphs == 3  # no capture while serving
    reasons = {reason for (_, reason) in budget.log.eager}
    assert reasons == {EncoderFallback.PADDED_EAGER}


def test_exact_graphs_equal_eager_on_random_sets(exact: EncoderRunner) -> None:
    num_items = check_random_sets(exact, count=100, seed=2, most=3)
    summary = exact.summary()
    assert summary["captures"] <= len(GRIDS)
    assert summary["hits"] + summary["captures"] == num_items
    assert not exact.log.eager


@pytest.mark.parametrize("mode", ["budget", "exact"])
def test_equal_lengths_in_other_segments_have_other_results(tower, mode, request) -> None:
    runner = request.getfixturevalue(mode)
    items = [media(tower, grid, seed=3) for grid in SAME_LENGTH]
    rounds = [[rows for item in items for rows in runner.run([item])] for _ in range(2)]
    assert_equal(rounds[0], rounds[1])
    assert_close(rounds[0], runner.eager(items))
    assert {row.shape for rows in rounds[0] for row in rows[:1]} == {(4, tower.hidden_size)}


@pytest.mark.parametrize("mode", ["budget", "exact"])
def test_small_then_large_then_small(tower, mode) -> None:
    runner = runner_of(tower, mode, device=CPU)
    small, large = media(tower, (1, 2, 2), seed=4), media(tower, (1, 8, 14), seed=4)
    before = runner.run([small])
    assert_close(runner.run([large]), runner.eager([large]))
    assert_equal(runner.run([small]), before)
    assert_close(before, runner.eager([small]))


def test_real_rows_do_not_depend_on_what_else_is_packed(tower, budget) -> None:
    """The same place in the same budget: bit-equal, alone and with any neighbours behind it."""
    first = media(tower, (1, 4, 4), seed=5)
    (alone,) = budget.run([first])
    others = [media(tower, (2, 2, 4), seed=seed) for seed in (6, 7)]
    for other in others:
        assert_equal(budget.run([first, other])[:1], [alone])
    moved = budget.run([others[0], first])[1]
    assert_close([moved], [alone])


def test_one_replay_serves_several_images(tower, budget) -> None:
    before = sum(count.count for count in budget.log.replays.values())
    budget.run([media(tower, (1, 2, 4), seed=seed) for seed in range(8)])
    assert sum(count.count for count in budget.log.replays.values()) == before + 1


@pytest.mark.parametrize("count", [31, 32, 33])
def test_a_budget_may_be_full_of_the_smallest_images(tower, budget, count) -> None:
    """Each is a segment, a window and a row of its own: the most that 128 patches can have, and one more."""
    items = [media(tower, (1, 2, 2), seed=seed) for seed in range(count)]
    before = sum(counts.count for counts in budget.log.replays.values())
    got = budget.run(items)
    runs = sum(counts.count for counts in budget.log.replays.values()) - before
    assert runs == -(-count // 32)
    assert_equal(got, budget.padded_eager(items))
    assert_close(got, budget.eager(items))


@pytest.mark.parametrize("mode", ["budget", "exact"])
def test_an_item_that_comes_twice_gets_rows_of_its_own_twice(tower, mode, request) -> None:
    runner = request.getfixturevalue(mode)
    item = media(tower, (1, 4, 6), seed=21)
    once, again = runner.run([item, item])
    assert_close([once], [again])
    again[0].fill_(float("nan"))
    assert_close([once], runner.eager([item]))


def test_two_towers_in_one_process_have_graphs_of_their_own() -> None:
    runners = [runner_of(tiny_tower(model_type, device=CPU), "budget", device=CPU) for model_type in CONFIGS]
    items = [[media(runner.adapter, grid, seed=22) for grid in GRIDS[:3]] for runner in runners]
    first = [runner.run(own) for runner, own in zip(runners, items, strict=True)]
    for _ in range(2):
        for runner, own, expected in zip(runners, items, first, strict=True):
            assert_equal(runner.run(own), expected)
    runners[0].release()
    assert_equal(runners[1].run(items[1]), first[1])


@pytest.mark.parametrize("mode", ["budget", "exact"])
def test_poisoned_padding_reaches_no_real_row(tower, mode) -> None:
    runner = runner_of(tower, mode, device=CPU)
    sets = [[media(tower, grid, seed=8) for grid in grids] for grids in (GRIDS[:1], GRIDS[2:5], GRIDS[7:9])]
    clean = [runner.run(items) for items in sets]
    assert runner._memory is not None
    runner._memory.inputs.poison = True
    for scratch in runner._memory.scratch.buffers.values():
        scratch.fill_(float("nan"))
    for items, expected in zip(sets, clean, strict=True):
        got = runner.run(items)
        assert_equal(got, expected)
        assert all(row.isfinite().all() for rows in got for row in rows)


@pytest.mark.parametrize("mode", ["budget", "exact", "off"])
def test_an_image_that_is_no_numbers_spoils_no_other_and_no_later_run(tower, mode) -> None:
    """Images of several requests share a replay, and eager runs share one too."""
    runner = runner_of(tower, mode, device=CPU)
    items = [media(tower, grid, seed=20) for grid in ((1, 4, 4), (1, 2, 4), (2, 2, 4))]
    clean = runner.run(items)
    broken = media(tower, (1, 2, 4), seed=20)
    broken.patches_PC[3, 5] = float("nan")
    got = runner.run([items[0], broken, items[2]])
    assert_equal([got[0], got[2]], [clean[0], clean[2]])
    assert not any(row.isfinite().all() for row in got[1])
    assert_equal(runner.run(items), clean)


@pytest.mark.parametrize("mode", ["budget", "exact"])
def test_results_are_the_callers_own_and_never_change(tower, mode, request) -> None:
    runner = request.getfixturevalue(mode)
    items = [media(tower, grid, seed=9) for grid in GRIDS[:4]]
    kept = runner.run(items)
    copies = [tuple(row.clone() for row in rows) for rows in kept]
    for seed in range(10, 14):
        runner.run([media(tower, grid, seed=seed) for grid in GRIDS])
    assert_equal(kept, copies)
    static = [buffer.untyped_storage().data_ptr() for buffer in runner.buffers().values()]
    for rows in kept:
        for row in rows:
            assert row.untyped_storage().data_ptr() not in static
            assert row.untyped_storage().nbytes() == row.nbytes  # keeps nothing else alive


def test_eviction_under_live_use_keeps_results_and_bounds(tower) -> None:
    runner = runner_of(tower, "exact", device=CPU, max_graphs=3)
    items = [media(tower, grid, seed=15) for grid in GRIDS[:6]]
    kept: dict[int, tuple] = {}
    for index in (0, 1, 2, 0, 3, 1, 0, 4, 5, 2):
        (rows,) = runner.run([items[index]])
        if index in kept:
            assert_equal([rows], [kept[index]])
        kept[index] = rows
        assert len(runner.report()["graphs"]) <= 3
    summary = runner.summary()
    assert summary["evictions"] >= 2
    assert summary["captures"] == summary["evicted_graphs"] + len(runner.report()["graphs"])
    assert_equal([kept[i] for i in range(6)], runner.eager(items))


@pytest.mark.parametrize("mode", ["budget", "exact"])
def test_what_is_too_large_runs_eagerly_and_is_counted(tower, mode) -> None:
    runner = runner_of(tower, mode, device=CPU, max_tokens=32)
    large, small = media(tower, (1, 10, 6)), media(tower, (1, 2, 2))
    got = runner.run([small, large, small])
    assert_close(got, runner.eager([small, large, small]))
    reason = {
        "budget": EncoderFallback.LARGER_THAN_LARGEST,
        "exact": EncoderFallback.LONGER_THAN_BUFFERS,
    }[mode]
    assert dict(runner.log.eager) == {(Phase.ENCODER, reason): 1}


def test_static_memory_has_the_names_of_encoder_runners_and_never_moves(tower, exact) -> None:
    buffers = exact.buffers()
    names = {"block_input", "block_ws", "block_output", "cu_full_len", "cu_full_len_kk", "sin_cos_ws"}
    if tower.has_windows:
        names |= {"cu_window_len", "cu_window_len_kk"}
    assert names <= set(buffers)
    assert buffers["sin_cos_ws"].shape[0] == exact.ladder[-1]
    before = {name: buffers[name].data_ptr() for name in names - {"block_output"}}
    exact.run([media(tower, grid, seed=16) for grid in GRIDS])
    after = exact.buffers()
    assert {name: after[name].data_ptr() for name in before} == before


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_attention_that_fixes_boundaries_has_them_in_the_key(model_type: str) -> None:
    tower = tiny_tower(model_type, device=CPU, attention="torch_segments")
    runner = runner_of(tower, "exact", device=CPU)
    num_keys = {"qwen2_5_vl": 4, "qwen3_vl": 3}[model_type]  # without windows an image's shape is data
    for seed in (17, 18):
        items = [media(tower, grid, seed=seed) for grid in SAME_LENGTH]
        assert_equal(runner.run(items), runner.eager(items))
        assert runner.summary()["captures"] == num_keys


def test_a_failed_capture_leaves_that_budget_eager_and_counted(tower, monkeypatch) -> None:
    forward = tower.forward

    def fails_at_64(run):
        if run.sizes["tokens"] == 64:
            run["position_ids"].sum().item()
        return forward(run)

    monkeypatch.setattr(tower, "forward", fails_at_64)
    runner = runner_of(tower, "budget", device=CPU)
    middle, small, large = (media(tower, grid) for grid in ((1, 10, 6), (1, 4, 4), (1, 8, 14)))
    got = runner.run([middle]) + runner.run([small]) + runner.run([large])
    assert_close(got, runner.eager([middle, small, large]))
    assert dict(runner.log.eager) == {(Phase.ENCODER, EncoderFallback.CAPTURE_FAILED): 1}
    report = runner.report()
    assert [row["num_tokens"] for row in report["graphs"]] == [128, 32]
    assert len(report["failures"]) == 1
    assert ".item" in report["failures"][0]["message"]


@pytest.mark.parametrize(
    ("seconds", "replayed", "num_eager"),
    [({32: 1.0, 128: 1.5}, {32: 1, 128: 1}, 0), ({32: 1.0, 128: 4.0}, {32: 1}, 1)],
    ids=["larger graph is cheaper", "larger graph is dearer"],
)
def test_what_a_failed_budget_would_have_served_goes_where_it_is_cheapest(
    tower, monkeypatch, seconds: dict[int, float], replayed: dict[int, int], num_eager: int
) -> None:
    """As on a GPU, where replays are timed: 64 tokens without a graph are priced by the dearest graph."""
    forward = tower.forward

    def fails_at_64(run):
        if run.sizes["tokens"] == 64:
            run["position_ids"].sum().item()
        return forward(run)

    def timed(graphs: BudgetGraphs) -> dict[int, float]:
        return {graphs._ladder.index(tokens): cost for tokens, cost in seconds.items()}

    monkeypatch.setattr(tower, "forward", fails_at_64)
    monkeypatch.setattr(BudgetGraphs, "_replay_seconds", timed)
    runner = runner_of(tower, "budget", device=CPU)
    middle, small = media(tower, (1, 10, 6)), media(tower, (1, 4, 4))
    got = runner.run([middle]) + runner.run([small])
    assert_close(got, runner.eager([middle, small]))
    assert {bucket: counts.count for (_, _, bucket), counts in runner.log.replays.items()} == replayed
    assert runner.log.eager.get((Phase.ENCODER, EncoderFallback.CAPTURE_FAILED), 0) == num_eager
    assert sum(runner.log.eager.values()) == num_eager


@pytest.mark.parametrize("mode", ["budget", "exact", "off"])
def test_a_media_encoder_encodes_captures_reports_and_releases(tower, mode) -> None:
    options = EncoderOptions(mode=mode, max_tokens=32) if mode == "off" else None
    runner = runner_of(tower, mode, device=CPU, max_tokens=32) if options is None else None
    encoder = TowerEncoder(tower, device=CPU, options=options or runner.options)
    seam: MediaEncoder = encoder
    seam.capture()
    items = [media(tower, grid, seed=19) for grid in GRIDS[:3]]
    encoded = seam.encode(items)
    expected = encoder.runner.eager(items)
    for item, mine, theirs in zip(items, encoded, expected, strict=True):
        assert mine.embeds_NE.shape == (item.num_tokens, tower.hidden_size)
        torch.testing.assert_close(mine.embeds_NE, theirs[0], atol=1e-4, rtol=0)
    assert seam.encode([]) == []
    assert seam.report()["encoder"]["mode"] == mode
    seam.release()
    seam.release()
    torch.testing.assert_close(seam.encode(items[:1])[0].embeds_NE, expected[0][0], atol=1e-4, rtol=0)

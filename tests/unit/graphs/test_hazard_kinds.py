"""Kinds of faults from the field, as a user of ``graphed`` meets them: impossible, refused, or found.

The numbers are those of docs/hazards.md, which lists every kind and the tests that stand for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gapless.errors import GraphError
from gapless.graphs.breakable import eager_break
from gapless.graphs.graphed import Graphed, Input, graphed
from gapless.graphs.real_sizes import num_real

ROWS = Input(dims={0: "rows"})


def rows(n: int) -> Tensor:
    return torch.randn(n, 4)


def failed(made: Graphed, **options: Any) -> set[str]:
    return {failure.check for failure in made.verify(**options).failures}


# --- 3, 11, 12: host values and host branches ------------------------------------------------------


def first_rows(x: Tensor, limit: int) -> Tensor:
    return torch.where(torch.arange(x.shape[0])[:, None] < limit, x, 0)


def test_3_a_host_limit_is_refused_as_an_argument_and_live_as_a_tensor() -> None:
    frozen = graphed(first_rows, inputs={"x": ROWS}, sizes=8).capture(rows(4), 3)
    with pytest.raises(GraphError, match="argument 'limit' was 3 when the graphs were captured and is 6 now"):
        frozen(rows(8), 6)
    limit = torch.tensor(3)
    live = graphed(first_rows, inputs={"x": ROWS}, sizes=8).capture(rows(4), limit)
    for value in (3, 6, 1):
        limit.fill_(value)
        x = rows(8)
        assert torch.equal(live(x, limit), first_rows(x, value))


@pytest.mark.parametrize("enc", [0, 3])
def test_12_a_zero_length_that_skips_a_kernel_is_found_by_a_variant(enc: int) -> None:
    def fn(x: Tensor, enc: int) -> Tensor:
        return x + x.sin() if enc > 0 else x + 0

    made = graphed(fn, inputs={"x": ROWS}, sizes=[4]).capture(rows(4), enc)
    assert failed(made, variants=[{"enc": 0}, {"enc": 3}]) == {"frozen values"}
    assert failed(made, variants=[{"enc": enc}]) == set()


def test_11_a_kernel_chosen_by_a_host_value_is_found_by_a_variant() -> None:
    def fn(x: Tensor, longest: int) -> Tensor:
        return x.softmax(-1) if longest > 100 else x.exp() / x.exp().sum(-1, keepdim=True)

    made = graphed(fn, inputs={"x": ROWS}, sizes=[4]).capture(rows(4), 7)
    assert failed(made, variants=[{"longest": 99}]) == set()
    (failure, *_) = made.verify(variants=[{"longest": 101}]).failures
    assert "a Python branch depends on the batch" in failure.detail


# --- 4: segment boundaries -------------------------------------------------------------------------


def attend_in_segments(x: Tensor, offsets: Tensor) -> Tensor:
    segment = torch.searchsorted(offsets, torch.arange(x.shape[0], device=x.device), right=True)
    scores = (x @ x.t()).masked_fill(segment[:, None] != segment, float("-inf"))
    return scores.softmax(-1) @ x


def test_4_boundaries_are_refreshed_data_so_one_graph_serves_every_segmentation() -> None:
    def make(sizes: Any, generator: torch.Generator) -> dict[str, Tensor]:
        inner = torch.randint(1, sizes["rows"] + 1, (sizes["images"] - 1,), generator=generator).sort().values
        ends = torch.cat([torch.tensor([0]), inner, torch.tensor([sizes["rows"]])])
        return {"x": torch.randn(sizes["rows"], 4, generator=generator), "offsets": ends}

    made = graphed(
        attend_in_segments,
        inputs={
            "x": Input(dims={0: "rows"}, poison=(1e4,)),
            "offsets": Input(dims={0: "images+1"}, pad="last"),
        },
        sizes={"rows": [10, 16], "images": [2, 4]},
        make_inputs=make,
    ).capture()
    for offsets in ([0, 4, 10], [0, 5, 10], [0, 10], [0, 1, 2, 3, 12]):
        x, ends = rows(offsets[-1]), torch.tensor(offsets)
        torch.testing.assert_close(made(x, ends), attend_in_segments(x, ends))
    assert made.verify().is_ok


def test_4_boundaries_frozen_at_capture_are_refused() -> None:
    made = graphed(attend_in_segments, inputs={"x": ROWS}, sizes=[10], check_padding=False)
    made.capture(rows(10), torch.tensor([0, 4, 10]))
    with pytest.raises(GraphError, match="argument 'offsets' is another tensor"):
        made(rows(10), torch.tensor([0, 5, 10]))


# --- 5: slots of padding ---------------------------------------------------------------------------


def write_slots(x: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
    cache[slots] = x
    return cache[slots] * 2


@pytest.mark.parametrize("pad", [-1, 0])
def test_5_a_pad_slot_that_is_a_live_one_is_found_and_a_sink_passes(pad: int) -> None:
    """Slot -1 is the last row, which no batch here owns; slot 0 is a sink that nobody ever owns."""
    cache = torch.ones(16, 4)

    def make(sizes: Any, generator: torch.Generator) -> dict[str, Tensor]:
        slots = torch.randperm(14, generator=generator)[: sizes["rows"]] + 1
        return {"x": torch.randn(sizes["rows"], 4, generator=generator), "slots": slots}

    made = graphed(
        write_slots,
        inputs={"x": ROWS, "slots": Input(dims={0: "rows"}, pad=pad)},
        sizes=[4, 8],
        make_inputs=make,
    ).capture(cache=cache)
    found = failed(made, scratch=[cache[0]])
    if pad == 0:
        assert found == set()
    else:
        assert {"close to plain eager", "ignores padding"} <= found


def test_5_a_pad_slot_that_the_batch_owns_is_refused_at_capture() -> None:
    made = graphed(write_slots, inputs={"x": ROWS, "slots": Input(dims={0: "rows"}, pad=-1)}, sizes=[8])
    with pytest.raises(GraphError, match="padding changes real rows"):
        made.capture(rows(5), torch.tensor([3, 15, 4, 1, 5]), torch.zeros(16, 4))


# --- 20: padded rows among real ones ---------------------------------------------------------------


def route(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two experts; rows behind the real ones go to none."""
    expert = (x[:, 0] > 0).to(torch.int64)
    is_real = torch.arange(x.shape[0], device=x.device) < num_real("rows")
    load = torch.zeros(3, dtype=torch.int64, device=x.device)
    load.scatter_add_(0, torch.where(is_real, expert, 2), torch.ones_like(expert))
    return torch.where(expert[:, None] == 1, x * 2, x * 3), load[:2]


@pytest.mark.parametrize("n", [1, 3, 5, 8])
def test_20_pad_rows_reach_no_expert_and_no_statistic(n: int) -> None:
    made = graphed(route, inputs={"x": ROWS}, sizes=[4, 8]).capture(rows(3))
    x = rows(n)
    result, load = made(x)
    assert torch.equal(result, route_plain(x)[0])
    assert load.sum() == n
    assert made.verify().is_ok


def route_plain(x: Tensor) -> tuple[Tensor, Tensor]:
    expert = (x[:, 0] > 0).to(torch.int64)
    return torch.where(expert[:, None] == 1, x * 2, x * 3), expert.bincount(minlength=2)


def test_20_statistics_over_pad_rows_are_refused() -> None:
    def counting(x: Tensor) -> Tensor:
        return (x[:, 0] >= 0).sum()

    with pytest.raises(GraphError, match="padding changes real rows"):
        graphed(counting, inputs={"x": ROWS}, sizes=[8]).capture(rows(3))


# --- 10, 24: breaks --------------------------------------------------------------------------------


@eager_break
def live(h: Tensor) -> Tensor:
    return h * (2 if float(h.detach().flatten()[0]) > 0 else 3)


def test_10_an_op_that_needs_live_data_runs_as_a_break_at_every_size_and_is_counted() -> None:
    made = graphed(lambda x: live(live(x) + 1) - 1, inputs={"x": ROWS}, sizes=[2, 4]).capture(rows(2))
    assert [graph["breaks"] for graph in made.report()["graphs"]] == [2, 2]
    assert {r.status.value for r in made.verify().results if r.check == "breaks per size"} == {"ok"}


def test_10_without_its_mark_such_an_op_cannot_be_captured_and_stays_eager() -> None:
    unmarked = live.__wrapped__
    made = graphed(lambda x: unmarked(x) - 1, inputs={"x": ROWS}, sizes=[2]).capture(rows(2))
    assert made.report()["graphs"] == []
    x = rows(2)
    assert torch.equal(made(x), unmarked(x) - 1)
    assert made.report()["eager"] == [{"phase": "forward", "reason": "capture_failed", "count": 1}]


@pytest.mark.parametrize("churn", [0, 3])
def test_24_break_results_bridge_segments_whatever_was_allocated_since(churn: int) -> None:
    made = graphed(lambda x: live(x + 1) - 1, inputs={"x": ROWS}, sizes=[2, 4]).capture(rows(2))
    held = []
    for n in (4, 1, 3, 2, 4):
        held += [torch.full((64,), float("nan")) for _ in range(churn)]
        x = rows(n).abs()
        assert torch.equal(made(x), (x + 1) * 2 - 1)


# --- 16, 35, 39: sizes and results -----------------------------------------------------------------

CALLS: dict[str, Callable[[Graphed], Any]] = {
    "keeps_a_slice": lambda made: made(rows(3))[:1],
    "keeps_all": lambda made: made(rows(3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_16_results_kept_over_two_replays_do_not_change(name: str) -> None:
    made = graphed(lambda x: x * 2, inputs={"x": ROWS}, sizes=[4]).capture(rows(2))
    kept = CALLS[name](made)
    before = kept.clone()
    made(rows(3))
    made(rows(4))
    assert torch.equal(kept, before)


def test_35_a_batch_above_the_largest_size_is_decided_before_anything_is_staged() -> None:
    made = graphed(lambda x: x * 2, inputs={"x": ROWS}, sizes=[8]).capture(rows(8))
    static = made.generation.runner.inputs.views({"rows": 8})["x"]
    made(torch.ones(8, 4))
    x = rows(9)
    assert torch.equal(made(x), x * 2)
    assert (static == 1).all(), "no row of the larger batch was written"


def test_39_an_empty_batch_is_its_own_case() -> None:
    made = graphed(lambda x: x.cumsum(0), inputs={"x": ROWS}, sizes=[4]).capture(rows(2))
    assert made(rows(0)).shape == (0, 4)
    assert made.report()["eager"] == [{"phase": "forward", "reason": "empty", "count": 1}]

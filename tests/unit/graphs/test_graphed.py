"""``graphed``: any size equals eager, arguments that differ are named, what no graph serves says why."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gapless
from gapless.errors import ConfigError, GaplessError, GraphError
from gapless.graphs.breakable import eager_break
from gapless.graphs.context import get_forward_context
from gapless.graphs.graphed import Graphed, Input, SharedPool, State, graphed
from gapless.graphs.modes import Strategy
from gapless.graphs.ops import register_custom_op
from gapless.graphs.real_sizes import num_real

ROWS = Input(dims={0: "rows"})
SIZES = [1, 2, 4, 8]


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(width, 12), nn.Linear(12, 5)
        self.requires_grad_(False)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.second(self.first(x).relu()) * scale


@eager_break
def double_if_positive(h: Tensor) -> Tensor:
    return h * 2 if float(h[0, 0]) > 0 else h - 1


def with_break(x: Tensor) -> Tensor:
    return double_if_positive(x + 1) * 3


def rows(n: int, width: int = 6) -> Tensor:
    return torch.randn(n, width)


def reasons(made: Graphed) -> dict[str, int]:
    return {row["reason"]: row["count"] for row in made.report()["eager"]}


@pytest.fixture(scope="module")
def net() -> Net:
    return Net()


@pytest.fixture(scope="module", params=["full", "breakable", "auto"])
def made(request: pytest.FixtureRequest, net: Net) -> Graphed:
    return graphed(net, inputs={"x": ROWS}, strategy=request.param, sizes=SIZES).capture(rows(3))


@pytest.mark.parametrize("n", range(1, 9))
def test_every_size_equals_padded_eager_bit_for_bit_and_eager_closely(
    made: Graphed, net: Net, n: int
) -> None:
    for _ in range(2):
        x = rows(n)
        result = made(x)
        assert torch.equal(result, made.padded_eager(x))
        torch.testing.assert_close(result, net(x))
        assert torch.equal(made.eager(x), net(x))


def test_sizes_above_the_largest_run_eagerly_and_are_counted(net: Net) -> None:
    made = graphed(net, inputs={"x": ROWS}, sizes=SIZES).capture(rows(2))
    x = rows(9)
    assert torch.equal(made(x), net(x))
    assert torch.equal(made(x[:0]), net(x[:0]))
    assert reasons(made) == {"larger_than_largest": 1, "empty": 1}


def test_report_counts_replays_and_padding(net: Net) -> None:
    made = graphed(net, inputs={"x": ROWS}, sizes=SIZES).capture(rows(2))
    for n in (3, 3, 8):
        made(rows(n))
    report = made.report()
    assert report["steps"] == [
        {"phase": "forward", "strategy": "full", "bucket": 4, "count": 2, "tokens": 6, "padding": 2},
        {"phase": "forward", "strategy": "full", "bucket": 8, "count": 1, "tokens": 8, "padding": 0},
    ]
    assert [row["num_tokens"] for row in report["graphs"]] == [8, 4, 2, 1]
    assert report["plan"]["sizes"] == {"rows": SIZES}
    assert report["timeline"]["replays"] == [3]


def test_first_call_captures_and_then_the_set_is_sealed(net: Net) -> None:
    made = graphed(net, inputs={"x": ROWS}, sizes=4)
    assert made.state is State.NEW
    made(rows(3))
    assert made.state is State.READY
    assert [row["num_tokens"] for row in made.report()["graphs"]] == [4, 2, 1]
    with pytest.raises(GraphError, match=r"its graphs exist. Use recapture"):
        made.capture(rows(3))


def test_without_sizes_the_example_is_the_largest(net: Net) -> None:
    made = graphed(net, inputs={"x": ROWS}).capture(rows(6))
    assert made.report()["plan"]["sizes"] == {"rows": [1, 2, 4, 6]}


@pytest.mark.parametrize("fails_at", [1, 4, 8])
def test_a_size_that_cannot_be_captured_is_served_by_the_next_or_eagerly(fails_at: int) -> None:
    def fn(x: Tensor) -> Tensor:
        if x.shape[0] == fails_at:
            float(x.sum())
        return x * 2

    made = graphed(fn, inputs={"x": ROWS}, sizes=SIZES).capture(rows(3))
    x = rows(fails_at)
    assert torch.equal(made(x), x * 2)
    report = made.report()
    (failure,) = report["failures"]
    assert "Tensor.__float__" in failure["message"]
    if fails_at == 8:
        assert reasons(made) == {"capture_failed": 1}
    else:
        assert report["steps"][0]["bucket"] == {1: 2, 4: 8}[fails_at]


# --- arguments ---------------------------------------------------------------------------------------------


def test_another_value_of_an_undeclared_argument_is_refused_by_name(made: Graphed) -> None:
    with pytest.raises(GraphError, match=r"argument 'scale' was 1.0 .* and is 2.0 now"):
        made(rows(2), 2.0)
    with pytest.raises(GraphError, match=r"argument 'scale' was 1\.0"):
        made(rows(2), scale=1)  # another type multiplies differently in general


def test_an_undeclared_tensor_must_be_the_same_memory() -> None:
    table = torch.randn(5, 6)
    made = graphed(lambda x, table: x + table[0], inputs={"x": ROWS}, sizes=SIZES).capture(rows(2), table)
    x = rows(3)
    assert torch.equal(made(x, table), x + table[0])
    table.normal_()  # contents may change
    assert torch.equal(made(x, table), x + table[0])
    assert torch.equal(made(x, table[:]), x + table[0])  # another object over the same memory
    with pytest.raises(GraphError, match=r"argument 'table' is another tensor .* update it in place"):
        made(x, table.clone())
    with pytest.raises(GraphError, match="argument 'table' is another tensor"):
        made(x, table[:3])


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, 7), r"'x' has shape \(3, 7\): dimension 1 was 6"),
        (torch.zeros(3, 6, 1), "'x' has 3 dimensions; it had 2"),
        (torch.zeros(3, 6, dtype=torch.float64), "'x' is torch.float64"),
        (None, "'x' is a NoneType"),
        ([1.0], "nested differently|is a list|is a float"),
    ],
)
def test_an_input_of_another_kind_is_refused_before_anything_is_written(
    made: Graphed, x: Any, message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        made(x)


def test_inputs_that_disagree_on_a_size_are_refused() -> None:
    made = graphed(lambda a, b: a + b, inputs={"a": ROWS, "b": ROWS}, sizes=4).capture(rows(2), rows(2))
    with pytest.raises(GraphError, match="input 'b': dimension 0 says rows=2, another input says 3"):
        made(rows(3), rows(2))


def test_nested_arguments_and_results_keep_their_structure() -> None:
    def fn(h: Tensor, rope: tuple[Tensor, Tensor], *, extra: dict[str, Tensor]) -> dict[str, Any]:
        return {"out": h * rope[0] + rope[1], "list": [extra["bias"] * 2, None, 7]}

    made = graphed(fn, inputs={"h": ROWS, "rope": ROWS, "extra": ROWS}, sizes=SIZES)

    def call(n: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (rows(n), (rows(n), rows(n))), {"extra": {"bias": rows(n)}}

    args, kwargs = call(3)
    made.capture(*args, **kwargs)
    for n in (1, 5, 8):
        args, kwargs = call(n)
        result, expected = made(*args, **kwargs), fn(*args, **kwargs)
        assert torch.equal(result["out"], expected["out"])
        assert torch.equal(result["list"][0], expected["list"][0])
        assert result["list"][1:] == [None, 7]
    with pytest.raises(GraphError, match=r"nested differently .* extra\['bias'\]"):
        made(*args, extra={})


def test_one_leaf_of_an_argument_can_be_declared_alone() -> None:
    table = rows(1)
    made = graphed(lambda pair: pair[0] + pair[1], inputs={"pair[0]": ROWS}, sizes=4)
    made.capture((rows(2), table))
    x = rows(3)
    assert torch.equal(made((x, table)), x + table)
    with pytest.raises(GraphError, match=r"argument 'pair\[1\]' is another tensor"):
        made((x, rows(1)))


def test_keyword_arguments_of_a_variadic_callable_can_be_declared() -> None:
    made = graphed(lambda x, **kwargs: x * kwargs["gain"], inputs={"x": ROWS, "gain": ROWS}, sizes=4)
    made.capture(rows(2), gain=rows(2))
    x, gain = rows(3), rows(3)
    assert torch.equal(made(x, gain=gain), x * gain)


def test_arrays_are_compared_by_content() -> None:
    made = graphed(lambda x, a: x * float(a[0]), inputs={"x": ROWS}, sizes=4)
    array = np.array([2.0])
    made.capture(rows(2), array)
    made(rows(2), np.array([2.0]))
    array[0] = 3.0
    with pytest.raises(GraphError, match="argument 'a'"):
        made(rows(2), array)


@pytest.mark.parametrize("change", ["training", "autocast"])
def test_ambient_state_that_differs_is_refused(change: str) -> None:
    made = graphed(net := Net(), inputs={"x": ROWS}, sizes=4).capture(rows(2))
    if change == "training":
        net.eval()
        with pytest.raises(GraphError, match="training"):
            made(rows(2))
        return
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(GraphError, match="autocast"):
        made(rows(2))


def test_an_input_that_wants_gradients_runs_eagerly_and_gets_them(made: Graphed) -> None:
    x = rows(3).requires_grad_()
    made(x).sum().backward()
    assert x.grad is not None
    assert reasons(made)["requires_grad"] >= 1
    with torch.no_grad():
        assert not made(x).requires_grad


# --- sizes and outputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (4, 8), (3, 7), (4, 1)])
def test_two_dynamic_dimensions(shape: tuple[int, int]) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.cumsum(1) * 2, x[:, 0]

    made = graphed(
        fn, inputs={"x": Input(dims={0: "batch", 1: "seq"})}, sizes={"batch": [2, 4], "seq": [4, 8]}
    )
    made.capture(torch.randn(2, 3, 5))
    x = torch.randn(*shape, 5)
    assert all(torch.equal(a, b) for a, b in zip(made(x), fn(x), strict=True))
    assert made.report()["steps"][0]["count"] == 1
    assert len(made.report()["graphs"]) == 4


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "rows": (lambda x: x * 2, "rows"),
    "twice_the_rows": (lambda x: x.repeat_interleave(2, 0), "2*rows"),
    "one_more": (lambda x: torch.cat([x.new_zeros(1, 6), x]), "rows+1"),
    "transposed": (lambda x: x.t() * 2, "rows"),
    "square": (lambda x: x @ x.t(), "rows"),
    "fixed": (lambda x: x[:1] * 2, ""),
    "scalar": (lambda x: x[0, 0] * 2, ""),
    "view_of_the_input": (lambda x: x[:, 1:], "rows"),
    "integers": (lambda x: x.argmax(-1), "rows"),
    "bools": (lambda x: x > 0, "rows"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_dynamic_dimensions_of_results_are_found(name: str) -> None:
    fn, symbol = OUTPUTS[name]
    made = graphed(fn, inputs={"x": ROWS}, sizes=SIZES).capture(rows(3))
    for n in (1, 3, 5, 8):
        x = rows(n)
        result = made(x)
        assert result.shape == fn(x).shape
        torch.testing.assert_close(result, fn(x))
    field = made.generation.findings.outputs.fields[0]
    found = {dim for dim in (field.dim, *field.row_shape) if isinstance(dim, str)}
    assert found == ({symbol} if symbol else set())


def test_declared_outputs_replace_the_search() -> None:
    made = graphed(lambda x: (x, x.sum(-1)), inputs={"x": ROWS}, sizes=4, outputs=[{0: "rows"}, {0: "rows"}])
    made.capture(rows(3))
    assert made(rows(2))[1].shape == (2,)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([{0: "rows"}], "declares 1 tensors; the callable returns 2"),
        ([{0: "rows"}, {1: "rows"}], "has no dimension 1"),
        ([{0: "rows"}, {0: "cols"}], "'cols' is no dynamic dimension"),
        ([{0: "rows"}, {0: "2*rows"}], "its dimension 0 is not '2\\*rows'"),
    ],
)
def test_declared_outputs_must_fit(outputs: Any, message: str) -> None:
    made = graphed(lambda x: (x, x.sum(-1)), inputs={"x": ROWS}, sizes=4, outputs=outputs)
    with pytest.raises(ConfigError, match=message):
        made.capture(rows(3))


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "size_as_value": (lambda x: (x, x.shape[0]), r"result \[1\] is 8 for rows=8 and 5 for rows=5"),
    "object": (lambda x: (x, object()), "a graph returns tensors"),
    "no_tensor": (lambda x: 3, "it returns no tensor"),
    "other_rank": (lambda x: x if x.shape[0] > 6 else x[0], "-dimensional"),
    "other_structure": (lambda x: (x,) if x.shape[0] > 6 else [x], "a graph returns one structure"),
    "mean": (lambda x: x.mean(0), "padding changes real rows"),
    "flipped": (lambda x: x.flip(0), "padding changes real rows"),
    "two_blocks": (lambda x: torch.cat([x, x]), "padding changes real rows"),
    "written_input": (lambda x: x.add_(1), "input 'x' is written in place"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_graphs_cannot_do_right_is_refused_at_capture(name: str) -> None:
    fn, message = REFUSED[name]
    made = graphed(fn, inputs={"x": ROWS}, sizes=8)
    with pytest.raises(GraphError, match=message):
        made.capture(rows(4))
    assert made.state is State.NEW
    assert made.report()["memory"]["pool_bytes"] == 0


def test_a_product_of_two_dynamic_dimensions_is_refused() -> None:
    made = graphed(
        lambda x: x.flatten(0, 1), inputs={"x": Input(dims={0: "b", 1: "s"})}, sizes={"b": 2, "s": 4}
    )
    with pytest.raises(GraphError, match="depends on b and s together"):
        made.capture(torch.randn(2, 4, 3))


def test_the_padding_check_can_be_waived() -> None:
    made = graphed(lambda x: x.mean(0), inputs={"x": ROWS}, sizes=4, check_padding=False).capture(rows(4))
    x = rows(4)
    torch.testing.assert_close(made(x), x.mean(0))


def test_random_results_are_not_compared_and_differ_from_call_to_call() -> None:
    x = torch.ones(4, 60)
    made = graphed(lambda x: torch.nn.functional.dropout(x), inputs={"x": ROWS}, sizes=4).capture(x)
    assert not torch.equal(made(x), made(x))
    torch.manual_seed(1)
    first = made(x)
    torch.manual_seed(1)
    assert torch.equal(first, made(x))


# --- padding, real sizes, offsets --------------------------------------------------------------------------


def test_each_input_is_padded_with_its_own_value() -> None:
    seen: list[Tensor] = []

    @eager_break
    def look(a: Tensor, b: Tensor) -> None:
        seen[:] = [a.clone(), b.clone()]

    def fn(a: Tensor, b: Tensor) -> Tensor:
        look(a, b)
        return a + b

    made = graphed(
        fn, inputs={"a": Input(dims={0: "rows"}, pad=7), "b": Input(dims={0: "rows"}, pad=-1)}, sizes=[4]
    )
    made.capture(torch.ones(2, dtype=torch.int64), torch.ones(2))
    for n in (1, 3, 2):
        made(torch.full((n,), 5), torch.full((n,), 0.5))
        assert seen[0].tolist() == [5] * n + [7] * (4 - n)
        assert seen[1].tolist() == [0.5] * n + [-1.0] * (4 - n)


def test_offsets_repeat_their_last_value() -> None:
    def fn(x: Tensor, offsets: Tensor) -> Tensor:
        row = torch.arange(x.shape[0], device=x.device)
        segment = torch.searchsorted(offsets, row, right=True)
        return x * segment[:, None]

    def make(sizes: Any, generator: torch.Generator) -> dict[str, Tensor]:
        """The last offset is the number of rows: only the user knows."""
        inner = torch.randint(sizes["rows"], (sizes["reqs"] - 1,), generator=generator).sort().values
        offsets = torch.cat([torch.tensor([0]), inner, torch.tensor([sizes["rows"]])])
        return {"x": torch.randn(sizes["rows"], 6, generator=generator), "offsets": offsets}

    made = graphed(
        fn,
        inputs={"x": ROWS, "offsets": Input(dims={0: "reqs+1"}, pad="last")},
        sizes={"rows": [8, 16], "reqs": [2, 4]},
        make_inputs=make,
    )
    made.capture(rows(6), torch.tensor([0, 2, 6]))
    for offsets in ([0, 3], [0, 1, 2, 7], [0, 4, 9, 12, 13]):
        x, t = rows(offsets[-1]), torch.tensor(offsets)
        assert torch.equal(made(x, t), fn(x, t))
    assert made.verify().is_ok


@pytest.mark.parametrize("n", [1, 3, 4, 7])
def test_num_real_gives_the_real_count_inside_a_graph(n: int) -> None:
    def mean(x: Tensor) -> Tensor:
        is_real = torch.arange(x.shape[0], device=x.device) < num_real("rows")
        return torch.where(is_real[:, None], x, 0).sum(0) / num_real("rows")

    made = graphed(mean, inputs={"x": ROWS}, sizes=SIZES).capture(rows(3))
    x = rows(n)
    torch.testing.assert_close(made(x), x.mean(0))
    torch.testing.assert_close(made.eager(x), x.mean(0))
    assert made.verify().is_ok
    nine = rows(9)
    torch.testing.assert_close(made(nine), nine.mean(0))


def test_num_real_outside_or_of_an_unknown_dimension_is_refused() -> None:
    with pytest.raises(GraphError, match=r"inside a callable made by gapless\.graphed only"):
        num_real("rows")
    made = graphed(lambda x: x * num_real("cols"), inputs={"x": ROWS}, sizes=4)
    with pytest.raises(GraphError, match="the dynamic dimensions are rows"):
        made.capture(rows(2))


# --- strategies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "chosen"), [("auto", "breakable"), ("breakable", "breakable")])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_breaks_decide_on_live_data(strategy: Any, chosen: str, sign: float) -> None:
    made = graphed(with_break, inputs={"x": ROWS}, strategy=strategy, sizes=SIZES)
    made.capture(torch.ones(2, 6))
    assert made.strategy is Strategy(chosen)
    x = sign * (rows(3).abs() + 2)
    assert torch.equal(made(x), with_break(x))
    assert made.report()["graphs"][0]["breaks"] == 1


def test_auto_is_full_without_breaks_and_says_so(net: Net) -> None:
    made = graphed(net, inputs={"x": ROWS}, sizes=4).capture(rows(2))
    assert made.strategy is Strategy.FULL
    (decision,) = made.report()["plan"]["decisions"]
    assert decision["reason"] == "it has no eager break"


def test_disabled_captures_nothing_and_counts(net: Net) -> None:
    made = graphed(net, inputs={"x": ROWS}, strategy="disabled", sizes=4)
    x = rows(3)
    assert torch.equal(made(x), net(x))
    assert made.report()["graphs"] == []
    assert reasons(made) == {"disabled": 1}
    with pytest.raises(GraphError, match="has no graphs"):
        made.verify()


@register_custom_op(out_shape="x", name="test_graphed_softmax")
def rows_softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1)


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)]).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + rows_softmax(layer(x)).relu()
        return x


@pytest.mark.parametrize("sizes", [[1], [1, 2, 4, 8], [8]])
def test_tc_piecewise_cuts_at_split_ops_and_equals_padded_eager(sizes: list[int]) -> None:
    net = Traced()
    made = graphed(
        net,
        inputs={"x": ROWS},
        strategy="tc_piecewise",
        split_ops=["gapless::test_graphed_softmax"],
        sizes=sizes,
    ).capture(rows(3))
    for n in range(1, sizes[-1] + 1):
        x = rows(n)
        result = made(x)
        assert torch.equal(result, made.padded_eager(x))
        torch.testing.assert_close(result, net(x))
    assert made.verify().is_ok
    report = made.report()
    assert report["plan"]["compile"]["split_ops"] == 3
    assert report["plan"]["compile"]["recompilations"] == 0
    assert report["graphs"][0]["breaks"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs split_ops="),
        ({"split_ops": ["gapless::no_such_op"]}, "there is no such operator"),
        ({"split_ops": ["aten::mm"], "compiler": "fast"}, "choose eager or inductor"),
        ({"split_ops": ["aten::mm"], "strategy": "full"}, "belong to strategy='tc_piecewise'"),
        ({"split_ops": ["aten::mm"], "inputs": {"x": Input(dims={0: "a", 1: "b"})}}, "one dynamic dimension"),
    ],
)
def test_tc_piecewise_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        graphed(Traced(), **{"inputs": {"x": ROWS}, "strategy": "tc_piecewise", **options}).capture(rows(3))


def test_split_ops_that_match_nothing_are_an_error() -> None:
    made = graphed(Traced(), inputs={"x": ROWS}, strategy="tc_piecewise", split_ops=["aten::bmm"], sizes=4)
    with pytest.raises(GaplessError, match=r"aten::bmm"):
        made.capture(rows(3))


def test_a_break_can_read_the_real_size_on_the_host() -> None:
    seen: list[int] = []

    @eager_break
    def look() -> None:
        seen.append(int(get_forward_context().batch.of("rows")))

    def fn(x: Tensor) -> Tensor:
        look()
        return x * 2

    made = graphed(fn, inputs={"x": ROWS}, sizes=[4]).capture(rows(2))
    seen.clear()
    made(rows(3))
    made(rows(1))
    assert seen == [3, 1]


# --- results, decorators, nesting, threads -----------------------------------------------------------------


def test_results_are_the_callers_own(made: Graphed) -> None:
    first = made(rows(3))
    kept = first.clone()
    made(rows(3))
    made(rows(8))
    assert torch.equal(first, kept)


def test_static_results_are_valid_until_the_next_call(net: Net) -> None:
    made = graphed(net, inputs={"x": ROWS}, sizes=4, copy_outputs=False).capture(rows(2))
    x = rows(3)
    first = made(x)
    assert torch.equal(first, made.padded_eager(x))
    second = made(rows(3))
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, second)


def test_interleaved_sizes_and_allocator_churn_do_not_disturb_each_other(made: Graphed) -> None:
    batches = [rows(n) for n in (8, 1, 4, 2, 7, 3)]
    expected = [made(x) for x in batches]
    for _ in range(3):
        for x, want in zip(reversed(batches), reversed(expected), strict=True):
            churn = [torch.full((1 << e,), float("nan")) for e in range(4, 14)]
            assert torch.equal(made(x), want)
            del churn


def test_decorator_for_functions() -> None:
    @graphed(inputs={"x": ROWS}, sizes=4)
    def triple(x: Tensor) -> Tensor:
        """Three times x."""
        return x * 3

    x = rows(3)
    assert torch.equal(triple(x), x * 3)
    assert triple.__name__ == "triple"
    assert triple.__doc__ == "Three times x."


def test_decorator_for_methods_gives_each_instance_its_own_graphs() -> None:
    class Scaler:
        def __init__(self, factor: float) -> None:
            self.factor = torch.tensor(factor)

        @graphed(inputs={"x": ROWS}, sizes=4)
        def scale(self, x: Tensor) -> Tensor:
            return x * self.factor

    two, three = Scaler(2.0), Scaler(3.0)
    x = rows(3)
    assert torch.equal(two.scale(x), x * 2)
    assert torch.equal(three.scale(x), x * 3)
    assert torch.equal(two.scale(x), x * 2)
    assert two.scale is two.scale
    assert isinstance(Scaler.scale, Graphed)


def test_inside_another_capture_it_becomes_part_of_it() -> None:
    inner = graphed(lambda x: x * 2, inputs={"x": ROWS}, sizes=4).capture(rows(2))
    outer = graphed(lambda x: inner(x) + 1, inputs={"x": ROWS}, sizes=4).capture(rows(2))
    x = rows(3)
    inner.release()  # the outer graph does not need it
    assert torch.equal(outer(x), x * 2 + 1)


def test_a_call_from_within_a_step_of_the_same_memory_runs_eagerly() -> None:
    pool = SharedPool.on("cpu")
    inner = graphed(lambda x: x * 2, inputs={"x": ROWS}, sizes=4, pool=pool).capture(rows(2))

    @eager_break
    def use_inner(h: Tensor) -> Tensor:
        return inner(h)

    outer = graphed(lambda x: use_inner(x + 1) + 1, inputs={"x": ROWS}, sizes=4, pool=pool).capture(rows(2))
    x = rows(3)
    assert torch.equal(outer(x), (x + 1) * 2 + 1)
    assert reasons(inner)["pool_busy"] >= 1


def test_calls_from_several_threads_take_turns(net: Net) -> None:
    made = graphed(net, inputs={"x": ROWS}, sizes=SIZES).capture(rows(2))
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(30):
                x = torch.randn(1 + seed % 8, 6, generator=generator)
                torch.testing.assert_close(made(x), net(x))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sum(step["count"] for step in made.report()["steps"]) == 120


def test_the_first_calls_of_several_threads_capture_once() -> None:
    runs: list[int] = []

    @eager_break
    def count() -> None:
        runs.append(1)

    def fn(x: Tensor) -> Tensor:
        count()
        return x * 2

    made = graphed(fn, inputs={"x": ROWS}, sizes=[4])
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(made(torch.ones(3, 6)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.sum().item() for result in results] == [36.0] * 4
    assert made.report()["steps"][0]["count"] == 4


def test_a_callable_that_calls_its_own_graphed_self_is_captured_like_other_code() -> None:
    def fn(x: Tensor, depth: int) -> Tensor:
        return x * 2 if depth == 0 else made(x + 1, 0) + 1

    made = graphed(fn, inputs={"x": ROWS}, sizes=[4])
    x = rows(3)
    assert torch.equal(made(x, 1), (x + 1) * 2 + 1)


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_captures_and_calls_work_in_every_grad_mode(net: Net, grad_mode: Callable[[], Any]) -> None:
    made = graphed(net, inputs={"x": ROWS}, sizes=4)
    with grad_mode():
        x = rows(3)
        torch.testing.assert_close(made(x), net(x))
    torch.testing.assert_close(made(rows(2) * 0), net(rows(2) * 0))


# --- options that make no sense ----------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"inputs": {}}, "no dynamic dimension"),
    ({"inputs": {"y": ROWS}}, "inputs names 'y', but the arguments are x, scale"),
    ({"strategy": "fast"}, "strategy='fast' does not exist; choose from auto"),
    ({"audit": "sometimes"}, "audit='sometimes'"),
    ({"inputs": {"x": Input(dims={0: "a", 1: "b"}), "scale": Input(dims={0: "c"})}}, "3 dynamic dimensions"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_options_that_make_no_sense_are_refused_at_once(
    net: Net, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        graphed(net, **{"inputs": {"x": ROWS}, "sizes": 4, **options})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (0, "must be at least 1"),
        (-3, "must be at least 1"),
        ([], "give the largest size, or a list"),
        ([4, 0], "0 is not a size"),
        ([4, 2.5], "2.5 is not a size"),
        (True, "give the largest size"),
        ("8", "give the largest size"),
        ({"cols": 4}, "the dynamic dimensions are"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(net: Net, sizes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        graphed(net, inputs={"x": ROWS}, sizes=sizes).capture(rows(3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Input(dims={-1: "rows"}), "is not a dimension"),
        (lambda: Input(dims={0: "rows*2"}), "is not 'symbol'"),
        (lambda: Input(dims={1: "rows"}, pad="last"), "needs dims={0"),
        (lambda: Input(dims={0: "rows"}, low=1), "give both low and high"),
    ],
)
def test_inputs_that_make_no_sense_are_refused(make: Callable[[], Input], message: str) -> None:
    with pytest.raises((ConfigError, GraphError), match=message):
        make()


@pytest.mark.parametrize(
    ("inputs", "example", "message"),
    [
        ({"x": Input(dims={2: "rows"})}, rows(2), "has 2 dimensions; dims declares dimension 2"),
        ({"x": ROWS, "scale": ROWS}, rows(2), "inputs names 'scale', but the call has no tensor there"),
        ({"x": ROWS}, torch.eye(6).to_sparse(), "graphs need dense ones"),
    ],
)
def test_examples_that_do_not_fit_are_refused(net: Net, inputs: Any, example: Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        graphed(net, inputs=inputs, sizes=4).capture(example)


def test_a_callable_without_a_signature_is_refused() -> None:
    with pytest.raises(ConfigError, match="no readable signature"):
        graphed(torch.add, inputs={"x": ROWS})


def test_make_inputs_makes_the_example_and_is_checked() -> None:
    def make(sizes: Any, generator: torch.Generator) -> dict[str, Tensor]:
        return {"x": torch.randn(sizes["rows"], 6, generator=generator)}

    made = graphed(Net(), inputs={"x": ROWS}, sizes=[2, 4], make_inputs=make).capture()
    assert made(rows(3)).shape == (3, 5)
    assert made.verify().is_ok
    bad = graphed(Net(), inputs={"x": ROWS}, sizes=4, make_inputs=lambda s, g: {"x": torch.zeros(1, 6)})
    with pytest.raises(ConfigError, match=r"it must be a tensor \(2, 6\)|it must be a tensor \(4, 6\)"):
        bad.capture(rows(4))
    with pytest.raises(ConfigError, match="needs sizes="):
        graphed(Net(), inputs={"x": ROWS}, make_inputs=make).capture()


def test_it_is_part_of_the_package() -> None:
    assert gapless.graphed is graphed
    assert gapless.Input is Input
    assert gapless.num_real is num_real
    assert gapless.eager_break is eager_break

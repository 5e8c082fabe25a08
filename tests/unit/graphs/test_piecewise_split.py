"""Splitting a traced graph: names, order, unpacking, aliases, and what is refused."""

from __future__ import annotations

import itertools
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from gapless.errors import CompileError, ConfigError, GraphError
from gapless.graphs.piecewise import split
from gapless.graphs.piecewise.split import PartKind, check_op_names, split_graph, split_ops_of
from piecewise_ops import ATTEND, FRESH, ROUTE, pw_attend, pw_fresh, pw_route

PIECE, TRIVIAL, SPLIT = PartKind.PIECE, PartKind.TRIVIAL, PartKind.SPLIT
ALL = (ATTEND, ROUTE, FRESH)


def trace(fn, *args: Tensor) -> fx.GraphModule:
    """The graph that ``torch.compile`` makes of ``fn``."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=backend, fullgraph=True)(*args)
    return graphs[0]


def attended(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    pw_attend(x, out, "a")
    return out


def one_op(x):
    return attended(x + 1) * 3


def two_outputs(x):
    a, b = pw_route(x + 1)
    return a * b + 1


def late_unpacking(x):
    routed = pw_route(x + 1)
    first = attended(routed[0] * 2)
    return first + routed[1]


def chunk_unpacked_late(x):
    parts = (x + 1).chunk(2, dim=-1)
    y = attended(parts[0].contiguous())
    return torch.cat([y, parts[1]], dim=-1)


def consecutive(x):
    return pw_fresh(pw_fresh(x + 1)) + 1


def consecutive_with_unpacking(x):
    a, b = pw_route(x + 1)
    return pw_fresh(a) + b


def allocation_between(x):
    y = pw_fresh(x + 1)
    out = torch.empty_like(y)
    pw_attend(y, out, "b")
    return out * 2


def op_first_and_last(x):
    return pw_fresh(pw_fresh(x) + 1)


def in_place_seen_through_a_view(x):
    y = x * 2
    flat = y.view(-1)
    z = attended(y)
    y.add_(z)
    return flat.sum() + pw_fresh(y).sum()


def written_by_the_op_and_read_through_a_view(x):
    out = torch.empty_like(x)
    row = out[0]
    pw_attend(x + 1, out, "c")
    return row * 2 + out


def autocast_across(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.t()
        z = pw_fresh(y.float())
        return (z @ z).float()


def gradients_off_across(x):
    with torch.no_grad():
        y = pw_fresh(x * 2)
    return y + 1


CASES = {
    one_op: [PIECE, SPLIT, PIECE],
    two_outputs: [PIECE, SPLIT, PIECE],
    late_unpacking: [PIECE, SPLIT, PIECE, SPLIT, PIECE],
    chunk_unpacked_late: [PIECE, SPLIT, PIECE],
    consecutive: [PIECE, SPLIT, PIECE],
    consecutive_with_unpacking: [PIECE, SPLIT, PIECE],
    allocation_between: [PIECE, SPLIT, TRIVIAL, SPLIT, PIECE],
    op_first_and_last: [SPLIT, PIECE, SPLIT],
    in_place_seen_through_a_view: [PIECE, SPLIT, PIECE, SPLIT, PIECE],
    written_by_the_op_and_read_through_a_view: [PIECE, SPLIT, PIECE],
    autocast_across: [PIECE, SPLIT, PIECE],
    gradients_off_across: [PIECE, SPLIT, PIECE],
}


@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_stitched_parts_alternate_and_compute_what_the_forward_does(fn):
    x = torch.randn(4, 4)
    result = split_graph(trace(fn, x), ALL)
    assert [part.name for part in result.parts] == [f"submod_{i}" for i in range(len(result.parts))]
    assert [part.kind for part in result.parts] == CASES[fn]
    (stitched,) = result.stitching(x.clone())
    assert torch.equal(stitched, fn(x.clone()))


@pytest.mark.parametrize("fn", [two_outputs, late_unpacking, consecutive_with_unpacking])
def test_unpacking_stays_with_its_op_so_no_tuple_crosses_a_border(fn):
    result = split_graph(trace(fn, torch.randn(4, 4)), ALL)
    for part in result.parts:
        nodes = list(part.graph.graph.nodes)
        inputs = [node.meta["example_value"] for node in nodes if node.op == "placeholder"]
        assert not any(isinstance(value, tuple | list) for value in inputs)
        unpacks = [node for node in nodes if node.target is operator.getitem]
        assert all(node.args[0].op != "placeholder" for node in unpacks)


def test_consecutive_split_ops_are_one_part_in_order():
    result = split_graph(trace(consecutive_with_unpacking, torch.randn(4, 4)), ALL)
    assert result.parts[1].ops == (ROUTE, FRESH)
    assert result.split_ops == (ROUTE, FRESH)


def test_only_the_named_ops_split():
    result = split_graph(trace(late_unpacking, torch.randn(4, 4)), (ATTEND,))
    assert [part.kind for part in result.parts] == [PIECE, SPLIT, PIECE]
    assert result.split_ops == (ATTEND,)


def test_an_empty_list_gives_one_piece():
    result = split_graph(trace(one_op, torch.randn(4, 4)), ())
    assert [part.name for part in result.parts] == ["submod_0"]


@pytest.mark.parametrize("name", [FRESH, f"{FRESH}.default"])
@pytest.mark.parametrize("target", [torch.ops.gapless.pw_fresh, torch.ops.gapless.pw_fresh.default])
def test_ops_are_found_with_and_without_overload_in_name_and_graph(name, target):
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(target, (x,)),))
    module = fx.GraphModule(torch.nn.Module(), graph)
    assert split_ops_of(module, (name,)) == [(name, torch.ops.gapless.pw_fresh.default)]
    assert [part.kind for part in split_graph(module, (name,)).parts] == [SPLIT]


def test_names_that_the_forward_does_not_call_are_reported():
    result = split_graph(trace(one_op, torch.randn(4, 4)), (ATTEND, ROUTE))
    assert result.unmatched == (ROUTE,)


def test_a_split_list_that_matches_nothing_is_an_error_and_names_what_there_is():
    graph = trace(one_op, torch.randn(4, 4))
    with pytest.raises(CompileError, match=r"names gapless::pw_route, .* does call: gapless::pw_attend"):
        split_graph(graph, (ROUTE,))


@pytest.mark.parametrize(
    "name",
    ["gapless::no_such_op", "nowhere::op", "pw_attend", "gapless.pw_attend", "gapless::pw_fresh.other", "::"],
)
def test_names_of_operators_that_do_not_exist_are_refused(name):
    with pytest.raises(ConfigError, match="no such operator"):
        check_op_names([ATTEND, name])


def test_names_of_other_libraries_are_accepted():
    check_op_names(["aten::mm", "aten::mm.default", "_c10d_functional::all_reduce"])


def test_a_cut_through_the_results_of_an_op_is_noticed(monkeypatch):
    graph = trace(two_outputs, torch.randn(4, 4))
    honest = split._assign

    def wrong(graph, wanted):
        part_of = honest(graph, wanted)
        return {n: i + 1 if n.target is operator.getitem else i for n, i in part_of.items()}

    monkeypatch.setattr(split, "_assign", wrong)
    with pytest.raises(GraphError, match="cross the border into submod_2"):
        split_graph(graph, ALL)


def test_an_op_that_may_be_captured_inside_a_split_part_is_noticed(monkeypatch):
    graph = trace(one_op, torch.randn(4, 4))
    monkeypatch.setattr(split, "_assign", lambda graph, wanted: dict.fromkeys(graph.graph.nodes, 0))
    with pytest.raises(GraphError, match="mixes split ops"):
        split_graph(graph, ALL)


BINARY = {"add": operator.add, "mul": operator.mul}
STEPS = ("add", "mul", "add_", "view", "attend", "fresh", "route", "empty")


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=14)
)
def test_random_programs_are_stitched_to_what_they_were(program):
    """In-place ops, views, buffers, ops with one or two results, in any order, reading anything earlier."""
    graph = fx.Graph()
    values = [graph.placeholder("x")]
    for name, i, j in program:
        left, right = values[i % len(values)], values[j % len(values)]
        if name in BINARY:
            values.append(graph.call_function(BINARY[name], (left, right)))
        elif name == "add_":
            graph.call_method("add_", (left, 1.5))
        elif name == "view":
            values.append(graph.call_method("view", (left, 3, 2)))
            values[-1] = graph.call_method("view", (values[-1], 2, 3))
        elif name == "empty":
            values.append(graph.call_function(torch.zeros_like, (left,)))
        elif name == "attend":
            graph.call_function(torch.ops.gapless.pw_attend.default, (left, right, "n"))
        elif name == "fresh":
            values.append(graph.call_function(torch.ops.gapless.pw_fresh.default, (left,)))
        else:
            both = graph.call_function(torch.ops.gapless.pw_route.default, (left,))
            values.append(graph.call_function(operator.getitem, (both, 0)))
    graph.output(tuple(values))
    module = fx.GraphModule(torch.nn.Module(), graph)
    x = torch.randn(2, 3)
    _note_values(module, x.clone())
    expected = module(x.clone())
    names = {"attend": ATTEND, "fresh": FRESH, "route": ROUTE}
    wanted = tuple({names[step] for step, _, _ in program if step in names})
    result = split_graph(module, wanted)
    kinds = [part.kind is SPLIT for part in result.parts]
    assert all(a != b for a, b in itertools.pairwise(kinds))
    got = result.stitching(x.clone())
    got = got if isinstance(got, tuple) else (got,)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def _note_values(module: fx.GraphModule, x: Tensor) -> None:
    class Note(fx.Interpreter):
        def run_node(self, n):
            n.meta["example_value"] = super().run_node(n)
            return n.meta["example_value"]

    Note(module).run(x)

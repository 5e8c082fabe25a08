"""Compiling pieces: sharing, recompilation, failures at start-up, passes, and the partition by Inductor."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor, nn

from gapless.errors import CompileError, ConfigError, GraphError
from gapless.graphs.breakable import eager_break
from gapless.graphs.capture import capture_program
from gapless.graphs.modes import RuntimeMode, Strategy
from gapless.graphs.piecewise import (
    FuseOutputCast,
    PiecewiseConfig,
    PiecewiseForward,
    install,
    register_pass,
    registered_passes,
    uninstall,
    unregister_pass,
)
from gapless.graphs.piecewise import backend as backend_module
from gapless.graphs.piecewise.passes import whole_graph_passes
from piecewise_ops import ATTEND, FRESH, ROUTE, RUNS, Stack, pw_attend, pw_scale, step

NONE, PIECEWISE = RuntimeMode.NONE, RuntimeMode.PIECEWISE


def compiled(fn, device, *args: Tensor, **facts) -> PiecewiseForward:
    """``fn`` traced on ``args``; split at attention unless told otherwise."""
    config = PiecewiseConfig(**{"split_ops": (ATTEND,), **facts})
    forward = PiecewiseForward(fn, config=config, device=device)
    with torch.no_grad(), step(NONE, len(args[0])):
        forward(*args)
    return forward


def attended(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    pw_attend(x, out, "t")
    return out


# --- sharing ---


@pytest.mark.parametrize("op", [ATTEND, FRESH, ROUTE])
def test_a_model_of_28_layers_compiles_three_pieces(device, op):
    model = Stack(num_layers=28, op=op)
    forward = compiled(model.forward, device, torch.arange(4), split_ops=(op,))
    stats = forward.stats
    assert (stats.num_pieces, stats.num_splits, stats.num_distinct) == (29, 28, 3)
    shared = {id(piece.compiled) for piece in forward.backend.pieces}
    assert len(shared) == 3


def test_layers_that_differ_only_in_a_handle_share_their_code(device):
    class Handles(nn.Module):
        def __init__(self, handles):
            super().__init__()
            self.handles = handles

        def forward(self, x):
            for handle in self.handles:
                x = attended(pw_scale(x + 1, handle) * 2)
            return x

    model = Handles([7, 8, 9, 7])
    x = torch.randn(4, 2)
    forward = compiled(model, device, x)
    assert forward.stats.num_distinct == 1
    assert [piece.numbers for piece in forward.backend.pieces] == [(7,), (8,), (9,), (7,)]
    with torch.no_grad(), step(NONE, 4):
        assert torch.equal(forward(x), model(x))


@pytest.mark.parametrize(
    ("first", "second", "is_shared"),
    [
        (lambda x: x * 2, lambda x: x * 2, True),
        (lambda x: x * 2, lambda x: x * 2.0, False),
        (lambda x: x * 2, lambda x: x * 3, False),
        (lambda x: x * 1, lambda x: x * True, False),
        (lambda x: x[:, :1] + x, lambda x: x[:, 1:] + x, False),
        (lambda x: torch.relu(x), lambda x: torch.tanh(x), False),
        (lambda x: x.sum(-1, keepdim=True) + x, lambda x: x.sum(-1, True) + x, False),
        (lambda x: x.to(torch.float64).float(), lambda x: x.to(torch.float16).float(), False),
    ],
)
def test_pieces_are_shared_only_if_every_op_and_constant_is_the_same(device, first, second, is_shared):
    def forward(x):
        x = attended(first(attended(x)))
        return attended(second(x))

    made = compiled(forward, device, torch.randn(4, 2))
    one, two = [piece for piece in made.backend.pieces if piece.name in ("submod_2", "submod_4")]
    assert (one.compiled is two.compiled) == is_shared


def test_pieces_whose_inputs_share_memory_differently_are_not_shared(device):
    def forward(x, a, b):
        view = a.view(-1)
        x = attended(x)
        a.add_(1)
        x = attended(x + view.sum())
        b.add_(1)
        return attended(x + a.sum())

    made = compiled(forward, device, torch.randn(4, 2), torch.ones(4, 2), torch.ones(4, 2))
    assert made.stats.num_distinct == made.stats.num_pieces


# --- recompilation ---


def test_a_new_dtype_is_traced_again_counted_and_logged(device, caplog):
    forward = compiled(lambda x: attended(x) + 1, device, torch.randn(4, 2))
    assert forward.stats.num_recompilations == 0
    with torch.no_grad(), step(NONE, 4):
        forward(torch.randn(4, 2).double())
    assert forward.stats.num_recompilations == 1
    assert "traced again (2 times now)" in caplog.text
    assert forward.stats.to_dict()["recompilations"] == 1


def test_another_trace_that_fails_ends_in_one_message_too(device, monkeypatch):
    forward = compiled(lambda x: attended(x) + 1, device, torch.randn(4, 2))

    def fail(*args):
        raise RuntimeError("the second time")

    monkeypatch.setattr(backend_module, "split_graph", fail)
    with torch.no_grad(), step(NONE, 4):
        with pytest.raises(CompileError, match=r"RuntimeError: the second time\n.*op: [\s\S]* experimental"):
            forward(torch.randn(4, 2).double())
        x = torch.randn(4, 2)
        assert torch.equal(forward(x), attended(x) + 1)


def test_many_forwards_of_one_class_do_not_use_up_each_others_traces(device):
    for seed in range(12):
        model = Stack(num_layers=1, seed=seed)
        forward = compiled(model.forward, device, torch.arange(4))
        assert forward.stats.num_traces == 1
        with torch.no_grad(), step(NONE, 3):
            assert torch.equal(forward(torch.arange(3)), model(torch.arange(3)))


def test_a_float_that_differs_between_two_models_stays_a_constant(device):
    def shifted_by(offset):
        return lambda x: attended(x * offset) + offset

    x = torch.randn(4, 2)
    for offset in (0.5, 0.25, 3.5):
        forward = compiled(shifted_by(offset), device, x)
        with torch.no_grad(), step(PIECEWISE, 4):
            capture_program(
                lambda f=forward: f(x), device=device, pool=device.new_pool(), strategy=Strategy.TC_PIECEWISE
            )


def test_equal_sizes_of_different_arguments_may_differ_later(device):
    """A dimension that is fixed has the size of the tokens when traced."""

    def forward(x, y):
        return attended(x) + y.sum(0)

    made = PiecewiseForward(
        forward, config=PiecewiseConfig(split_ops=(ATTEND,)), device=device, dynamic_dims={"y": None}
    )
    y = torch.randn(4, 4)
    for rows in (4, 8, 1, 3):
        x = torch.randn(rows, 4)
        with torch.no_grad(), step(NONE, rows):
            assert torch.equal(made(x, y), forward(x, y))
    assert made.stats.num_traces == 1


def test_keyword_arguments_and_their_dimensions(device):
    def forward(*, x, scale=2.0, **more):
        return attended(x.transpose(0, 1)) * scale + more["y"].sum()

    made = PiecewiseForward(
        forward,
        config=PiecewiseConfig(split_ops=(ATTEND,)),
        device=device,
        dynamic_dims={"x": 1},
        default_dim=None,
    )
    for columns in (4, 1, 7):
        x = torch.randn(2, columns)
        with torch.no_grad(), step(NONE, columns):
            assert torch.equal(made(x=x, y=torch.ones(2)), forward(x=x, y=torch.ones(2)))
    assert made.stats.num_traces == 1


# --- failures at start-up ---


def reads_data(x):
    return attended(x) * x.sum().item()


def branches_on_data(x):
    if x.sum() > 0:
        return attended(x)
    return x


def counts_data(x):
    return attended(x) + x.nonzero().sum()


def picks_by_mask(x):
    return attended(x) + x[x > 0].sum()


@pytest.mark.parametrize(
    ("fn", "code"),
    [
        (reads_data, "x.sum().item()"),
        (branches_on_data, "x.sum() > 0"),
        (counts_data, "x.nonzero()"),
        (picks_by_mask, "x[x > 0]"),
    ],
)
def test_a_forward_that_cannot_be_traced_ends_in_one_message(device, fn, code):
    with pytest.raises(CompileError) as caught:
        compiled(fn, device, torch.ones(4, 2), off_switch="--some-flag=off")
    text = str(caught.value)
    assert "tc_piecewise could not trace the model" in text
    assert f"test_piecewise_compile.py:{fn.__code__.co_firstlineno + 1} in {fn.__name__}" in text
    assert code in text
    assert "experimental" in text
    assert "start with --some-flag=off" in text
    for wanted in ("traceback", "model and its quantisation", "launch command", "GPU and its driver"):
        assert wanted in text
    assert caught.value.__cause__ is not None


def test_shapes_that_do_not_fit_name_the_op(device):
    def forward(x):
        if torch.compiler.is_compiling():
            return attended(x) @ torch.ones(3, 3)
        return attended(x)

    with pytest.raises(CompileError, match=r"op: .*matmul"):
        compiled(forward, device, torch.ones(4, 2))


def test_an_error_of_the_forward_itself_is_passed_on(device):
    def forward(x):
        raise LookupError("my own")

    with pytest.raises(LookupError, match="my own"):
        compiled(forward, device, torch.ones(4, 2))


def test_a_split_list_that_matches_nothing_fails_as_it_is(device):
    with pytest.raises(CompileError, match=r"^the split list names gapless::pw_route"):
        compiled(lambda x: attended(x) + 1, device, torch.ones(4, 2), split_ops=(ROUTE,))


def test_an_eager_break_inside_a_traced_forward_is_refused(device):
    """Its body would otherwise be captured in the middle of a piece."""

    @eager_break
    def reads_live_data(x: Tensor) -> Tensor:
        return x + 1

    def forward(x):
        return attended(reads_live_data(x))

    with pytest.raises(CompileError, match=r"could not trace[^$]*in forward: return attended\(reads_live"):
        compiled(forward, device, torch.ones(4, 2))


def test_split_ops_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="gapless::nothing"):
        PiecewiseConfig(split_ops=("gapless::nothing",))


def test_a_forward_can_be_uninstalled(device):
    model = Stack()
    install(model, config=PiecewiseConfig(split_ops=(ATTEND,)), device=device)
    uninstall(model)
    assert "forward" not in vars(model)
    with pytest.raises(GraphError, match="no piecewise forward"):
        uninstall(model)


# --- passes ---

FUSE = FuseOutputCast(ops=(ATTEND,), out_argument="out")


def casts_after_a_view(x):
    h = x * 3
    out = torch.empty_like(h)
    pw_attend(h, out, "c")
    return out.flatten(1).to(torch.bfloat16) * 2


def casts_by_name(x):
    return attended(x + 1).half() - 1


def casts_up(x):
    return attended(x.half()).float()


def reads_twice(x):
    y = attended(x)
    return y.to(torch.bfloat16) + y


def does_not_cast(x):
    return attended(x) + 1


def casts_an_integer(x):
    return attended(x).to(torch.int32)


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (casts_after_a_view, 1),
        (casts_by_name, 1),
        (casts_up, 0),
        (reads_twice, 0),
        (does_not_cast, 0),
        (casts_an_integer, 0),
    ],
)
def test_output_casts_are_fused_where_rounding_stays_the_same_and_results_are_kept(device, fn, count):
    x = torch.randn(4, 6)
    forward = compiled(fn, device, x, split_ops=(), passes=(FUSE,))
    assert forward.stats.changes_by_pass == (("fuse_output_cast", count),)
    for rows in (4, 1, 9):
        x = torch.randn(rows, 6)
        with torch.no_grad(), step(NONE, rows):
            got = forward(x)
        assert got.dtype == fn(x).dtype
        assert torch.equal(got, fn(x))


def test_a_pass_that_needs_the_whole_graph_is_refused_beside_split_ops():
    with pytest.raises(ConfigError, match="fuse_output_cast needs the whole graph, but there are split ops"):
        PiecewiseConfig(split_ops=(ATTEND,), passes=(FUSE,))


def test_a_pass_over_single_pieces_runs_beside_split_ops(device):
    class NoNegation:
        name, needs_whole_graph = "no_negation", False

        def __call__(self, graph):
            found = [n for n in graph.graph.nodes if n.target in (torch.neg, "neg")]
            for node in found:
                node.replace_all_uses_with(node.args[0])
                graph.graph.erase_node(node)
            return len(found)

    forward = compiled(lambda x: attended(torch.neg(x)) + 1, device, torch.ones(4, 2), passes=(NoNegation(),))
    assert forward.stats.to_dict()["passes"] == {"no_negation": 1}
    with torch.no_grad(), step(NONE, 4):
        assert torch.equal(forward(torch.ones(4, 2)), attended(torch.ones(4, 2)) + 1)


def test_passes_are_registered_by_name_and_say_what_they_need():
    assert registered_passes() == ()
    register_pass(FUSE)
    try:
        assert registered_passes() == (FUSE,)
        assert whole_graph_passes() == ("fuse_output_cast",)
        with pytest.raises(ConfigError, match="'fuse_output_cast' is registered already"):
            register_pass(FUSE)
    finally:
        unregister_pass("fuse_output_cast")
    with pytest.raises(ConfigError, match="no pass is called 'fuse_output_cast'"):
        unregister_pass("fuse_output_cast")


# --- compiled code that no dispatcher sees, and Inductor ---


def capture_and_compare(forward, model, device, sizes=(8, 4, 2, 1)) -> int:
    """Capture piecewise at every size, replay on new data against the compiled path; returns nodes of one."""
    pool = device.new_pool()
    made = {}
    for n in sizes:
        ids = torch.zeros(n, dtype=torch.int64)
        with step(PIECEWISE, n):
            program, out = capture_program(
                lambda ids=ids: forward(ids), device=device, pool=pool, strategy=Strategy.TC_PIECEWISE
            )
        made[n] = (ids, program, device.alias(out))
    for i, n in enumerate((*sizes, *sizes)):
        ids, program, out = made[n]
        ids.copy_(torch.randint(16, (n,), generator=torch.Generator().manual_seed(i)))
        with step(PIECEWISE, n):
            program.replay()
        got = out.clone()
        with torch.no_grad(), step(NONE, n):
            assert torch.equal(got, forward(ids))
        torch.testing.assert_close(got, model(ids), rtol=1e-5, atol=1e-5)
    return made[sizes[0]][1].num_nodes


def test_opaque_code_is_one_node_per_piece_on_fixed_buffers(device, monkeypatch):
    """Stands in for Inductor: compiled code that computes past every dispatch mode."""
    from gapless.graphs.piecewise import compilers

    def by_numpy(graph, **options):
        def run(*args):
            assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
            return graph.forward(*args)

        return run

    monkeypatch.setattr(compilers, "compile_by_inductor", by_numpy)
    model = Stack()
    forward = compiled(model.forward, device, torch.arange(4), compiler="inductor")
    assert capture_and_compare(forward, model, device) == 4


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_inductor_compiles_each_kind_of_piece_once_for_every_size(device):
    model = Stack(num_layers=5)
    forward = compiled(model.forward, device, torch.arange(4), compiler="inductor")
    assert forward.stats.num_distinct == 3
    assert capture_and_compare(forward, model, device) == 6
    assert forward.stats.num_recompilations == 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_inductor_code_takes_handles_as_inputs(device):
    def forward(x):
        for handle in (7, 8, 9):
            x = pw_scale(attended(x) + 1, handle) * 2
        return x

    made = compiled(forward, device, torch.randn(4, 2), compiler="inductor")
    assert made.stats.num_distinct == 2  # with and without a buffer for the next op
    for rows in (4, 1):
        x = torch.randn(rows, 2)
        with torch.no_grad(), step(NONE, rows):
            torch.testing.assert_close(made(x), forward(x))


def test_a_partition_by_inductor_is_cut_where_its_code_calls_the_split_ops(device, monkeypatch):
    """Control flow with a fake compiler; Inductor itself partitions on a GPU only."""
    seen = {}

    def fake(graph, *, partition_at):
        seen["partition_at"] = partition_at
        return graph.forward

    monkeypatch.setattr(backend_module, "compile_by_inductor", fake)
    model = Stack(op=ROUTE)
    forward = compiled(
        model.forward,
        device,
        torch.arange(4),
        split_ops=(ROUTE,),
        compiler="inductor",
        use_inductor_graph_partition=True,
    )
    assert seen == {"partition_at": (ROUTE,)}
    pool, ids = device.new_pool(), torch.arange(4)
    with step(PIECEWISE, 4):
        program, out = capture_program(
            lambda: forward(ids), device=device, pool=pool, strategy=Strategy.TC_PIECEWISE
        )
        assert (program.num_breaks, program.num_segments) == (3, 4)
        RUNS.clear()
        ids.copy_(torch.tensor([5, 5, 1, 0]))
        program.replay()
    assert RUNS["route"] == 3
    assert torch.equal(out, model(ids))


def test_a_partition_that_swallows_a_split_op_is_noticed(device, monkeypatch):
    monkeypatch.setattr(
        backend_module, "compile_by_inductor", lambda graph, *, partition_at: lambda *args: (args[1] * 1.0,)
    )
    forward = compiled(
        Stack().forward, device, torch.arange(4), compiler="inductor", use_inductor_graph_partition=True
    )
    with step(PIECEWISE, 4), pytest.raises(GraphError, match=r"0 split parts ran as breaks, .* has 3"):
        capture_program(
            lambda: forward(torch.arange(4)),
            device=device,
            pool=device.new_pool(),
            strategy=Strategy.TC_PIECEWISE,
        )


def test_inductor_partition_on_a_cpu_is_refused_with_the_way_out(device):
    with pytest.raises(ConfigError, match=r"partition needs a CUDA device.*Leave it off"):
        compiled(
            Stack().forward, device, torch.arange(4), compiler="inductor", use_inductor_graph_partition=True
        )


def test_whole_graph_passes_and_no_splits_give_one_piece(device):
    model = Stack(num_layers=2)
    forward = compiled(model.forward, device, torch.arange(4), split_ops=())
    assert (forward.stats.num_pieces, forward.stats.num_splits) == (1, 0)
    pool, ids = device.new_pool(), torch.arange(4)
    with step(RuntimeMode.FULL, 4):
        program, out = capture_program(lambda: forward(ids), device=device, pool=pool, strategy=Strategy.FULL)
        program.replay()
    assert program.num_segments == 1
    assert torch.equal(out, model(ids))

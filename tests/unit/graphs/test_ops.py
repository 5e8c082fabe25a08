"""Custom ops: the derived schema, opacity for compile and dispatch modes, aliasing, and what is refused."""

from __future__ import annotations

import itertools
import shutil
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.errors import ConfigError, GraphError
from gapless.graphs.op_log import OpLog
from gapless.graphs.ops import (
    direct,
    implementation_of,
    register_custom_op,
    register_custom_op_from_extern,
)

_numbers = itertools.count()


def fresh(stem: str = "op") -> str:
    return f"test_{stem}_{next(_numbers)}"


BACKENDS = [
    None,
    "eager",
    "aot_eager",
    pytest.param(
        "inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
    ),
]


def run(fn: Callable[..., Any], backend: str | None, *args: Any) -> Any:
    if backend is None:
        return fn(*args)
    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, fullgraph=True)(*args)


class CallLog(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["op", "direct"])
def path(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Any]]:
    """How a call site calls an op: itself, or past the dispatcher, which needs gradients to be off."""
    if request.param == "op":
        yield lambda op: op
    else:
        with torch.no_grad():
            yield direct


# The two examples of the documentation.


@register_custom_op(mutates_args=["output_q", "output_s"], name="test_per_token_group_quant_8bit")
def per_token_group_quant_8bit(input: torch.Tensor, output_q: torch.Tensor, output_s: torch.Tensor) -> None:
    scale = input.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
    output_s.copy_(scale)
    output_q.copy_((input / scale).round())


@register_custom_op(mutates_args=["x"], out_shape=0, name="test_add")
def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.add_(y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_in_place_op_writes_all_its_outputs(backend: str | None, path: Callable[[Any], Any]) -> None:
    quantise = path(per_token_group_quant_8bit)

    def program(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
        quantise(x * 2, q, s)
        return q.float() * s

    x = torch.randn(4, 8)
    q, s = torch.zeros(4, 8, dtype=torch.int8), torch.zeros(4, 1)
    result = run(program, backend, x, q, s)
    torch.testing.assert_close(result, x * 2, atol=float(s.max()), rtol=0)
    torch.testing.assert_close(s, (x * 2).abs().amax(-1, keepdim=True) / 127)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_op_may_mutate_and_return(backend: str | None, path: Callable[[Any], Any]) -> None:
    add_in_place = path(add)

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        result = add_in_place(x, y)
        return result * 10, x + 0

    x, y = torch.ones(3), torch.full((3,), 2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        scaled, after = run(program, backend, x, y)
    assert scaled.tolist() == [30.0] * 3
    assert after.tolist() == [3.0] * 3
    assert x.tolist() == [3.0] * 3, "the mutation reached the caller's tensor"


def test_a_returned_argument_comes_back_as_a_copy_with_one_warning(path: Callable[[Any], Any]) -> None:
    @register_custom_op(mutates_args=["x"], out_shape="x", name=fresh())
    def scale(x: Tensor, factor: float) -> Tensor:
        return x.mul_(factor)

    x = torch.ones(2)
    with pytest.warns(UserWarning, match="callers get a copy"):
        first = path(scale)(x, 3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = path(scale)(x, 2.0)
    assert first.tolist() == [3.0, 3.0]
    assert second.tolist() == [6.0, 6.0]
    assert x.tolist() == [6.0, 6.0]


@pytest.mark.parametrize(
    "view",
    [lambda x: x, lambda x: x.view(-1).view(x.shape), lambda x: x.detach()],
    ids=["argument", "view", "detached"],
)
def test_every_kind_of_alias_is_copied(view: Callable[[Tensor], Tensor], path: Callable[[Any], Any]) -> None:
    @register_custom_op(out_shape=0, name=fresh())
    def same(x: Tensor) -> Tensor:
        return view(x)

    x = torch.zeros(2, 2)
    with pytest.warns(UserWarning, match="copy"):
        result = path(same)(x)
    result.fill_(1)
    assert x.sum() == 0


def test_an_alias_of_an_element_of_a_list_is_copied(path: Callable[[Any], Any]) -> None:
    @register_custom_op(out_shape="x", name=fresh())
    def pick(x: Tensor, others: list[Tensor]) -> Tensor:
        return others[1]

    others = [torch.zeros(2), torch.ones(2)]
    with pytest.warns(UserWarning, match="copy"):
        picked = path(pick)(torch.zeros(2), others)
    assert picked.tolist() == [1.0, 1.0]
    assert picked.data_ptr() != others[1].data_ptr()


def test_a_fresh_result_is_not_copied(path: Callable[[Any], Any]) -> None:
    made: list[Tensor] = []

    @register_custom_op(out_shape=0, name=fresh())
    def double(x: Tensor) -> Tensor:
        made.append(x * 2)
        return made[-1]

    assert path(double)(torch.ones(2)).data_ptr() == made[0].data_ptr()


# Schema


@pytest.mark.parametrize(
    ("fn_annotations", "mutates", "expected"),
    [
        ({"x": Tensor, "return": None}, (), "(Tensor x) -> ()"),
        ({"x": Tensor, "y": Tensor | None, "return": None}, ("x",), "(Tensor(a0!) x, Tensor? y) -> ()"),
        ({"x": Tensor, "y": Tensor | None, "return": None}, ("y",), "(Tensor x, Tensor(a1!)? y) -> ()"),
        ({"x": list[Tensor], "n": int, "return": None}, ("x",), "(Tensor(a0!)[] x, SymInt n) -> ()"),
        ({"x": Sequence[Tensor], "s": str, "return": None}, (), "(Tensor[] x, str s) -> ()"),
        ({"x": Tensor, "f": float | None, "return": None}, (), "(Tensor x, float? f) -> ()"),
        ({"x": Tensor, "b": bool, "return": None}, (), "(Tensor x, bool b) -> ()"),
        ({"x": Tensor, "d": torch.dtype, "return": None}, (), "(Tensor x, ScalarType d) -> ()"),
        ({"x": Tensor, "n": list[int], "return": Tensor}, (), "(Tensor x, SymInt[] n) -> Tensor"),
        (
            {"x": Tensor, "y": Tensor, "z": Tensor, "return": None},
            ("x", "z"),
            "(Tensor(a0!) x, Tensor y, Tensor(a2!) z) -> ()",
        ),
    ],
)
def test_schema_follows_the_annotations(
    fn_annotations: dict[str, Any], mutates: tuple[str, ...], expected: str
) -> None:
    names = [name for name in fn_annotations if name != "return"]
    fn = eval(f"lambda {', '.join(names)}: None", {})
    fn.__annotations__ = fn_annotations
    name = fresh()
    out_shape = 0 if fn_annotations["return"] is Tensor else None
    op = register_custom_op(fn, mutates_args=mutates, out_shape=out_shape, name=name)
    assert str(op._schema) == f"gapless::{name}{expected}"


def test_defaults_and_keyword_only_arguments_are_kept(path: Callable[[Any], Any]) -> None:
    seen: list[dict[str, Any]] = []

    def keep(
        x: Tensor, n: int = 3, window: int | None = None, *, out: Tensor, eps: float = 0.5, mode: str = "a"
    ) -> None:
        seen.append({"n": n, "window": window, "eps": eps, "mode": mode})
        out.copy_(x * n)

    op = path(register_custom_op(keep, mutates_args=["out"], name=fresh()))
    out = torch.zeros(2)
    op(torch.ones(2), out=out)
    op(torch.ones(2), 4, window=7, out=out, mode="b")
    assert seen == [
        {"n": 3, "window": None, "eps": 0.5, "mode": "a"},
        {"n": 4, "window": 7, "eps": 0.5, "mode": "b"},
    ]
    assert out.tolist() == [4.0, 4.0]


def test_keyword_only_argument_may_give_the_shape() -> None:
    @register_custom_op(out_shape="like", out_dtype=torch.int32, name=fresh())
    def count(x: Tensor, *, like: Tensor) -> Tensor:
        return torch.full(like.shape, int(x.sum()), dtype=torch.int32)

    assert count(torch.ones(5), like=torch.zeros(2, 3)).tolist() == [[5, 5, 5], [5, 5, 5]]
    with FakeTensorMode():
        fake = count(torch.ones(5), like=torch.zeros(2, 3))
    assert (fake.shape, fake.dtype) == ((2, 3), torch.int32)


@pytest.mark.parametrize(
    ("out_shape", "shape", "out_dtype", "dtype"),
    [
        (0, (2, 3), None, torch.float32),
        ("x", (2, 3), torch.float16, torch.float16),
        (1, (4,), None, torch.int64),
        ("y", (4,), torch.bool, torch.bool),
    ],
)
def test_fake_result_has_the_declared_shape_and_dtype(
    out_shape: int | str, shape: tuple[int, ...], out_dtype: torch.dtype | None, dtype: torch.dtype
) -> None:
    @register_custom_op(out_shape=out_shape, out_dtype=out_dtype, name=fresh())
    def make(x: Tensor, y: Tensor) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    real = make(torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64))
    with FakeTensorMode():
        fake = make(torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64))
    assert (real.shape, real.dtype) == (fake.shape, fake.dtype) == (torch.Size(shape), dtype)


@pytest.mark.parametrize(
    "wrong",
    [lambda x: x.new_zeros(9), lambda x: x.double(), lambda x: x.new_zeros(2, 3, device="meta")],
    ids=["shape", "dtype", "device"],
)
def test_a_result_unlike_the_declaration_raises(wrong: Callable[[Tensor], Tensor]) -> None:
    @register_custom_op(out_shape=0, name=fresh())
    def lie(x: Tensor) -> Tensor:
        return wrong(x)

    with pytest.raises(GraphError, match="was registered to return"):
        lie(torch.zeros(2, 3))


def test_shape_argument_that_is_none_raises_a_clear_error(path: Callable[[Any], Any]) -> None:
    @register_custom_op(out_shape="x", name=fresh())
    def maybe(x: Tensor | None, y: Tensor) -> Tensor:
        return torch.zeros_like(y)

    with pytest.raises(GraphError, match="'x' is None in this call"):
        path(maybe)(None, torch.zeros(2))


def test_own_fake_describes_several_outputs() -> None:
    def fake(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape[0]), torch.empty_like(x)

    @register_custom_op(fake=fake, name=fresh())
    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum(-1), x

    x = torch.ones(2, 3)
    with pytest.warns(UserWarning, match="copy"):
        total, same = split(x)
    assert total.tolist() == [3.0, 3.0]
    assert same.data_ptr() != x.data_ptr()
    compiled_total, _ = run(lambda x: split(x), "aot_eager", x)
    assert compiled_total.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_lists_and_optionals_travel_through_compilation(backend: str | None) -> None:
    def program(x: Tensor, parts: list[Tensor], out: Tensor, bias: Tensor | None) -> Tensor:
        accumulate(x, parts, out, bias, 2.0, note="n")
        return out + 1

    for bias in (None, torch.ones(3)):
        out = torch.zeros(3)
        result = run(program, backend, torch.ones(3), [torch.ones(3), torch.ones(3)], out, bias)
        expected = 3 * 2.0 + (0 if bias is None else 1)
        assert out.tolist() == [expected] * 3
        assert result.tolist() == [expected + 1] * 3


@register_custom_op(mutates_args=["out"], name="test_accumulate")
def accumulate(
    x: Tensor, parts: list[Tensor], out: Tensor, bias: Tensor | None, factor: float, *, note: str = ""
) -> None:
    total = x + sum(parts)
    out.copy_(total * factor if bias is None else total * factor + bias)


# Opacity


def test_a_dispatch_mode_sees_one_call(path: Callable[[Any], Any]) -> None:
    @register_custom_op(mutates_args=["x"], name=fresh())
    def busy(x: Tensor) -> None:
        x.add_(1)
        x.mul_(2).sub_(x.mean())

    x = torch.ones(4)
    with CallLog() as log:
        path(busy)(x)
    assert log.calls == [busy]


def test_compile_keeps_the_op_as_one_node() -> None:
    targets: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        targets.extend(node.target for node in gm.graph.nodes if node.op == "call_function")
        return gm.forward

    torch._dynamo.reset()
    q, s = torch.zeros(2, 4), torch.zeros(2, 1)
    torch.compile(lambda x: per_token_group_quant_8bit(x, q, s), backend=backend, fullgraph=True)(
        torch.randn(2, 4)
    )
    assert per_token_group_quant_8bit in targets
    assert torch.Tensor.abs not in targets
    assert torch.ops.aten.abs.default not in targets


def test_an_op_without_tensor_inputs_runs(path: Callable[[Any], Any]) -> None:
    @register_custom_op(fake=lambda n: torch.empty(n), name=fresh())
    def make_range(n: int) -> Tensor:
        return torch.arange(n, dtype=torch.float32)

    assert path(make_range)(3).tolist() == [0.0, 1.0, 2.0]


def test_implementation_of_runs_the_same_code_without_dispatch() -> None:
    @register_custom_op(mutates_args=["out"], name=fresh())
    def fill(out: Tensor, value: float) -> None:
        out.fill_(value)

    out = torch.zeros(2)
    implementation = implementation_of(fill)
    assert implementation is not None
    implementation(out, 5.0)
    assert out.tolist() == [5.0, 5.0]
    assert implementation_of(torch.ops.aten.add.Tensor) is None


def test_implementation_copies_aliases_as_the_op_does() -> None:
    implementation = implementation_of(add)
    assert implementation is not None
    x = torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = implementation(x, torch.ones(2))
    assert result.data_ptr() != x.data_ptr()
    assert result.tolist() == x.tolist() == [2.0, 2.0]


# Past the dispatcher


class Watched:
    """An op whose calls through the dispatcher are told from those past it."""

    def __init__(self) -> None:
        def fake(x: Tensor, factor: float, bias: Tensor | None = None) -> Tensor:
            return torch.empty_like(x)

        def scaled(x: Tensor, factor: float, bias: Tensor | None = None) -> Tensor:
            self.is_direct.append(traceback.extract_stack()[-2].name == "call")
            self.factors.append(factor)
            return torch.empty_like(x).copy_(x.detach() * factor)

        self.is_direct: list[bool] = []
        self.factors: list[Any] = []
        self.op = register_custom_op(scaled, fake=fake, name=fresh(), is_fresh=True)
        self.call = direct(self.op)


def test_a_plain_call_goes_past_the_dispatcher() -> None:
    watched = Watched()
    with torch.no_grad():
        for x in (torch.ones(2), torch.nn.Parameter(torch.ones(2))):
            assert watched.call(x, 3.0, None).tolist() == [3.0, 3.0]
    assert watched.is_direct == [True, True]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.ones(2), 3), {"bias": None}),
        ((torch.ones(2), 3), {}),
        ((torch.ones(2), 3, None), {}),
        ((torch.ones(2), True, None), {}),
        ((torch.ones(2), 3.0), {}),
    ],
    ids=["keyword", "default", "integer", "bool", "float and default"],
)
def test_arguments_are_converted_as_by_the_dispatcher(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    watched = Watched()
    with torch.no_grad():
        watched.call(*args, **kwargs)
        watched.op(*args, **kwargs)
    assert watched.is_direct == [False, False]
    assert [type(factor) for factor in watched.factors] == [float, float]


def test_wrong_arguments_are_refused_as_by_the_dispatcher() -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="Expected a value of type 'Tensor'"):
        Watched().call("text", 3.0, None)


@pytest.mark.parametrize(
    "kind", ["op log", "dispatch mode", "fake", "function mode", "profiler", "gradients"]
)
def test_whoever_watches_sees_the_op(kind: str) -> None:
    watched, x = Watched(), torch.ones(2)
    if kind == "gradients":
        watched.call(x.requires_grad_(), 2.0, None)
        assert watched.is_direct == [False]
        return
    with torch.no_grad():
        if kind == "op log":
            with OpLog() as op_log:
                watched.call(x, 2.0, None)
            assert [op.name for op in op_log.ops] == [str(watched.op)]
        elif kind == "dispatch mode":
            with CallLog() as log:
                watched.call(x, 2.0, None)
            assert log.calls == [watched.op]
        elif kind == "fake":
            with FakeTensorMode() as mode:
                assert watched.call(mode.from_tensor(x), 2.0, None).shape == (2,)
            assert watched.is_direct == []
            return
        elif kind == "function mode":
            with torch.overrides.BaseTorchFunctionMode():
                watched.call(x, 2.0, None)
        else:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                watched.call(x, 2.0, None)
            assert watched.op.name() in {event.key for event in profile.key_averages()}
    assert watched.is_direct == [False]


class Subclass(Tensor):
    pass


def test_tensors_that_are_no_plain_memory_take_the_dispatcher() -> None:
    watched = Watched()
    with torch.no_grad():
        assert watched.call(torch.ones(3, device="meta"), 2.0, None).shape == (3,)
        assert watched.is_direct == []
        watched.call(torch.ones(3).as_subclass(Subclass), 2.0, None)
    assert watched.is_direct == [False]


def test_compile_sees_an_op_that_is_called_directly() -> None:
    watched, targets = Watched(), []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        targets.extend(node.target for node in gm.graph.nodes if node.op == "call_function")
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(lambda x: watched.call(x, 2.0, None), backend=backend, fullgraph=True)(torch.ones(2))
    assert targets == [watched.op]


def test_only_our_ops_can_be_called_directly() -> None:
    with pytest.raises(ConfigError, match="was not registered"):
        direct(torch.ops.aten.add.Tensor)


# Registration


def test_registering_the_same_function_again_returns_the_existing_op() -> None:
    def once(x: Tensor) -> None: ...

    name = fresh()
    first = register_custom_op(once, name=name)
    assert register_custom_op(name=name)(once) is first


def test_the_same_function_with_other_options_is_refused() -> None:
    def once(x: Tensor) -> Tensor:
        return x + 1

    name = fresh()
    register_custom_op(once, name=name, out_shape=0)
    with pytest.raises(ConfigError, match=r"with other options: .*\(\), 0, None.* are \(\('x',\), 0, None"):
        register_custom_op(once, name=name, out_shape=0, mutates_args=["x"])


def test_another_function_under_a_taken_name_is_refused() -> None:
    name = fresh()

    def one(x: Tensor) -> None: ...
    def two(x: Tensor) -> None: ...

    register_custom_op(one, name=name)
    with pytest.raises(ConfigError, match=f"{name} is already registered by .*one"):
        register_custom_op(two, name=name)


def test_a_refused_registration_leaves_the_name_free() -> None:
    name = fresh()

    def bad(x: Tensor, y) -> None: ...  # type: ignore[no-untyped-def]
    def good(x: Tensor) -> None: ...

    with pytest.raises(ConfigError):
        register_custom_op(bad, name=name)
    register_custom_op(good, name=name)(torch.zeros(1))


class Layer:
    def forward(self, x: Tensor) -> None: ...

    @classmethod
    def make(cls, x: Tensor) -> None: ...


def _no_annotation(x) -> None: ...  # type: ignore[no-untyped-def]
def _no_result(x: Tensor): ...  # type: ignore[no-untyped-def]
def _star(*xs: Tensor) -> None: ...
def _stars(x: Tensor, **options: int) -> None: ...
def _tuple(x: tuple[Tensor, Tensor]) -> None: ...
def _mapping(x: dict[str, Tensor]) -> None: ...
def _unreadable(x: Missing) -> None: ...  # type: ignore[name-defined] # noqa: F821
def _returns(x: Tensor, n: int) -> Tensor: ...  # type: ignore[empty-body]
def _nothing(x: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("fn", "options", "message"),
    [
        (Layer.forward, {}, "is a method"),
        (Layer().forward, {}, "is a method"),
        (Layer.make, {}, "is a method"),
        (Layer.__dict__["make"], {}, "is a method"),
        (torch.ops.aten.add.Tensor, {}, "is an operator already"),
        (3, {}, "is not callable"),
        (_no_annotation, {}, "'x' has no annotation"),
        (_no_result, {}, "annotate the result"),
        (_star, {}, "no place in an operator schema"),
        (_stars, {}, "no place in an operator schema"),
        (_tuple, {}, "unsupported type"),
        (_mapping, {}, "unsupported type"),
        (_unreadable, {}, "annotation cannot be read"),
        (_nothing, {"mutates_args": ["z"]}, "'z'"),
        (_nothing, {"mutates_args": "x"}, r"mutates_args='x': give a list"),
        (_returns, {"mutates_args": ["n"], "out_shape": 0}, "only Tensors"),
        (_nothing, {"out_shape": 0}, "returns nothing"),
        (_nothing, {"out_dtype": torch.int8}, "returns nothing"),
        (_nothing, {"is_fresh": True}, "is_fresh has no meaning"),
        (_returns, {}, "pass out_shape"),
        (_returns, {"out_shape": 2}, r"out_shape=2 is not one of \['x', 'n'\]"),
        (_returns, {"out_shape": -1}, "out_shape=-1 is not one of"),
        (_returns, {"out_shape": "y"}, "out_shape='y' is not one of"),
        (_returns, {"out_shape": "n"}, "not a tensor"),
        (_returns, {"out_shape": 0, "fake": _returns}, "not both"),
        (_nothing, {"name": "no spaces"}, "not an identifier"),
        (lambda x: None, {"name": None}, "not an identifier"),
    ],
)
def test_what_cannot_become_an_op_is_refused(fn: Any, options: dict[str, Any], message: str) -> None:
    options = {"name": fresh(), **options}
    with pytest.raises(ConfigError, match=message):
        register_custom_op(fn, **options)


# Functions of other libraries


def library_module() -> types.ModuleType:
    module = types.ModuleType(f"fastlib{next(_numbers)}.kernels")
    exec(
        "import torch\n"
        "def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:\n"
        "    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight\n"
        "def bare(x, out):\n"
        "    out.copy_(x)\n"
        "def positional(x: torch.Tensor, /, n: int) -> torch.Tensor:\n"
        "    return x * n\n",
        module.__dict__,
    )
    return module


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_extern_function_becomes_an_op(backend: str | None) -> None:
    rms = library_module().rms
    op = register_custom_op_from_extern(rms, out_shape="x")
    x, weight = torch.randn(2, 8), torch.randn(8)
    torch.testing.assert_close(run(lambda x, w: op(x, w) + 0, backend, x, weight), rms(x, weight))
    assert implementation_of(op) is not None


def test_extern_names_carry_the_module_so_that_libraries_do_not_collide() -> None:
    first, second = (register_custom_op_from_extern(library_module().rms, out_shape=0) for _ in range(2))
    assert first is not second
    assert first.name().endswith("kernels_rms")


def test_extern_annotations_can_be_supplied() -> None:
    bare = library_module().bare
    with pytest.raises(ConfigError, match=r"annotate the result|no annotation"):
        register_custom_op_from_extern(bare, mutates_args=["out"])
    op = register_custom_op_from_extern(
        bare, mutates_args=["out"], annotations={"x": Tensor, "out": Tensor, "return": None}
    )
    out = torch.zeros(2)
    op(torch.ones(2), out)
    assert out.tolist() == [1.0, 1.0]


def test_extern_annotation_for_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"annotations name \['z'\]"):
        register_custom_op_from_extern(library_module().rms, out_shape=0, annotations={"z": Tensor})


def test_extern_positional_only_parameters_are_accepted() -> None:
    op = register_custom_op_from_extern(library_module().positional, out_shape=0)
    assert op(torch.ones(2), 3).tolist() == [3.0, 3.0]


def test_extern_works_as_a_decorator() -> None:
    @register_custom_op_from_extern(out_shape=0, name=fresh())
    def wrapped(x: Tensor) -> Tensor:
        return x + 1

    assert wrapped(torch.zeros(1)).item() == 1.0


def test_a_builtin_without_signature_is_refused_with_advice() -> None:
    with pytest.raises(ConfigError, match="wrap it in an annotated function"):
        register_custom_op_from_extern(torch._C._nn.gelu, out_shape=0)

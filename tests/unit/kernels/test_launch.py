"""The launcher that keeps compiled kernels: against Triton's own binder, with no GPU and nothing compiled.

Kernels are made anew from their Python functions, because in these tests Triton's decorator makes them for
its interpreter. A driver that knows a Hopper GPU stands in for the device, and CPU tensors for its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import wrap_handle_tensordesc
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, compute_cache_key

from gapless.attention import triton_decode, triton_kernels
from gapless.kernels import jit, launch, linear_jit, penalty_jit, sample_jit, sample_parts_jit
from gapless.kernels.descriptors import KeptDescriptor, box_descriptor
from gapless.kernels.launch import CachedLauncher, Constants, constants_in_order, describe, past_descriptors

ON_DEVICE = attrgetter("is_cpu")
MODULES = (jit, linear_jit, penalty_jit, sample_jit, sample_parts_jit, triton_decode, triton_kernels)


def example_kernel(x, out, stride, size, eps, SIZE, HAS_BIAS, EARLY):  # type: ignore[no-untyped-def]
    pass


example_kernel.__annotations__ = dict.fromkeys(("SIZE", "HAS_BIAS", "EARLY"), "tl.constexpr")


class HopperDriver:
    device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 100 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> HopperDriver:
    hopper = HopperDriver()
    monkeypatch.setattr(driver, "_active", hopper)
    return hopper


class Compiler:
    """Stands in for ``JITFunction._do_compile``: its kernels write down what they are called with."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, kernel: JITFunction, key: str, *_: Any) -> Any:
        self.keys.append(key)
        number = len(self.keys)
        compiled = SimpleNamespace(
            run=lambda *args: self.calls.append(args),
            function=number,
            packed_metadata=("meta", number),
            launch_metadata=lambda *args: None,
        )
        kernel.device_caches[driver.active.get_current_device()][0][key] = compiled
        return compiled


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(JITFunction, "_do_compile", lambda kernel, *args: compiler(kernel, *args))
    return compiler


@pytest.fixture
def binds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each launch that Triton handled itself."""
    seen: list[int] = []
    run = JITFunction.run

    def counting(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", counting)
    return seen


def make_launcher(hopper: HopperDriver) -> CachedLauncher:
    return CachedLauncher(
        runtime_knobs=knobs.runtime,
        current_device=hopper.get_current_device,
        current_stream=hopper.get_current_stream,
        is_on_device=ON_DEVICE,
    )


@pytest.fixture
def launcher(hopper: HopperDriver) -> CachedLauncher:
    return make_launcher(hopper)


MEMORY = torch.zeros(4096, dtype=torch.int8)
ALIGNED = (-MEMORY.data_ptr()) % 16


def tensor(dtype: torch.dtype, offset: int) -> torch.Tensor:
    start = ALIGNED + offset * dtype.itemsize
    return MEMORY[start : start + 64].view(dtype)


tensors = st.builds(
    tensor,
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64]),
    st.sampled_from([0, 0, 1, 2, 4, 8]),
)
ints = st.one_of(
    st.sampled_from([0, 1, 2, 16, 17, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63 - 1, 2**63]),
    st.integers(-(2**40), 2**64 - 1),
    st.integers(-8, 8).map(lambda n: 16 * n),
)
arguments = st.one_of(tensors, ints, st.floats(allow_nan=False), st.none())


def all_kernels() -> list[tuple[str, Any]]:
    found = []
    for module in MODULES:
        for name in sorted(vars(module)):
            kernel = getattr(module, name)
            if name.endswith("_kernel") and hasattr(kernel, "fn") and kernel.fn.__module__ == module.__name__:
                found.append((name, kernel))
    return found


def triton_key(kernel: JITFunction, args: Any, constants: dict[str, Any]) -> str:
    caches = kernel.device_caches[0]
    _, specialization, options = caches[4](*args, debug=False, instrumentation_mode="", **constants)
    return compute_cache_key(caches[1], specialization, options)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), never=st.sets(st.integers(0, 4)))
def test_equal_keys_are_equal_specialisations(data: st.DataObject, never: set[int]) -> None:
    """Of many lists of arguments, those that look alike to us look alike to Triton."""
    kernel = JITFunction(example_kernel, do_not_specialize=sorted(never))
    constants = {"SIZE": 8, "HAS_BIAS": True, "EARLY": False, "num_warps": 4}
    by_kinds: dict[tuple[Any, ...], str] = {}
    # Few choices per place, so that equal keys do come about.
    choices = [data.draw(st.lists(arguments, min_size=2, max_size=4)) for _ in range(5)]
    for _ in range(30):
        args = [data.draw(st.sampled_from(choice)) for choice in choices]
        described = describe(args, ON_DEVICE)
        assert described is not None
        theirs = triton_key(kernel, args, constants)
        assert by_kinds.setdefault(tuple(described[0]), theirs) == theirs


@pytest.mark.parametrize(("name", "kernel"), all_kernels())
def test_every_kernel_has_its_constants_last(name: str, kernel: Any) -> None:
    params = JITFunction(kernel.fn).params
    is_constant = [param.is_constexpr for param in params]
    assert is_constant == sorted(is_constant), name


@pytest.mark.parametrize(("name", "kernel"), all_kernels())
def test_a_hit_calls_every_kernel_with_what_triton_calls_it_with(
    name: str, kernel: Any, launcher: CachedLauncher, compiler: Compiler, binds: list[int]
) -> None:
    kernel = JITFunction(kernel.fn)
    kernel.used_global_vals = {}
    params = kernel.params
    args = [tensor(torch.float32, 4 * i) for i, param in enumerate(params) if not param.is_constexpr]
    constants = {param.name: 16 * i for i, param in enumerate(params) if param.is_constexpr}
    for _ in range(2):
        launcher.launch(kernel, (3, 5), args, {**constants, "num_warps": 2, "launch_pdl": True})
    assert len(binds) == 1
    theirs, ours = compiler.calls
    assert ours[:6] == theirs[:6] == (3, 5, 1, 100, 1, ("meta", 1))
    assert ours[6:9] == (None, None, None)
    assert [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in theirs[9:]] == list(ours[9:])


CONSTANTS = {"SIZE": 8, "HAS_BIAS": True, "EARLY": False, "num_warps": 4}
X, OUT = tensor(torch.float32, 0), tensor(torch.float32, 8)


def variants() -> dict[str, tuple[list[Any], dict[str, Any]]]:
    base = [X, OUT, 32, 7, 0.5]
    return {
        "unaligned": ([tensor(torch.float32, 1), *base[1:]], CONSTANTS),
        "other unaligned": ([X, tensor(torch.float32, 9), *base[2:]], CONSTANTS),
        "dtype": ([tensor(torch.int32, 0), *base[1:]], CONSTANTS),
        "odd stride": ([X, OUT, 33, 7, 0.5], CONSTANTS),
        "stride 1": ([X, OUT, 1, 7, 0.5], CONSTANTS),
        "64 bits": ([X, OUT, 2**31, 7, 0.5], CONSTANTS),
        "size divides": ([X, OUT, 32, 16, 0.5], CONSTANTS),
        "no size": ([X, OUT, 32, None, 0.5], CONSTANTS),
        "whole eps": ([X, OUT, 32, 7, 1], CONSTANTS),
        "constant": (base, {**CONSTANTS, "SIZE": 9}),
        "warps": (base, {**CONSTANTS, "num_warps": 8}),
        "stages": (base, {**CONSTANTS, "num_stages": 5}),
        "early": (base, {**CONSTANTS, "launch_pdl": True}),
        "fusion": (base, {**CONSTANTS, "enable_fp_fusion": False}),
    }


@pytest.mark.parametrize("variant", variants())
def test_what_triton_compiles_anew_is_a_miss(
    variant: str, launcher: CachedLauncher, compiler: Compiler, binds: list[int]
) -> None:
    kernel = JITFunction(example_kernel)
    args, constants = variants()[variant]
    base: list[Any] = [X, OUT, 32, 7, 0.5]
    for _ in range(2):
        launcher.launch(kernel, (1,), base, CONSTANTS)
        launcher.launch(kernel, (1,), args, constants)
    assert len(binds) == len(compiler.keys) == 2
    assert [call[4] for call in compiler.calls] == [1, 2, 1, 2], "each call ran its own compiled kernel"


@pytest.mark.parametrize(
    ("args", "grid"),
    [
        ([X, OUT, 48, 9, 0.25], (1,)),
        ([tensor(torch.float32, 4), tensor(torch.float32, 12), 32, 7, 0.5], (1,)),
        ([torch.nn.Parameter(X, requires_grad=False), OUT, 32, 7, 0.5], (2, 3, 4)),
    ],
    ids=["numbers", "addresses", "parameter and grid"],
)
def test_what_nothing_is_specialised_on_is_a_hit(
    args: list[Any], grid: tuple[int, ...], launcher: CachedLauncher, compiler: Compiler, binds: list[int]
) -> None:
    kernel = JITFunction(example_kernel)
    launcher.launch(kernel, (1,), [X, OUT, 32, 7, 0.5], CONSTANTS)
    launcher.launch(kernel, grid, args, CONSTANTS)
    assert len(binds) == 1
    assert compiler.calls[1][:3] == (*grid, 1, 1)[:3]
    values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
    assert list(compiler.calls[1][9:]) == [*values, 8, True, False]


def test_constants_that_never_change_are_known_by_identity(
    launcher: CachedLauncher, compiler: Compiler, binds: list[int]
) -> None:
    kernel, args = JITFunction(example_kernel), [X, OUT, 32, 7, 0.5]
    first, second = Constants(CONSTANTS), Constants(CONSTANTS, SIZE=9)
    for constants in (first, second, first, second, CONSTANTS, CONSTANTS):
        launcher.launch(kernel, (1,), args, constants)
    assert len(binds) == 3
    assert [call[4] for call in compiler.calls] == [1, 2, 1, 2, 1, 1]
    assert [call[-3] for call in compiler.calls[2:4]] == [8, 9]


def test_each_device_has_its_own_kernel_and_stream(
    hopper: HopperDriver, launcher: CachedLauncher, compiler: Compiler
) -> None:
    kernel = JITFunction(example_kernel)
    for device in (0, 1, 0, 1):
        hopper.device = device
        launcher.launch(kernel, (1,), [X, OUT, 32, 7, 0.5], CONSTANTS)
    assert [call[3:5] for call in compiler.calls] == [(100, 1), (101, 2), (100, 1), (101, 2)]


def test_two_kernels_do_not_share(launcher: CachedLauncher, compiler: Compiler, binds: list[int]) -> None:
    for kernel in (JITFunction(example_kernel), JITFunction(example_kernel)):
        launcher.launch(kernel, (1,), [X, OUT, 32, 7, 0.5], CONSTANTS)
    assert len(binds) == 2


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_triton_launches_while_somebody_is_told_of_launches(
    hook: str, launcher: CachedLauncher, compiler: Compiler, binds: list[int]
) -> None:
    kernel = JITFunction(example_kernel)
    args = [X, OUT, 32, 7, 0.5]
    launcher.launch(kernel, (1,), args, CONSTANTS)

    def told(metadata: Any) -> None: ...

    getattr(knobs.runtime, hook).add(told)
    try:
        launcher.launch(kernel, (1,), args, CONSTANTS)
    finally:
        getattr(knobs.runtime, hook).remove(told)
    assert len(binds) == 2
    launcher.launch(kernel, (1,), args, CONSTANTS)
    assert len(binds) == 2


def test_hooks_of_a_kernel_see_every_launch(launcher: CachedLauncher, compiler: Compiler) -> None:
    kernel, seen = JITFunction(example_kernel), []
    kernel.add_pre_run_hook(lambda *args, **kwargs: seen.append(args))
    for _ in range(3):
        launcher.launch(kernel, (1,), [X, OUT, 32, 7, 0.5], CONSTANTS)
    assert len(seen) == 3


class Driver(HopperDriver):
    """With the driver's part of a descriptor, a number in place of 128 bytes."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.utils = SimpleNamespace(fill_tma_descriptor=self._fill)

    def _fill(self, address: int, *_: Any) -> str:
        self.made.append(address)
        return f"map of {address}"


SWIZZLED = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [16, 64], "fp4_padded": False}


def page(address: int, *, rows: int = 64, box_rows: int = 16) -> KeptDescriptor:
    return box_descriptor(address, torch.bfloat16, (rows, 128), (128, 1), (box_rows, 64))


class TritonsLauncher:
    """Of ``example_kernel`` with descriptors in its first two places."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        kind = "tensordesc<bf16[16, 64]>"
        kinds = dict(enumerate([kind, kind, "i32", "i32", "fp32"]))
        self.launch = wrap_handle_tensordesc(
            lambda *args: self.calls.append(args), kinds, [SWIZZLED, SWIZZLED]
        )

    def __call__(self, *args: Any) -> None:
        self.launch(*args[:5], False, True, None, None, *args[5:])


def test_a_descriptor_is_made_once_and_launched_as_triton_launches_it(
    monkeypatch: pytest.MonkeyPatch, compiler: Compiler, binds: list[int]
) -> None:
    own, run = Driver(), TritonsLauncher()
    monkeypatch.setattr(driver, "_active", own)

    def compile_with(kernel: JITFunction, *args: Any) -> Any:
        compiled = compiler(kernel, *args)
        compiled.run = run
        return compiled

    monkeypatch.setattr(JITFunction, "_do_compile", compile_with)
    kernel, launcher = JITFunction(example_kernel), make_launcher(own)
    for _ in range(3):
        for first in (16384, 32768):
            launcher.launch(kernel, (3,), [page(first), page(first + 1024), 32, 7, 0.5], CONSTANTS)
    assert len(binds) == 1
    by_triton, other, again = run.calls[:3]
    assert again[:10] == by_triton[:10]
    assert again[13:] == by_triton[13:]
    assert by_triton[13:18] == ("map of 16384", 64, 128, 128, 1)
    assert other[13:18] == ("map of 32768", 64, 128, 128, 1)
    assert sorted(own.made) == [16384, 16384, 17408, 17408, 32768, 33792], "by Triton, then once for good"


def test_descriptors_are_known_by_place_and_shape() -> None:
    assert page(4096) is page(4096)
    others = [page(8192), page(4096, rows=80), page(4096, box_rows=8)]
    assert all(other is not page(4096) for other in others)
    described = [describe([descriptor], ON_DEVICE) for descriptor in (page(4096), *others)]
    kinds = [found[0] for found in described if found is not None]
    assert kinds[0] == kinds[1] == kinds[2] != kinds[3], "a kernel is compiled for a box, not for a place"


def test_descriptors_look_alike_to_us_where_they_look_alike_to_triton() -> None:
    kernel = JITFunction(example_kernel)
    by_kinds: dict[Any, str] = {}
    for descriptor in (page(4096), page(8192), page(4096, rows=80), page(4096, box_rows=8)):
        args = [descriptor, OUT, 32, 7, 0.5]
        described = describe(args, ON_DEVICE)
        assert described is not None
        theirs = triton_key(kernel, args, CONSTANTS)
        assert by_kinds.setdefault(tuple(described[0]), theirs) == theirs
    assert len(by_kinds) == len(set(by_kinds.values())) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("global_scratch_size", 8), ("profile_scratch_size", 8), ("launch", lambda *args: None)],
)
def test_other_launchers_of_descriptors_are_left_to_triton(name: str, value: Any) -> None:
    run = TritonsLauncher()
    assert past_descriptors(run) is not None
    setattr(run, name, value)
    assert past_descriptors(run) is None


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "odd",
    [X.as_subclass(Subclass), torch.zeros(4, device="meta"), True, "text", [1]],
    ids=["subclass", "other device", "bool", "string", "list"],
)
def test_unknown_arguments_go_through_triton(odd: Any) -> None:
    assert describe([X, odd], ON_DEVICE) is None


@pytest.mark.parametrize(
    ("constants", "num_args"),
    [
        ({"SIZE": 0.5, "HAS_BIAS": True, "EARLY": False}, 5),
        ({"SIZE": 8, "HAS_BIAS": torch.float32, "EARLY": False}, 5),
        ({"SIZE": 8, "HAS_BIAS": True, "EARLY": False}, 4),
        ({"HAS_BIAS": True, "EARLY": False}, 6),
    ],
    ids=["float", "dtype", "argument by name", "constant by place"],
)
def test_kernels_that_are_called_in_other_ways_are_not_kept(constants: dict[str, Any], num_args: int) -> None:
    assert constants_in_order(JITFunction(example_kernel), num_args, constants) is None


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    launch._launcher.cache_clear()
    yield monkeypatch
    launch._launcher.cache_clear()


def test_launches_are_kept_on_a_gpu(chosen: pytest.MonkeyPatch) -> None:
    assert isinstance(launch._launcher(), CachedLauncher)


@pytest.mark.parametrize("case", ["switched off", "interpreter", "version", "missing", "no GPU"])
def test_launches_are_left_to_triton(case: str, chosen: pytest.MonkeyPatch) -> None:
    import triton

    if case == "switched off":
        chosen.setenv("GAPLESS_FAST_LAUNCH", "0")
    elif case == "interpreter":
        chosen.setenv("TRITON_INTERPRET", "1")
    elif case == "version":
        chosen.setattr(triton, "__version__", "3.60.0")
    elif case == "missing":
        chosen.setattr(driver, "_active", SimpleNamespace())
    else:
        chosen.setattr(torch.cuda, "is_available", lambda: False)
    assert launch._launcher() is None
    seen: list[Any] = []
    kernel = {(2,): lambda *args, **constants: seen.append((args, constants))}
    launch.launch(kernel, (2,), [1, 2], {"SIZE": 8})
    assert seen == [((1, 2), {"SIZE": 8})]

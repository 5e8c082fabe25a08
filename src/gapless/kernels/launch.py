"""Launching Triton kernels again and again without Triton's own Python.

``kernel[grid](...)`` binds and specialises every argument anew. What it finds depends on little: the types of
the arguments, which pointers and integers divide by 16, which integers are 1, the constants and the device.
``launch`` keeps the compiled kernel under exactly these and calls it, with plain addresses in place of
tensors.

Invariant: two calls with equal keys are two calls that Triton would serve with one compiled kernel. A key may
be finer than Triton's, never coarser: alignment is asked of every pointer in every call. Whatever is not
understood goes Triton's way: the first call of each key, the interpreter, CPU tensors, launch hooks (Triton's
profiler), other versions than those of ``KNOWN_VERSIONS``. ``GAPLESS_FAST_LAUNCH=0`` turns it off.

Arguments that are ``Described`` stand for several of the compiled kernel's (``descriptors.py``).
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from gapless.env import read_env

logger = logging.getLogger(__name__)

KNOWN_VERSIONS = ("3.6.",)
"""Of Triton: what a kernel is specialised on, and how it is called, was read there."""

Grid = tuple[int, ...]


class Constants(dict[str, Any]):
    """Constants that are made once and never changed, so that they are known by identity: it spares a launch
    the reading of a dozen names and values."""

    __slots__ = ()


class Described:
    """An argument that says itself what a kernel is specialised on."""

    @property
    def kind(self) -> Hashable:
        raise NotImplementedError

    def expand(self, metadata: Any) -> list[Any]:
        """What a compiled kernel takes for it. ``metadata`` is what the kernel says of the argument: equal
        for arguments of one ``kind``."""
        raise NotImplementedError


def launch(kernel: Any, grid: Grid, args: Sequence[Any], constants: Mapping[str, Any]) -> None:
    """``kernel[grid](*args, **constants)``. ``constants`` are all its ``tl.constexpr`` parameters by name,
    and options of the launch (``num_warps``, ``launch_pdl``, ...); best a ``Constants``."""
    ahead = _ahead
    if ahead is not None and ahead.thread == threading.get_ident():
        ahead.compile(kernel, args, constants)
        return
    launcher = _launcher()
    if launcher is None:
        kernel[grid](*args, **constants)
    else:
        launcher.launch(kernel, grid, args, constants)


def can_compile_ahead(device: torch.device) -> bool:
    """Whether ``compiling_ahead`` does anything on ``device``."""
    if device.type != "cuda" or read_env().triton_interpret:
        return False
    try:
        from triton import AsyncCompileMode  # noqa: F401
    except ImportError:
        return False
    return True


def prepare_compiling(device: torch.device) -> None:
    """Begin, in a thread, with what the first kernel of a process waits for; at once, and no more than once.
    Worth calling before imports and weights."""
    if can_compile_ahead(device):
        from gapless.kernels.compiler import prepare_compiler

        prepare_compiler()


@contextmanager
def compiling_ahead(*, begins_late: bool = False) -> Iterator[Callable[[], None]]:
    """Within the block this thread's launches only compile: each kernel once, and the C that calls it, side
    by side in threads, all done at the end.

    ``begins_late``: the threads do nothing before the yielded function is called, or the block ends, so that
    they do not take turns at the interpreter with what launches. What launches would have written stays
    undefined, so run a forward in it for its launches alone. A kernel that cannot be compiled is left for its
    first launch to report. Blocks of other threads wait for their turn.
    """
    global _ahead
    from gapless.kernels.compiler import WithLaunchers, wait_for_compiler

    wait_for_compiler()
    begins = threading.Event()
    with _turn, ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        assert _ahead is None, "kernels are being compiled ahead already"
        with WithLaunchers(pool, begins=begins):
            _ahead = _AheadCompiler()
            if not begins_late:
                begins.set()
            try:
                yield begins.set
            finally:
                _ahead = None
                begins.set()


def is_compiling_ahead() -> bool:
    """Whether launches of this thread only compile."""
    return _ahead is not None and _ahead.thread == threading.get_ident()


class _AheadCompiler:
    """Asks Triton for each kernel once: its own look-up takes as long as a launch of it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._asked: set[tuple[Any, ...]] = set()

    def compile(self, kernel: Any, args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        described = describe(args, lambda tensor: True)
        if described is not None:
            key = (id(kernel), *described[0], *constants, *constants.values())
            if key in self._asked:
                return
            self._asked.add(key)
        kernel.warmup(*args, grid=(1,), **constants)


_turn = threading.RLock()
_ahead: _AheadCompiler | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """What a launch of one key needs. It keeps alive what stands in the key by its ``id``."""

    kernel: Any
    source: Mapping[str, Any]
    """The constants it was launched with."""
    run: Callable[..., Any]
    function: Any
    packed_metadata: Any
    constants: tuple[Any, ...]
    """Values of the constant parameters, which the compiled kernel expects after the others and ignores."""
    described: Mapping[int, Any]
    """Metadata of ``Described`` arguments by their place."""

    def expand(self, values: Sequence[Any]) -> list[Any]:
        expanded: list[Any] = []
        for place, value in enumerate(values):
            if place in self.described:
                expanded += value.expand(self.described[place])
            else:
                expanded.append(value)
        return expanded


class CachedLauncher:
    """Compiled kernels by key. What asks the device is passed in, so that tests need none."""

    def __init__(
        self,
        *,
        runtime_knobs: Any,
        current_device: Callable[[], int],
        current_stream: Callable[[int], int],
        is_on_device: Callable[[Tensor], bool],
    ) -> None:
        self._knobs = runtime_knobs
        self._current_device, self._current_stream = current_device, current_stream
        self._is_on_device = is_on_device
        self._compiled: dict[tuple[Any, ...], Compiled] = {}

    def launch(self, kernel: Any, grid: Grid, args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        described = describe(args, self._is_on_device)
        if described is None or _is_hooked(self._knobs):
            kernel[grid](*args, **constants)
            return
        kinds, values = described
        device = self._current_device()
        if type(constants) is Constants:
            key = (id(kernel), device, id(constants), *kinds)
        else:
            key = (id(kernel), device, *kinds, *constants, *constants.values())
        found = self._compiled.get(key)
        if found is None:
            self._launch_new(key, kernel, grid, args, constants)
            return
        if found.kernel.pre_run_hooks:
            kernel[grid](*args, **constants)
            return
        if found.described:
            values = found.expand(values)
        found.run(
            *(*grid, 1, 1)[:3],
            self._current_stream(device),
            found.function,
            found.packed_metadata,
            None,  # what hooks would be told
            None,
            None,
            *values,
            *found.constants,
        )

    def _launch_new(
        self,
        key: tuple[Any, ...],
        kernel: Any,
        grid: Grid,
        args: Sequence[Any],
        constants: Mapping[str, Any],
    ) -> None:
        compiled = kernel[grid](*args, **constants)
        tail = constants_in_order(kernel, len(args), constants)
        if compiled is None or tail is None:
            return
        run, described = compiled.run, {}
        places = [place for place, argument in enumerate(args) if isinstance(argument, Described)]
        if places:
            found = past_descriptors(run)
            if found is None or len(found[1]) != len(places):
                return
            run, described = found[0], dict(zip(places, found[1], strict=True))
        self._compiled[key] = Compiled(
            kernel=kernel,
            source=constants,
            run=run,
            described=described,
            function=compiled.function,
            packed_metadata=compiled.packed_metadata,
            constants=tail,
        )


def describe(
    args: Sequence[Any], is_on_device: Callable[[Tensor], bool]
) -> tuple[list[Any], list[Any]] | None:
    """``(kinds, values)``: what of the arguments a kernel is specialised on, and what it is called with.

    None if an argument is something else than a tensor on the device, an int, a float, None or ``Described``.
    """
    kinds: list[Any] = []
    values: list[Any] = []
    for argument in args:
        kind = type(argument)
        if kind is Tensor or kind is torch.nn.Parameter:
            if not is_on_device(argument):
                return None
            address = argument.data_ptr()
            kinds.append((argument.dtype,) if address & 15 else argument.dtype)
            values.append(address)
        elif kind is int:
            if 1 < argument < 1 << 31:  # nearly all
                kinds.append(0 if argument & 15 else 2)
            else:
                kinds.append(_kind_of_int(argument))
            values.append(argument)
        elif kind is float or argument is None:
            kinds.append(kind)
            values.append(argument)
        elif issubclass(kind, Described):
            kinds.append(argument.kind)
            values.append(argument)
        else:
            return None
    return kinds, values


def constants_in_order(kernel: Any, num_args: int, constants: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Values of the constant parameters in the kernel's own order, or None for a kernel that cannot be
    called from here: one with other parameters than ``num_args`` plain ones and then constants, or with a
    constant that equals another one of the same type without being it (0.0 and -0.0)."""
    params = kernel.params
    if any(param.is_constexpr for param in params[:num_args]):
        return None
    values = []
    for param in params[num_args:]:
        value = constants.get(param.name, param.default)
        if not param.is_constexpr or type(value) not in (int, bool, str, type(None)):
            return None
        values.append(value)
    return tuple(values)


def past_descriptors(launcher: Any) -> tuple[Callable[..., Any], list[Any]] | None:
    """``(what launches, metadata of each descriptor)`` of Triton's launcher of a kernel with descriptors,
    behind the function that makes them anew at every launch; None if it is not as expected."""
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    found = inspect.getclosurevars(launcher.launch).nonlocals
    if not {"launcher", "tensordesc_meta"} <= found.keys() or None in found["tensordesc_meta"]:
        return None
    inner, is_cooperative, is_early = found["launcher"], launcher.launch_cooperative_grid, launcher.launch_pdl

    def run(x: int, y: int, z: int, stream: int, function: int, *others: Any) -> None:
        inner(x, y, z, stream, function, is_cooperative, is_early, None, None, *others)

    return run, list(found["tensordesc_meta"])


@functools.cache
def _launcher() -> CachedLauncher | None:
    """The process's launcher, or None where every launch goes Triton's way."""
    if not read_env().fast_launch or not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    try:
        import triton
        from triton import knobs
        from triton.runtime.driver import driver

        from gapless.kernels.compiler import wait_for_compiler

        if read_env().triton_interpret or not triton.__version__.startswith(KNOWN_VERSIONS):
            logger.debug("kernels are launched by Triton %s itself", triton.__version__)
            return None
        wait_for_compiler()
        return CachedLauncher(
            runtime_knobs=knobs.runtime,
            current_device=torch._C._cuda_getDevice,  # initialised: there is a tensor on the device
            current_stream=driver.active.get_current_stream,
            is_on_device=attrgetter("is_cuda"),
        )
    except (ImportError, AttributeError) as error:
        logger.debug("kernels are launched by Triton itself: %s", error)
        return None


def _kind_of_int(value: int) -> int:
    """Bit 0: is 1. Bit 1: divides by 16. Above: the type, which depends on the range."""
    if -(1 << 31) <= value < 1 << 31:
        return 1 if value == 1 else 0 if value & 15 else 2
    return (4 if value < 1 << 63 else 8) | (0 if value & 15 else 2)


def _is_hooked(runtime_knobs: Any) -> bool:
    """Whether somebody wants to be told of launches. A chain of hooks may be empty."""
    enter, leave = runtime_knobs.launch_enter_hook, runtime_knobs.launch_exit_hook
    return (enter is not None and bool(getattr(enter, "calls", True))) or (
        leave is not None and bool(getattr(leave, "calls", True))
    )

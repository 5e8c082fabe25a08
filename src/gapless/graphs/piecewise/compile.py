"""The trampoline: a forward with a compiled path, taken only inside a piecewise context.

``PiecewiseForward`` stands in for a forward, once and for good. Outside a piecewise context (``use_compiled``
of the forward context) it runs the plain forward. The first call inside warms up the plain forward (kernels
that compile themselves do so now), then traces and compiles it for every number of tokens. While a
piecewise capture records, every op between two split ops goes into a graph; the program replays without this
object, except that the first replay asks it whether all addresses are still those of the capture. Invariants:
one trace per forward (others are counted), and none while a capture is open. Read ``backend.py`` for what
happens to the trace.
"""

from __future__ import annotations

import functools
import inspect
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from gapless.errors import CompileError, GraphError
from gapless.graphs.breakable import active_recorder
from gapless.graphs.context import in_piecewise_context
from gapless.graphs.device.arena import storage_bytes
from gapless.graphs.device.base import GraphDevice
from gapless.graphs.piecewise.backend import CompileStats, PiecewiseBackend, PiecewiseConfig
from gapless.graphs.piecewise.failure import explain, own_error
from gapless.graphs.piecewise.piece import AddressCheck

MIN_TRACE_ROWS = 2
"""A trace with one row would hold for one row only: PyTorch takes sizes 0 and 1 for constants."""


class PiecewiseForward:
    """``fn`` with a compiled path.

    ``dynamic_dims`` names the dimension of each argument that holds tokens, by parameter name; arguments not
    named have ``default_dim`` (None: no dynamic dimension). Everything else about the arguments is fixed by
    the first call in a piecewise context.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        config: PiecewiseConfig,
        device: GraphDevice,
        dynamic_dims: Mapping[str, int | None] | None = None,
        default_dim: int | None = 0,
    ) -> None:
        self.config = config
        self._plain, self._device = fn, device
        self._signature = inspect.signature(fn)
        self._dynamic_dims, self._default_dim = dict(dynamic_dims or {}), default_dim
        self._backend = PiecewiseBackend(config, device)
        self._compiled: Callable[..., Any] | None = None

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    @property
    def stats(self) -> CompileStats:
        return self._backend.stats

    @property
    def backend(self) -> PiecewiseBackend:
        return self._backend

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Plain or compiled, as the forward context says. Raises ``CompileError`` when tracing fails, and
        ``GraphError`` when it would have to happen while a capture is open."""
        if not in_piecewise_context():
            return self._plain(*args, **kwargs)
        if self._compiled is None:
            return self._trace(args, kwargs)
        is_recording, recorder = self._device.is_recording(), active_recorder()
        with self._device.pause_recording():
            args, kwargs, originals = _in_plain_form(args, kwargs)
            check = None
            if is_recording and recorder is not None:
                # Stand-ins: an owner of pool memory would keep later sizes from reusing it.
                owned = pytree.tree_map_only(Tensor, stand_in, (args, kwargs))
                check = AddressCheck(args=owned[0], kwargs=owned[1])
                recorder.add_check(functools.partial(self._verify, check))
            # The emulated device watches the owners of what it records, and a stand-in owns nothing.
            is_watched = self._device.torch_device.type == "cpu"
            return self._run(args, kwargs, check=check, originals=originals if is_watched else {})

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        check: AddressCheck | None,
        originals: dict[int, Tensor],
    ) -> Any:
        assert self._compiled is not None
        if torch._C._len_torch_dispatch_stack():  # PyTorch would skip the compiled code, now and later
            raise GraphError(
                "compiled code was called under a dispatch mode that the caller entered; leave it, or run "
                "outside a piecewise context"
            )
        handover = self._backend.handover
        handover.check, handover.originals = check, originals
        try:
            with torch.no_grad():
                return self._compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:  # another trace was needed, and failed
            self._raise_explained(error)
        finally:
            handover.take()  # not taken if the call has failed before the stitching graph

    def _raise_explained(self, error: Exception) -> NoReturn:
        own = own_error(error)
        if own is not None:
            raise own from own.__cause__
        raise CompileError(explain(error, self.config.off_switch)) from error

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._device.is_recording():
            raise GraphError(
                "a forward must be traced before it is captured: call it once in a piecewise context with "
                "mode NONE, outside the capture"
            )
        with torch.no_grad():
            self._plain(*args, **kwargs)
            args, kwargs = self._mark_dynamic(args, kwargs)
            compiled = torch.compile(_private_copy(self._plain), backend=self._backend, fullgraph=True)
            start = time.perf_counter()
            try:
                with _tracing_options():
                    result = compiled(*args, **kwargs)
            except Exception as error:
                self._raise_explained(error)
        self._compiled = compiled
        self.stats.trace_s = time.perf_counter() - start - self.stats.compile_s
        return result

    def _mark_dynamic(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments as other tensor objects with their token dimension marked: marks stay on an
        object."""
        self._signature.bind(*args, **kwargs)  # raises for a call that ``fn`` could not take
        parameters = self._signature.parameters.values()
        names = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        marked_args = tuple(self._mark(names[min(i, len(names) - 1)], value) for i, value in enumerate(args))
        return marked_args, {name: self._mark(name, value) for name, value in kwargs.items()}

    def _mark(self, name: str, value: Any) -> Any:
        dim = self._dynamic_dims.get(name, self._default_dim)

        def mark(tensor: Tensor) -> Tensor:
            tensor = stand_in(tensor)
            if dim is None or dim >= tensor.dim():
                return tensor
            if tensor.shape[dim] < MIN_TRACE_ROWS:
                raise GraphError(
                    f"argument {name!r} has {tensor.shape[dim]} rows in the call that is traced; make the "
                    f"first call in a piecewise context with at least {MIN_TRACE_ROWS}"
                )
            torch._dynamo.mark_dynamic(tensor, dim)
            return tensor

        return pytree.tree_map_only(Tensor, mark, value)

    def _verify(self, check: AddressCheck) -> None:
        """Raise ``StaleAddressError`` if the forward would be called with other memory than at capture.

        Nothing is computed: the compiled code collects its inputs, which are compared, and returns.
        """
        if not check.is_complete:
            raise GraphError("a captured call of a compiled forward left no addresses to check")
        traces = self.stats.num_traces
        with _disable_current_modes():  # a mode of whoever replays: guards do not work under it
            self._run(check.args, check.kwargs, check=check, originals={})
        if self.stats.num_traces != traces:
            raise GraphError(
                "the forward had to be traced again for the first replay: something that the graphs depend "
                "on changed after the capture; capture again"
            )


def stand_in(tensor: Tensor) -> Tensor:
    """The same memory at offset zero of a storage that owns nothing: for the time of a call, or as long as
    the caller keeps the owner alive."""
    stride = _plain_stride(tensor)
    num_bytes = storage_bytes(tensor.shape, stride, tensor.dtype)
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, num_bytes)
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, 0, tensor.shape, stride)


def _in_plain_form(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[int, Tensor]]:
    """The arguments as traced code takes them, and by the identity of each stand-in what it stands for.

    Traced code holds for the offset into a storage that it was traced with, and for the strides of dimensions
    of one element too; views of one buffer have many of both.
    """
    originals: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if tensor.storage_offset() == 0 and tensor.stride() == _plain_stride(tensor):
            return tensor
        moved = stand_in(tensor)
        originals[id(moved)] = tensor
        return moved

    return *pytree.tree_map_only(Tensor, move, (args, kwargs)), originals


def _plain_stride(tensor: Tensor) -> tuple[int, ...]:
    """The stride a contiguous tensor has by itself; a prefix of a longer row may have another one."""
    if not tensor.is_contiguous():
        return tensor.stride()
    stride, step = [], 1
    for size in reversed(tensor.shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def install(
    module: nn.Module,
    *,
    config: PiecewiseConfig,
    device: GraphDevice,
    dynamic_dims: Mapping[str, int | None] | None = None,
    default_dim: int | None = 0,
) -> PiecewiseForward:
    """Swap ``module.forward`` for a trampoline, once. Raises ``GraphError`` if it has one already."""
    if isinstance(module.forward, PiecewiseForward):
        raise GraphError(f"{type(module).__name__} has a piecewise forward already; uninstall it first")
    forward = PiecewiseForward(
        module.forward, config=config, device=device, dynamic_dims=dynamic_dims, default_dim=default_dim
    )
    module.forward = forward
    return forward


def uninstall(module: nn.Module) -> None:
    """Give ``module`` its own forward back."""
    if not isinstance(module.forward, PiecewiseForward):
        raise GraphError(f"{type(module).__name__} has no piecewise forward")
    del module.forward


def _private_copy(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own.

    Compiled code is cached per code object, for the whole process and up to a limit: two models of one class
    would count against each other.
    """
    if isinstance(fn, types.MethodType):
        return types.MethodType(_private_copy(fn.__func__), fn.__self__)
    if not isinstance(fn, types.FunctionType):
        return fn
    copy = types.FunctionType(
        fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


@contextmanager
def _tracing_options() -> Iterator[None]:
    """Trace so that the code holds for 0 and 1 rows too, without a trace of their own. Floats are constants:
    one that a model traced earlier in this process had otherwise (the eps of its norms) would become a tensor
    that is read on the host at every call."""
    from torch.fx.experimental import _config as shapes

    constants = torch._dynamo.config.patch(specialize_float=True)
    with shapes.patch(backed_size_oblivious=True), constants:  # type: ignore[attr-defined]
        yield

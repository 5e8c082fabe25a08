"""Recording on the emulated device: sees each op, computes nothing, keeps bound calls.

``Recording`` is what one open segment collects. Two modes feed it: a dispatch mode sees the ops, a function
mode sees the few Python methods (``tolist``, ``numpy``, ...) that read memory without an op. Arguments are
kept as raw addresses, as in a CUDA graph; memory outside the pool additionally by a weak reference to its
storage, so that a replay can tell that its owner died. Read ``op_rules.py`` for what is refused and
``op_binding.py`` for how calls are bound.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.errors import CaptureError
from gapless.graphs.device.arena import Arena, alias_address, poison_
from gapless.graphs.device.op_binding import Call, bind_functional, bind_mutation, with_autograd
from gapless.graphs.device.op_rules import OpKind, host_read_functions, one_hot, op_kind, reads_host_data
from gapless.graphs.device.shapes import (
    ResultSpec,
    ShapeInference,
    TensorSpec,
    leaves_of,
    map_tensors,
    nest_like,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExternalUse:
    """Memory outside the pool that a segment reads or writes, and the first op that does."""

    storage: StorageWeakRef
    op: str
    argument: str
    description: str


class Recording:
    """The open segment: nodes so far and everything they depend on."""

    def __init__(self, arena: Arena, shapes: ShapeInference) -> None:
        self._arena, self._shapes = arena, shapes
        self.calls: list[Call] = []
        self.op_names: list[str] = []
        self.externals: dict[int, ExternalUse] = {}
        self.constants: list[Tensor] = []
        self.last_op: str | None = None
        self.error: CaptureError | None = None
        self._aliases: dict[tuple[Any, ...], Tensor] = {}

    def run(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one op and return what the caller sees of it."""
        kind = op_kind(op)
        self.last_op = str(op)
        if kind is OpKind.VIEW:
            result = op(*args, **kwargs)
            if op is torch.ops.aten.lift_fresh.default:  # data made by Python: frozen, so the segment owns it
                self.constants.append(result)
            return result
        if kind is OpKind.HOST_READ:
            self.refuse(str(op), "it needs device data on the host")
        reason = reads_host_data(op, args, kwargs)
        if reason is not None:
            self.refuse(str(op), reason)
        specs = self._infer(op, args, kwargs)
        if kind is OpKind.ALLOCATION:
            return self._allocate(specs)
        if kind is OpKind.MUTATION or not op._schema.returns:
            return self._record_mutation(op, args, kwargs, specs)
        return self._record_functional(op, args, kwargs, specs)

    def record_call(
        self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], *, abstract: Callable[..., Any]
    ) -> Any:
        """Record compiled code as one node: only its arguments and results can be seen."""
        self.last_op = name
        try:
            specs = self._shapes.infer_call(abstract, args)
        except Exception as error:
            self.error = CaptureError(f"{name} at {user_source_line()} cannot be captured: {error}")
            raise self.error from error
        blocks: dict[int, Tensor] = {}
        leaves = [self._place(spec, args, blocks) for spec in leaves_of(specs)]
        # What is a view of an argument is written where the argument lies; numbers are frozen.
        targets = tuple(
            self.alias(leaf, name, "output")
            if isinstance(spec, ResultSpec) and spec.argument is None
            else None
            for spec, leaf in zip(leaves_of(specs), leaves, strict=True)
        )
        aliased = tuple(
            self.alias(arg, name, str(i)) if isinstance(arg, Tensor) else arg for i, arg in enumerate(args)
        )
        self.calls.append(functools.partial(_call_and_copy, with_autograd(fn), aliased, targets))
        self.op_names.append(name)
        return nest_like(specs, leaves)

    def _place(self, spec: Any, args: tuple[Any, ...], blocks: dict[int, Tensor]) -> Any:
        """The tensor that ``spec`` describes: a view of an argument, or of a block of its storage."""
        if not isinstance(spec, ResultSpec):
            return spec
        if spec.argument is not None:
            base = args[spec.argument].view(spec.dtype)
            return base.as_strided(spec.size, spec.stride, base.storage_offset() + spec.offset)
        block = blocks.get(spec.storage)
        if block is None:
            block = blocks[spec.storage] = self._arena.empty_strided((spec.num_bytes,), (1,), torch.uint8)
            block.fill_(0xFF)  # NaN in every float type
        return block.view(spec.dtype).as_strided(spec.size, spec.stride, spec.offset)

    def refuse(self, name: str, reason: str) -> None:
        """Raise; the segment stays invalid even if the user's code swallows the error, as on CUDA."""
        self.error = CaptureError(f"{name} at {user_source_line()} cannot be captured: {reason}")
        raise self.error

    def alias(self, tensor: Tensor, op: str, argument: str) -> Tensor:
        """A non-owning stand-in; external memory is put under watch."""
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            self.refuse(op, f"argument {argument} is a {tensor.layout} tensor on {tensor.device}")
        if tensor.numel() == 0:  # no memory to address, and no identity to share
            return alias_address(tensor)
        bits = (tensor.is_conj(), tensor.is_neg())
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, bits)
        found = self._aliases.get(key)
        if found is not None:
            return found
        if self._arena.owns(tensor):
            alias = self._arena.alias(tensor)
        else:
            alias = alias_address(tensor)
            self._watch(tensor, op, argument)
        self._aliases[key] = alias
        return alias

    def _watch(self, tensor: Tensor, op: str, argument: str) -> None:
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage.cdata not in self.externals:
            description = f"{tuple(tensor.shape)} {tensor.dtype}, at {user_source_line()}"
            self.externals[storage.cdata] = ExternalUse(
                storage=storage, op=op, argument=argument, description=description
            )

    def _infer(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._shapes.infer(op, args, kwargs)
        except Exception as error:
            self.error = CaptureError(f"{op} at {user_source_line()} cannot be captured: {error}")
            raise self.error from error

    def _allocate(self, specs: Any) -> Any:
        """Tensors in the pool for ``specs``, filled with values that must not survive the first replay."""
        if isinstance(specs, TensorSpec):
            tensor = self._arena.empty_strided(specs.size, specs.stride, specs.dtype)
            poison_(tensor)
            return tensor
        if isinstance(specs, tuple | list):
            return type(specs)([self._allocate(spec) for spec in specs])
        return specs

    def _record_mutation(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], specs: Any
    ) -> Any:
        returns = op._schema.returns
        if not returns:
            self._add(op, bind_mutation(op, *self._alias_all(op, args, kwargs)))
            return None
        written = _written_arguments(op, args, kwargs)
        specs = (specs,) if len(returns) == 1 else tuple(specs)
        results = tuple(
            written[sorted(ret.alias_info.before_set)[0]]
            if ret.alias_info is not None
            else self._allocate(spec)
            for ret, spec in zip(returns, specs, strict=True)
        )
        fresh = [
            None if ret.alias_info is not None else result
            for ret, result in zip(returns, results, strict=True)
        ]
        aliased = self._alias_all(op, args, kwargs)
        if any(isinstance(result, Tensor) for result in fresh):
            self._add(op, bind_functional(op, *aliased, self._alias_outs(op, fresh)))
        else:
            self._add(op, bind_mutation(op, *aliased))
        return results[0] if len(returns) == 1 else results

    def _record_functional(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], specs: Any
    ) -> Any:
        result = self._allocate(specs)
        outs = list(result) if isinstance(result, tuple | list) else [result]
        aliased = self._alias_all(op, args, kwargs)
        self._add(op, bind_functional(op, *aliased, self._alias_outs(op, outs)))
        return result

    def _add(self, op: torch._ops.OpOverload, call: Call) -> None:
        self.calls.append(call)
        self.op_names.append(str(op))

    def _alias_all(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = [argument.name for argument in op._schema.arguments]

        def keep(name: str) -> Callable[[Tensor], Tensor]:
            return lambda tensor: self.alias(tensor, str(op), name)

        return (
            tuple(map_tensors(keep(names[i]), arg) for i, arg in enumerate(args)),
            {name: map_tensors(keep(name), value) for name, value in kwargs.items()},
        )

    def _alias_outs(self, op: torch._ops.OpOverload, outs: list[Any]) -> list[Tensor | None]:
        return [self.alias(out, str(op), "output") if isinstance(out, Tensor) else None for out in outs]


class RecordingMode(TorchDispatchMode):
    """Sends ops to the open recording; passes them on while there is none (between segments)."""

    def __init__(self) -> None:
        super().__init__()
        self.recording: Recording | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.recording is None:
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            self.recording.refuse(str(func), "higher-order ops have no CPU recording")
        if op_kind(func) is OpKind.COMPOSITE:
            with self:
                return func.decompose(*args, **kwargs)
        return self.recording.run(func, args, kwargs)


class HostReadMode(TorchFunctionMode):
    """Refuses the Python methods that read a tensor's data, and what only the CPU would read."""

    def __init__(self) -> None:
        super().__init__()
        self.recording: Recording | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recording = self.recording
        if recording is None:
            return func(*args, **kwargs)
        name = host_read_functions().get(func)
        if name is not None:
            recording.last_op = name
            recording.refuse(name, "it reads device data on the host")
        generator = kwargs.get("generator")
        if generator is not None and generator is not torch.default_generator:
            recording.refuse(
                getattr(func, "__name__", str(func)),
                "it draws from a torch.Generator of its own, which a replay cannot advance; use the default "
                "generator, or random numbers computed from a seed tensor",
            )
        if func is torch.tensor and kwargs.get("device") is not None:
            recording.refuse(
                "torch.tensor", "it copies host data to the device; make the tensor before the capture"
            )
        if func is torch.nn.functional.one_hot and _class_count(args, kwargs) > 0:
            return one_hot(args[0] if args else kwargs["self"], _class_count(args, kwargs))
        return func(*args, **kwargs)


def user_source_line() -> str:
    """``file:line`` of the innermost frame that is neither PyTorch's nor this package's graph code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_internal_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


def is_internal_file(filename: str) -> bool:
    return filename.startswith(_INTERNAL_PREFIXES)


_INTERNAL_PREFIXES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), "<")


def _written_arguments(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Alias set name -> the argument that is written under it."""
    written: dict[str, Any] = {}
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for name in argument.alias_info.before_set:
                written[name] = value
    return written


def _call_and_copy(fn: Callable[..., Any], args: tuple[Any, ...], targets: tuple[Tensor | None, ...]) -> None:
    for target, result in zip(targets, leaves_of(fn(*args)), strict=True):
        if target is not None:
            target.copy_(result)


def _class_count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return args[1] if len(args) > 1 else kwargs.get("num_classes", -1)

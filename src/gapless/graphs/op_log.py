"""OpLog: what a capture would freeze. Every op of a forward, with each argument that is not a tensor.

A captured kernel keeps its host arguments for ever: numbers, lists, dtypes, and the shapes, strides and
offsets of the tensors it was given. ``OpLog`` writes them down while the forward runs eagerly, on any
device, so that two runs on different batches can be compared: where they differ, a value of the batch has
been frozen, and where even the ops differ, a branch of Python has. Bodies of eager breaks are left out,
because they run anew at every replay. A custom op that writes into an argument without having declared that
is noted, too: compiled code would drop or reorder it. Kernels launched past the dispatcher (a Triton kernel
called directly) are not seen. Read ``check.py`` next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.graphs.breakable import activate
from gapless.graphs.compare import exact_mismatch
from gapless.graphs.device.op_rules import OpKind, op_kind
from gapless.graphs.device.recorder import user_source_line
from gapless.graphs.device.shapes import tensors_of

_MAX_LOGGED_ELEMENTS = 64
_TRUSTED = ("aten", "prims", "prim")
"""Namespaces of PyTorch's own ops."""
_MAX_COPIED_BYTES = 64 << 20
"""Of an argument whose contents before and after an op are compared: below a mode nothing counts writes."""


class TensorArgument(NamedTuple):
    """What a kernel freezes of a tensor besides its address."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int


@dataclass(frozen=True, slots=True)
class LoggedOp:
    name: str
    arguments: tuple[tuple[str, Any], ...]
    """Names and values; tensors as ``TensorArgument``."""
    line: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenValue:
    """A host value inside captured ops: which op, which argument, where in the source, in how many nodes."""

    op: str
    argument: str
    value: str
    line: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first way in which one node differs between two runs."""

    node: int
    detail: str
    line: str


class OpLog:
    """A context manager that logs the ops of its block. ``num_breaks`` counts the eager breaks it met."""

    def __init__(self) -> None:
        self.ops: list[LoggedOp] = []
        self.break_names: list[str] = []
        self.undeclared_writes: dict[tuple[str, str], str] = {}
        """Op and argument: the source line."""
        self._mode = _LoggingMode(self)
        self._stack = ExitStack()

    @property
    def num_breaks(self) -> int:
        return len(self.break_names)

    def __enter__(self) -> OpLog:
        self._stack.enter_context(activate(self))  # type: ignore[arg-type]  # it answers run_break, as recorders do
        self._stack.enter_context(self._mode)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def run_break(self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a break's body unseen."""
        self.break_names.append(f"{body.__module__}.{body.__qualname__}")
        self._mode.is_paused = True
        try:
            with activate(None):
                return body(*args, **kwargs)
        finally:
            self._mode.is_paused = False

    def frozen_values(self) -> list[FrozenValue]:
        """Every host value, equal ones of one source line together."""
        counts: Counter[tuple[str, str, str, str]] = Counter()
        for op in self.ops:
            for name, value in op.arguments:
                for text in _host_values(value):
                    counts[op.name, name, text, op.line] += 1
        return [
            FrozenValue(op=op, argument=name, value=value, line=line, count=count)
            for (op, name, value, line), count in counts.items()
        ]

    def differences_to(self, other: OpLog, *, limit: int = 20) -> list[Difference]:
        """Where ``other`` ran other ops, or the same ops with other host values; at most ``limit``."""
        found: list[Difference] = []
        for node, (a, b) in enumerate(zip(self.ops, other.ops, strict=False)):
            if a.name != b.name:
                detail = (
                    f"ran {a.name} once and {b.name} the other time: a Python branch depends on the batch"
                )
                return [*found, Difference(node=node, detail=detail, line=b.line)]
            found += [
                Difference(node=node, detail=detail, line=b.line) for detail in _argument_differences(a, b)
            ]
            if len(found) >= limit:
                return found[:limit]
        if len(self.ops) != len(other.ops):
            node = min(len(self.ops), len(other.ops))
            extra = (self.ops + other.ops[len(self.ops) :])[node]
            detail = f"{len(self.ops)} ops once and {len(other.ops)} the other time, from {extra.name} on"
            found.append(Difference(node=node, detail=detail, line=extra.line))
        if self.break_names != other.break_names:
            detail = f"{self.num_breaks} breaks once and {other.num_breaks} the other time"
            found.append(Difference(node=len(self.ops), detail=detail, line=""))
        return found


class _LoggingMode(TorchDispatchMode):
    def __init__(self, log: OpLog) -> None:
        super().__init__()
        self._log = log
        self.is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.is_paused and isinstance(func, torch._ops.OpOverload):
            if op_kind(func) is OpKind.COMPOSITE:
                with self:
                    return func.decompose(*args, **kwargs)
            if func is torch.ops.aten.lift_fresh.default:  # data made by Python
                self._log.ops.append(_logged_constant(func, args[0]))
            elif op_kind(func) is not OpKind.VIEW:
                self._log.ops.append(_logged(func, args, kwargs))
                if func.namespace not in _TRUSTED:
                    return self._run_watched(func, args, kwargs)
        return func(*args, **kwargs)

    def _run_watched(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        passed = [
            (argument, tensor)
            for argument, value in _by_argument(op, args, kwargs)
            for tensor in tensors_of(value)
        ]
        written = {_storage_of(t) for argument, t in passed if argument.alias_info is not None}
        inputs = [
            (argument.name, tensor, tensor.clone())
            for argument, tensor in passed
            if _storage_of(tensor) not in written and tensor.nbytes <= _MAX_COPIED_BYTES
        ]
        result = op(*args, **kwargs)
        for name, tensor, before in inputs:
            if exact_mismatch([tensor], [before]) is not None:
                self._log.undeclared_writes.setdefault((str(op), name), user_source_line())
        return result


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _by_argument(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterable[tuple[Any, Any]]:
    for index, argument in enumerate(op._schema.arguments):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _logged(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LoggedOp:
    names = [argument.name for argument in op._schema.arguments]
    pairs = [*zip(names, args, strict=False), *kwargs.items()]
    return LoggedOp(
        str(op), tuple((name, _kept(value)) for name, value in pairs if value is not None), user_source_line()
    )


def _logged_constant(op: torch._ops.OpOverload, data: Tensor) -> LoggedOp:
    with torch._C._DisableTorchDispatch():
        head = tuple(data.flatten()[:_MAX_LOGGED_ELEMENTS].tolist())
    return LoggedOp(str(op), (("data", head), ("shape", tuple(data.shape))), user_source_line())


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        offset = int(value.storage_offset()) if value.layout is torch.strided else 0
        return TensorArgument(tuple(value.shape), strides, value.dtype, offset)
    if isinstance(value, tuple | list):
        return tuple(_kept(item) for item in value)
    return value


def _host_values(value: Any) -> Iterable[str]:
    if isinstance(value, TensorArgument):
        return ()
    if isinstance(value, tuple) and any(isinstance(item, TensorArgument) for item in value):
        return ()
    return (f"{value!r:.120}",)


def _argument_differences(a: LoggedOp, b: LoggedOp) -> Iterable[str]:
    if [name for name, _ in a.arguments] != [name for name, _ in b.arguments]:
        yield f"{a.name} was called with other arguments"
        return
    for (name, before), (_, after) in zip(a.arguments, b.arguments, strict=True):
        if before != after and not (before != before and after != after):
            yield f"{a.name} argument {name}: {_short(before)} once and {_short(after)} the other time"


def _short(value: Any) -> str:
    if isinstance(value, TensorArgument):
        return f"a tensor {value.shape} with strides {value.stride} at offset {value.offset}"
    return f"{value!r:.80}"

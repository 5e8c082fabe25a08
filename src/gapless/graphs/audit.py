"""Audit: what a callable can reach, by name, so that whatever moved or changed can name itself.

A graph is valid for the addresses it saw: of parameters and buffers, and just as much of tensors derived from
them (packed or transposed weights, tables) that hide in attributes, closures and plain objects. It is valid
for the plain values it saw, too: flags, limits, counters; and for the classes and hooks of modules, which ran
then and run no more. A ``Snapshot`` walks all of these from named roots;
two snapshots differ by a list of changes. Tensors are found by name and compared by address, shape and type.
With ``own=True`` a snapshot also keeps their memory alive, so that a graph whose weights were rebound reads
the old weights, never someone else's data. Used by ``probe.py`` (writes during a forward), ``graphed.py``
(reloaded weights) and ``check.py``.
"""

from __future__ import annotations

import enum
import functools
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gapless.graphs.breakable import eager_break

MAX_OBJECTS = 200_000
"""A walk stops here and says so; a forward that reaches more holds data, not parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """One reachable tensor."""

    address: int
    num_bytes: int
    layout: tuple[Any, ...]
    version: int
    """Counts in-place writes; -1 where PyTorch keeps no count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """``moved``: another address, shape or type. ``value``: a plain value. ``gone`` and ``new``: tensors."""

    kind: Literal["moved", "value", "gone", "new"]
    name: str
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


class Snapshot:
    """Everything reachable from ``roots`` at one moment."""

    def __init__(self, roots: Mapping[str, object], *, own: bool = False, enters_breaks: bool = True) -> None:
        """``enters_breaks=False`` leaves out what only the bodies of eager breaks can reach: they are not
        captured."""
        self.tensors: dict[str, TensorRecord] = {}
        self.values: dict[str, Any] = {}
        self.modules: dict[str, str] = {}
        """What code each module runs: its class, how many hooks, whether its forward was replaced."""
        self.is_complete = True
        self._owned: list[Tensor] = []
        self._objects: dict[str, Tensor] = {}
        walk = _Walk(enters_breaks=enters_breaks)
        for name, leaf in walk.leaves(roots):
            if isinstance(leaf, Tensor):
                self._record(name, leaf, own=own)
            elif isinstance(leaf, _ModuleCode):
                self.modules[name] = leaf.text
            else:
                self.values[name] = leaf
        self.is_complete = walk.num_objects < MAX_OBJECTS

    @property
    def num_bytes(self) -> int:
        """Memory of the reachable tensors, each address once."""
        return sum({record.address: record.num_bytes for record in self.tensors.values()}.values())

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {record.layout[2] for record in self.tensors.values()}

    def changes_to(self, now: Snapshot) -> list[Change]:
        """What differs in ``now``: tensors that moved, vanished or appeared, values that changed."""
        changes = []
        for name, before in self.tensors.items():
            after = now.tensors.get(name)
            if after is None:
                changes.append(Change(kind="gone", name=name, detail="the tensor is no longer there"))
            elif after.address != before.address or after.layout != before.layout:
                changes.append(Change(kind="moved", name=name, detail=_move_text(before, after)))
        changes += [
            Change(kind="new", name=name, detail="a tensor that was not there")
            for name in now.tensors.keys() - self.tensors.keys()
        ]
        for name, code in self.modules.items():
            if now.modules.get(name, code) != code:
                changes.append(Change(kind="value", name=name, detail=f"{code} → {now.modules[name]}"))
        for name, value in self.values.items():
            if name in now.values and _differs(value, now.values[name]):
                changes.append(Change(kind="value", name=name, detail=f"{value!r} → {now.values[name]!r}"))
        return sorted(changes, key=lambda change: change.name)

    def written(self, now: Snapshot) -> list[str]:
        """Names of tensors that stayed where they were and were written in place."""
        return [
            name
            for name, before in self.tensors.items()
            if (after := now.tensors.get(name)) is not None
            and after.address == before.address
            and after.version != before.version
        ]

    def tensor(self, name: str) -> Tensor:
        """The live tensor of a name, for saving and restoring its contents."""
        return self._objects[name]

    def forget(self) -> None:
        """Let go of every tensor; the records stay. For memory that is about to be released."""
        self._owned.clear()
        self._objects.clear()

    def _record(self, name: str, tensor: Tensor, *, own: bool) -> None:
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # a tensor without memory of its own (fake, functional wrappers)
            return
        self.tensors[name] = TensorRecord(
            address=address,
            num_bytes=tensor.nbytes,
            layout=(tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device)),
            version=-1 if tensor.is_inference() else tensor._version,
        )
        self._objects[name] = tensor
        if own:
            # A parameter's ``.data`` can be exchanged under it; the alias holds the memory itself.
            self._owned.append(tensor.detach())


class _Walk:
    """Depth-first, each container once; names are attribute paths."""

    def __init__(self, *, enters_breaks: bool) -> None:
        self._enters_breaks = enters_breaks
        self.num_objects = 0
        self._seen: dict[int, object] = {}

    def leaves(self, roots: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
        todo: list[tuple[str, object]] = list(roots.items())[::-1]
        while todo and self.num_objects < MAX_OBJECTS:
            name, item = todo.pop()
            self.num_objects += 1
            if isinstance(item, Tensor):
                yield name, item
                children = vars(item) if getattr(item, "__dict__", None) else {}
                todo += [(f"{name}.{key}", value) for key, value in children.items()]
                continue
            if isinstance(item, _PLAIN):
                yield name, item
                continue
            if id(item) in self._seen or isinstance(item, _OPAQUE):
                continue
            if getattr(type(item), "is_graphed", False):  # captured as what it wraps, or by itself
                todo.append((name, item.fn))  # type: ignore[attr-defined]
                continue
            if not self._enters_breaks and _is_eager_break(item):
                continue
            self._seen[id(item)] = item
            if isinstance(item, nn.Module):
                yield name, _ModuleCode.of(item)
            if isinstance(item, dict | list | set | deque):
                yield f"len({name})", len(item)
            todo += list(_children(name, item))[::-1]


_PLAIN = (
    bool, int, float, complex, str, bytes, types.NoneType,
    torch.dtype, torch.device, torch.Size, torch.memory_format, enum.Enum,
)  # fmt: skip
_KEPT_IN_GLOBALS = (Tensor, nn.Module, list, dict, set, bool, int, float)
_OPAQUE = (types.ModuleType, type, torch.Generator, torch._C.ScriptObject)

_FOREIGN = (
    "builtins", "torch", "numpy", "threading", "_thread", "logging", "weakref", "_weakref", "concurrent",
    "asyncio", "inspect", "typing", "importlib", "re", "types", "functools", "_io", "io", "contextvars",
    "ctypes", "_ctypes", "collections", "_abc", "abc", "mmap", "pathlib", "triton", "sympy",
)  # fmt: skip
"""Packages whose objects are machinery, not a model's state."""

_BREAK_CODE = eager_break(_Walk.leaves).__code__
"""All functions that ``eager_break`` makes share one code object."""

_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training", "_parameters", "_buffers", "_modules"}


def _is_eager_break(item: object) -> bool:
    return isinstance(item, types.FunctionType) and item.__code__ is _BREAK_CODE


@dataclass(frozen=True, slots=True)
class _ModuleCode:
    text: str

    @classmethod
    def of(cls, module: nn.Module) -> _ModuleCode:
        num_hooks = len(_hooks(module))
        text = f"{type(module).__module__}.{type(module).__qualname__}"
        text += f" with {num_hooks} forward hooks" if num_hooks else ""
        return cls(text + (" and another forward" if "forward" in vars(module) else ""))


def _hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def _children(name: str, item: object) -> Iterator[tuple[str, object]]:
    if isinstance(item, dict):
        for key, value in item.items():
            if isinstance(key, _PLAIN):
                yield f"{name}[{key!r}]", value
    elif isinstance(item, list | tuple | deque):
        for index, value in enumerate(item):
            yield f"{name}[{index}]", value
    elif isinstance(item, nn.Module):
        yield from _module_children(name, item)
    elif isinstance(item, functools.partial):
        yield from ((name, item.func), (f"{name}.args", item.args), (f"{name}.keywords", item.keywords))
    elif isinstance(item, types.MethodType):
        yield from ((name, item.__self__), (name, item.__func__))
    elif isinstance(item, types.FunctionType):
        yield from _function_children(name, item)
    elif not _is_foreign(type(item)):
        for key, value in _attributes(item):
            yield f"{name}.{key}", value
        yield name, getattr(type(item), "__call__", None)  # noqa: B004


def _module_children(name: str, module: nn.Module) -> Iterator[tuple[str, object]]:
    for key, value in vars(module).items():
        if key in ("_parameters", "_buffers", "_modules"):
            yield from ((f"{name}.{child}", tensor) for child, tensor in value.items())
        elif key not in _MODULE_INTERNALS:
            yield f"{name}.{key}", value
    for index, hook in enumerate(_hooks(module)):
        yield f"{name}.hooks[{index}]", hook
    yield name, type(module).forward


def _function_children(name: str, function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Closure cells, defaults, and the globals that a function of the user's own code names, with the
    attributes of classes among them that it names too."""
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield name, wrapped
    for cell_name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{name}.{cell_name}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield f"{name}.defaults", function.__defaults__
    if _is_foreign(function):
        return
    for used in function.__code__.co_names:
        value = function.__globals__.get(used)
        is_own_function = isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__
        if is_own_function or isinstance(value, _KEPT_IN_GLOBALS):
            yield f"{function.__module__}.{used}", value
        elif isinstance(value, type) and not _is_foreign(value):
            named = [key for key in function.__code__.co_names if key in vars(value)]
            held = [(key, vars(value)[key]) for key in named]
            yield from ((f"{used}.{key}", item) for key, item in held if isinstance(item, _KEPT_IN_GLOBALS))


def _attributes(item: object) -> Iterator[tuple[str, object]]:
    yield from getattr(item, "__dict__", {}).items()
    for cls in type(item).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(item, slot):
                yield slot, getattr(item, slot)


def _differs(a: Any, b: Any) -> bool:
    return bool(a != b) and not (a != a and b != b)  # NaN equals NaN here


def _is_foreign(item: Any) -> bool:
    return (getattr(item, "__module__", None) or "").partition(".")[0] in _FOREIGN


def _move_text(before: TensorRecord, after: TensorRecord) -> str:
    if before.layout != after.layout:
        (shape, stride, dtype, device), (shape2, stride2, dtype2, device2) = before.layout, after.layout
        pairs = ((shape, shape2), (dtype, dtype2), (device, device2), (stride, stride2))
        return "is now " + ", ".join(f"{b} instead of {a}" for a, b in pairs if a != b)
    return f"moved from {before.address:#x} to {after.address:#x}"

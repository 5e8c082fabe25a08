"""Frozen arguments: what an undeclared argument was at the capture, and whether a call still has the same.

A graph goes on using whatever it saw, so a tensor must be the same memory seen in the same way, and any other
value must be equal. A value that can change in place (an array, a set, an object with attributes) is compared
with what it held at the capture, not with itself. Containers that PyTorch can flatten (tuples, lists, dicts)
never get here: their leaves do. Read ``call_template.py`` next.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gapless.errors import GraphError
from gapless.graphs.audit import Change, Snapshot

_COPIED = (np.ndarray, set, bytearray)
"""Compared by content with a copy."""
_NEVER_WALKED = (torch.nn.Module, torch.Generator, torch.dtype, torch.device, torch.Size)
"""Modules are looked through by the audit, before the first replay of each size; that costs too much here."""
MAX_WALKED = 200
"""Attributes of an object (and of what it holds) that are compared in every call; the audit sees all."""


@dataclass(frozen=True, slots=True)
class FrozenTensor:
    index: int
    name: str
    tensor: Tensor | None
    address: int
    layout: tuple[Any, ...]

    @classmethod
    def of(cls, index: int, name: str, tensor: Tensor) -> FrozenTensor:
        return cls(index, name, tensor, tensor.data_ptr(), layout_of(tensor))

    def is_as_it_was(self) -> bool:
        """Whether the example's own tensor was left in place (``t_()``, ``resize_()``)."""
        tensor = self.tensor
        return (
            tensor is not None
            and tensor.data_ptr() == self.address
            and tensor.shape == self.layout[0]
            and tensor.stride() == self.layout[1]
        )

    def check(self, leaf: Any) -> None:
        """Raise ``GraphError`` unless ``leaf`` is this memory, seen in this way."""
        if not isinstance(leaf, Tensor):
            raise GraphError(_changed(self.name, "a tensor", leaf))
        if leaf.data_ptr() != self.address:
            how = f"at address {leaf.data_ptr():#x}, was {self.address:#x}"
        elif layout_of(leaf) != self.layout:
            how = f"the same memory as {layout_of(leaf)}, was {self.layout}"
        else:
            return
        raise GraphError(
            f"argument {self.name!r} is another tensor than when the graphs were captured ({how}); update it "
            "in place with copy_(), declare it in inputs=, or recapture()"
        )


class FrozenValue:
    """A leaf that is no tensor. ``value`` is the example's own object, or a copy of what is compared so."""

    __slots__ = ("_contents", "_live_names", "index", "name", "value")

    def __init__(self, index: int, name: str, value: Any) -> None:
        self.index, self.name = index, name
        self.value = copy.copy(value) if isinstance(value, _COPIED) else value
        self._contents: Snapshot | None = None
        self._live_names: Collection[str] = ()

    def settle(self, live_names: Collection[str]) -> None:
        """Remember what an object holds behind the capture. ``live_names`` change in every run anyway."""
        self._contents, self._live_names = _contents(self.name, self.value), live_names

    def check(self, leaf: Any) -> None:
        """Raise ``GraphError`` if ``leaf`` is another value or holds other values now."""
        if leaf is not self.value and not _is_equal(leaf, self.value):
            raise GraphError(_changed(self.name, self.value, leaf))
        if self._contents is None:
            return
        changes = self._contents.changes_to(Snapshot({self.name: leaf}))
        changes = [change for change in changes if change.name not in self._live_names]
        if changes:
            raise GraphError(_changed_inside(self.name, changes))


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """Everything about a tensor but its address and contents."""
    bits = (("conjugated",) if tensor.is_conj() else ()) + (("negated",) if tensor.is_neg() else ())
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, *bits)


def _contents(name: str, value: Any) -> Snapshot | None:
    """What an object with attributes holds; None for a value that equality tells everything about."""
    if isinstance(value, _NEVER_WALKED) or callable(value):
        return None
    snapshot = Snapshot({name: value})
    held = len(snapshot.values) + len(snapshot.tensors)
    is_leaf = name in snapshot.values
    snapshot.forget()  # records are compared; the tensors may go
    return None if is_leaf or not 0 < held <= MAX_WALKED else snapshot


def _is_equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    return bool(a == b)


def _changed(name: str, before: Any, now: Any) -> str:
    return (
        f"argument {name!r} was {before!r:.80} when the graphs were captured and is {now!r:.80} now. A graph "
        "keeps the value it saw: pass it as a declared tensor input, or make a graphed callable per value"
    )


def _changed_inside(name: str, changes: list[Change]) -> str:
    return (
        f"argument {name!r} has changed inside since the graphs were captured: "
        f"{'; '.join(map(str, changes[:5]))}. A graph keeps what it saw: pass it as a declared tensor input, "
        "make a graphed callable per value, or recapture()"
    )

"""Handoff slots: where the tensors returned by an eager break wait for the next segment.

A captured segment reads fixed addresses, while an eager body returns tensors at whatever address its allocator had
free. So each returned tensor is copied into a slot: a tensor of the graph pool, allocated inside the next segment's
capture and given to the forward in place of the result. Its lifetime is the forward's own reference, like any pool
tensor, so sizes share slot memory. Invariant: every replay writes a slot before the segment that reads it runs, and
nothing else runs in the pool in between, which is why the replay side may keep non-owning aliases only.
Read ``breakable.py`` next for the moment at which slots are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gapless.errors import GraphError


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultSpec:
    """What one break returned at capture: leaves in order and how they were nested."""

    name: str
    structure: pytree.TreeSpec
    leaves: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, name: str, result: Any, device: torch.device) -> ResultSpec:
        """Refuses anything but tensors of ``device`` and ``None``: a number would be frozen by the capture."""
        leaves, structure = pytree.tree_flatten(result)
        for leaf in leaves:
            if leaf is None:
                continue
            if not isinstance(leaf, Tensor):
                raise GraphError(
                    f"break {name} returned a {type(leaf).__name__}; a break may return tensors, None, and "
                    "tuples, lists or dicts of them (any other value would be frozen at capture)"
                )
            if leaf.device.type != device.type:
                raise GraphError(
                    f"break {name} returned a tensor on {leaf.device}, but the graph runs on {device}; "
                    "move it there inside the break"
                )
        return cls(name=name, structure=structure, leaves=tuple(leaves))


class Handoff:
    """Writes a break's results into its slots at every replay. ``slots[i]`` belongs to leaf ``i`` of the result."""

    def __init__(self, *, name: str, structure: pytree.TreeSpec, slots: Sequence[Tensor | None]) -> None:
        self._name = name
        self._structure = structure
        self._slots = tuple(slots)
        self._single = self._slots[0] if structure == _SINGLE_LEAF else None

    def fill(self, result: Any) -> None:
        """Copy ``result`` in. Raises ``GraphError`` when it is not nested, shaped or typed as at capture."""
        if self._single is not None and isinstance(result, Tensor):
            self._fill_one(self._single, result)
            return
        leaves, structure = pytree.tree_flatten(result)
        if structure != self._structure:
            raise GraphError(
                f"break {self._name} returned {structure}, but {self._structure} when it was captured; "
                "a break must return the same structure for every batch of one size"
            )
        for slot, leaf in zip(self._slots, leaves, strict=True):
            self._fill_one(slot, leaf)

    def _fill_one(self, slot: Tensor | None, leaf: Any) -> None:
        if slot is leaf:  # None, or the body handed back one of its own arguments
            return
        if slot is None or not isinstance(leaf, Tensor):
            raise GraphError(
                f"break {self._name} returned {_describe(leaf)}, but {_describe(slot)} when it was captured"
            )
        if slot.shape != leaf.shape or slot.dtype != leaf.dtype or slot.device.type != leaf.device.type:
            raise GraphError(
                f"break {self._name} returned {_describe(leaf)}, but {_describe(slot)} when it was captured; "
                "the output of a break has one shape per captured size: pad or slice it to the bucket"
            )
        if leaf.data_ptr() != slot.data_ptr() or leaf.stride() != slot.stride():
            slot.copy_(leaf)


def make_slots(spec: ResultSpec, passthrough: Callable[[Tensor], bool]) -> list[Tensor | None]:
    """One tensor per leaf, to be called while the next segment records: fresh memory lands in the graph pool.

    A leaf that ``passthrough`` accepts (the body returned its own argument) needs no slot: it stays where it is.
    """
    return [
        leaf if leaf is None or passthrough(leaf) else torch.empty_like(leaf, requires_grad=False)
        for leaf in spec.leaves
    ]


_SINGLE_LEAF = pytree.tree_structure(0)


def _describe(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"a tensor {tuple(leaf.shape)} {leaf.dtype} on {leaf.device}"
    return "None" if leaf is None else f"a {type(leaf).__name__}"

"""Handoff slots: where the tensors returned by an eager break wait for the next segment.

A captured segment reads fixed addresses, while an eager body returns tensors at whatever address its
allocator had free. So each returned tensor is copied into a slot: a tensor of the graph pool, allocated
inside the next segment's capture and given to the forward in place of the result. Its lifetime is the
forward's own reference, like any pool tensor, so sizes share slot memory. Invariant: every replay writes a
slot before the segment that reads it runs, and nothing else runs in the pool in between, which is why the
replay side may keep non-owning aliases only. A copy shares no memory with what the body saw: where the
forward writes into one that was a view of something else, ``SharedResults`` refuses. Read ``breakable.py``
next.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        """Refuses anything but tensors of ``device`` and ``None``: numbers would be frozen."""
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
    """Writes a break's results into its slots at every replay. ``slots[i]`` belongs to leaf ``i`` of the
    result.
    """

    def __init__(
        self,
        *,
        name: str,
        structure: pytree.TreeSpec,
        slots: Sequence[Tensor | None],
        is_argument: Sequence[bool],
    ) -> None:
        """Per leaf: where it goes, and whether that is an argument of the body instead of a slot."""
        self._name = name
        self._structure = structure
        self._slots = tuple(zip(slots, is_argument, strict=True))
        self._is_single = structure == _SINGLE_LEAF

    def fill(self, result: Any) -> None:
        """Copy ``result`` in. Raises ``GraphError`` when it is not nested, shaped or typed as at capture."""
        if self._is_single and (result is None or isinstance(result, Tensor)):
            self._fill_one(*self._slots[0], result)
            return
        leaves, structure = pytree.tree_flatten(result)
        if structure != self._structure:
            raise GraphError(
                f"break {self._name} returned {structure}, but {self._structure} when it was captured; "
                "a break must return the same structure for every batch of one size"
            )
        for (slot, is_argument), leaf in zip(self._slots, leaves, strict=True):
            self._fill_one(slot, is_argument, leaf)

    def _fill_one(self, slot: Tensor | None, is_argument: bool, leaf: Any) -> None:
        if slot is leaf:
            return
        if is_argument:
            raise GraphError(
                f"break {self._name} returned {_describe(leaf)}, "
                "but one of its own arguments when it was captured"
            )
        if slot is None or not isinstance(leaf, Tensor):
            raise GraphError(
                f"break {self._name} returned {_describe(leaf)}, but {_describe(slot)} when it was captured"
            )
        if slot.shape != leaf.shape or slot.dtype != leaf.dtype or slot.device.type != leaf.device.type:
            raise GraphError(
                f"break {self._name} returned {_describe(leaf)}, but {_describe(slot)} when it was captured; "
                "the output of a break has one shape per captured size: pad or slice it to the bucket"
            )
        slot.copy_(leaf)


def make_slot(leaf: Tensor) -> Tensor:
    """To be called while the next segment records, so that the memory comes from the graph pool."""
    return torch.empty_like(leaf, requires_grad=False)


class SharedResults:
    """Results of one break that share memory with an argument of its body or with each other.

    The forward gets copies, which is right as long as it only reads them. Made before the next segment
    begins, then told the slots, then asked at the end of the capture.
    """

    def __init__(self, name: str, leaves: Sequence[Tensor | None], arguments: Sequence[Tensor]) -> None:
        self._name = name
        self._others: dict[int, str] = {}
        """Index of a result: what it shares memory with."""
        self._counters: list[tuple[int, Tensor, int]] = []
        known = [("an argument", tensor) for tensor in arguments]
        known += [("another result", leaf) for leaf in leaves if leaf is not None]
        positions = [*[-1] * len(arguments), *(i for i, leaf in enumerate(leaves) if leaf is not None)]
        for index, leaf in enumerate(leaves):
            for (what, other), position in zip(known, positions, strict=True):
                if leaf is not None and position != index and _overlap(leaf, other):
                    self._others[index] = what
                    break

    def watch(self, slots: Sequence[Tensor | None]) -> None:
        """``slots`` as the forward gets them. Keeps their counts of in-place writes and no memory."""
        for index in self._others:
            slot = slots[index]
            assert slot is not None
            counter = slot.detach()
            counter.set_()  # type: ignore[call-overload]
            self._counters.append((index, counter, counter._version))

    def check(self) -> None:
        """Raise ``GraphError`` for a copy that was written in place."""
        for index, counter, version in self._counters:
            if counter._version != version:
                raise GraphError(
                    f"result {index} of break {self._name} shares memory with {self._others[index]} and is "
                    "written in place behind the break: a graph writes into a copy, and the other would not "
                    "see it. Return a clone, or replace the in-place op"
                )


_MAX_COMPARED = 1 << 20
"""Elements up to which an overlap is decided exactly; larger tensors of one storage count as sharing."""


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have an element in common; the parts of a split do not."""
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or not a.numel() or not b.numel():
        return False
    if a.dtype != b.dtype or max(a.numel(), b.numel()) > _MAX_COMPARED:
        return True
    return bool(torch.isin(_places(a), _places(b)).any())


def _places(tensor: Tensor) -> Tensor:
    """Where in its storage a tensor's elements lie."""
    places = torch.tensor([int(tensor.storage_offset())])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places[:, None] + torch.arange(size) * stride).flatten()
    return places


_SINGLE_LEAF = pytree.tree_structure(0)


def _describe(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"a tensor {tuple(leaf.shape)} {leaf.dtype} on {leaf.device}"
    return "None" if leaf is None else f"a {type(leaf).__name__}"

"""CallTemplate: what the calls of a graphed callable must look like, learned from one example.

The graph would silently go on using whatever it saw, so each call is compared with the example before
anything is staged: inputs must have the declared rank, type and fixed dimensions and agree on every size; a
frozen tensor must be the same memory, a frozen value must be equal. A call that differs is refused with the
argument's name. Read ``arguments.py`` first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gapless.errors import ConfigError, GraphError
from gapless.graphs.arguments import Arguments, Input
from gapless.graphs.frozen import FrozenTensor, FrozenValue
from gapless.graphs.input_field import InputField, parse_dim


class Call(NamedTuple):
    """One call, read: the declared tensors by leaf name, and the size of every symbol."""

    values: dict[str, Tensor]
    sizes: dict[str, int]


@dataclass(frozen=True, slots=True)
class _DynamicLeaf:
    index: int
    name: str
    field: InputField
    shape: tuple[int, ...]
    dynamic: tuple[tuple[int, int, str, int], ...]
    """Dimension, factor, symbol, addend."""
    fixed: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTemplate:
    """What a call must look like: learned from the example that the graphs are captured with."""

    arguments: Arguments
    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]
    """Of the example; inputs are None, so that the example's own tensors can go."""
    dynamic: tuple[_DynamicLeaf, ...]
    frozen_tensors: tuple[FrozenTensor, ...]
    frozen_values: tuple[FrozenValue, ...]
    device: torch.device
    paths: tuple[str, ...]
    is_flat: bool
    """No argument is a container."""

    @classmethod
    def of(cls, arguments: Arguments, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallTemplate:
        """Raises ``ConfigError`` for a declaration that no leaf of the example fits."""
        leaves, structure = arguments.flatten(args, kwargs)
        paths = arguments.paths(args, kwargs)
        dynamic: list[_DynamicLeaf] = []
        tensors: list[FrozenTensor] = []
        values: list[FrozenValue] = []
        for index, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
            declared = arguments.declared(path)
            if declared is not None and isinstance(leaf, Tensor):
                dynamic.append(_dynamic_leaf(index, path, leaf, declared))
            elif isinstance(leaf, Tensor):
                tensors.append(FrozenTensor.of(index, path, leaf))
            else:
                values.append(FrozenValue(index, path, leaf))
        _check_declarations(arguments, paths, dynamic)
        inputs = {leaf.index for leaf in dynamic}
        devices = {leaves[leaf.index].device for leaf in dynamic}
        if len(devices) > 1:
            raise ConfigError(f"inputs lie on several devices: {', '.join(sorted(map(str, devices)))}")
        return cls(
            arguments=arguments,
            structure=structure,
            leaves=tuple(None if index in inputs else leaf for index, leaf in enumerate(leaves)),
            dynamic=tuple(dynamic),
            frozen_tensors=tuple(tensors),
            frozen_values=tuple(values),
            device=devices.pop(),
            paths=tuple(paths),
            is_flat=len(leaves) == len(arguments.names) and all("[" not in path for path in paths),
        )

    @property
    def lacks_tensors(self) -> bool:
        """True after ``without_tensors``, if there are frozen tensor arguments."""
        return any(frozen.tensor is None for frozen in self.frozen_tensors)

    @property
    def fields(self) -> tuple[InputField, ...]:
        return tuple(leaf.field for leaf in self.dynamic)

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Check a call against the example and read it. Raises ``GraphError`` naming the argument."""
        leaves = self.arguments.flat_leaves(args, kwargs) if self.is_flat else None
        if leaves is None:
            leaves, structure = self.arguments.flatten(args, kwargs)
            if structure != self.structure:
                raise GraphError(self._structure_message(args, kwargs))
        for frozen in self.frozen_tensors:
            leaf = leaves[frozen.index]
            if leaf is not frozen.tensor or not frozen.is_as_it_was():
                frozen.check(leaf)
        for value in self.frozen_values:
            value.check(leaves[value.index])
        values: dict[str, Tensor] = {}
        sizes: dict[str, int] = {}
        for declared in self.dynamic:
            tensor = leaves[declared.index]
            _read_sizes(declared, tensor, sizes, self.device)
            values[declared.name] = tensor
        return Call(values, sizes)

    def sizes_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, int]:
        """The sizes of a call that is not checked otherwise: it runs eagerly."""
        leaves, _ = self.arguments.flatten(args, kwargs)
        sizes: dict[str, int] = {}
        for declared in self.dynamic:
            tensor = leaves[declared.index] if declared.index < len(leaves) else None
            for dim, factor, symbol, addend in declared.dynamic:
                if isinstance(tensor, Tensor) and dim < tensor.ndim:
                    sizes.setdefault(symbol, (tensor.shape[dim] - addend) // factor)
        return sizes

    def without_tensors(self) -> CallTemplate:
        """The same without owning any tensor; such a template reads no call and makes none."""
        tensors = tuple(replace(frozen, tensor=None) for frozen in self.frozen_tensors)
        given_up = {frozen.index for frozen in tensors}
        leaves = tuple(None if index in given_up else leaf for index, leaf in enumerate(self.leaves))
        return replace(self, frozen_tensors=tensors, leaves=leaves)

    def fill(self, values: Mapping[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``args`` and ``kwargs`` of a call with these inputs and everything else as in the example."""
        leaves = list(self.leaves)
        for declared in self.dynamic:
            leaves[declared.index] = values[declared.name]
        return self.arguments.unflatten(leaves, self.structure)

    def replaced(self, changes: Mapping[str, Any]) -> CallTemplate:
        """The template of a call in which frozen leaves have other values, by leaf name."""
        known = {leaf.name: leaf.index for leaf in self.frozen_tensors}
        known |= {leaf.name: leaf.index for leaf in self.frozen_values}
        leaves = list(self.leaves)
        for name, value in changes.items():
            if name not in known:
                raise ConfigError(f"{name!r} is no frozen argument; these are: {', '.join(known) or 'none'}")
            leaves[known[name]] = value
        return replace(self, leaves=tuple(leaves))

    def _structure_message(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        now, before = set(self.arguments.paths(args, kwargs)), set(self.paths)
        differing = ", ".join(sorted(now ^ before)) or "a container's type"
        return (
            f"the arguments are nested differently than when the graphs were captured: {differing}. "
            "Call it with the same structure, or recapture() with this one"
        )


def _dynamic_leaf(index: int, path: str, leaf: Tensor, declared: Input) -> _DynamicLeaf:
    if leaf.layout is not torch.strided:
        raise ConfigError(f"input {path!r} is a {leaf.layout} tensor; graphs need dense ones")
    beyond = [dim for dim in declared.dims if dim >= leaf.ndim]
    if beyond:
        raise ConfigError(f"input {path!r} has {leaf.ndim} dimensions; dims declares dimension {beyond[0]}")
    dims = tuple(declared.dims.get(dim, size) for dim, size in enumerate(leaf.shape))
    return _DynamicLeaf(
        index=index,
        name=path,
        field=InputField(
            name=path,
            dims=dims,
            dtype=leaf.dtype,
            pad=declared.pad,
            poison=_poison_values(declared, leaf.dtype),
            on_device=True,
        ),
        shape=tuple(leaf.shape),
        dynamic=tuple((dim, *parse_dim(text)) for dim, text in declared.dims.items()),
        fixed=tuple(dim for dim in range(leaf.ndim) if dim not in declared.dims),
    )


def _poison_values(declared: Input, dtype: torch.dtype) -> tuple[int | float, ...] | None:
    if declared.poison == "auto":
        if declared.pad == "last" or not dtype.is_floating_point:
            return None
        limits = torch.finfo(dtype)
        return (float("nan"), limits.max, limits.min)
    if declared.poison is None or isinstance(declared.poison, tuple):
        return declared.poison
    assert not isinstance(declared.poison, str)
    return (declared.poison,)


def _check_declarations(arguments: Arguments, paths: list[str], dynamic: list[_DynamicLeaf]) -> None:
    found = {arguments.declared_name(leaf.name) for leaf in dynamic}
    for name in arguments.inputs:
        if name not in found:
            raise ConfigError(
                f"inputs names {name!r}, but the call has no tensor there; its leaves are {', '.join(paths)}"
            )


def _read_sizes(declared: _DynamicLeaf, tensor: Any, sizes: dict[str, int], device: torch.device) -> None:
    name, want = declared.name, declared.field
    if not isinstance(tensor, Tensor):
        raise GraphError(f"input {name!r} is a {type(tensor).__name__}; it was a tensor at capture")
    if tensor.dtype != want.dtype or tensor.device != device:
        raise GraphError(
            f"input {name!r} is {tensor.dtype} on {tensor.device}; captured were {want.dtype} on {device}"
        )
    if tensor.layout is not torch.strided:
        raise GraphError(f"input {name!r} is a {tensor.layout} tensor; graphs need dense ones")
    shape = tensor.shape
    if len(shape) != len(declared.shape):
        raise GraphError(
            f"input {name!r} has {len(shape)} dimensions; it had {len(declared.shape)} at capture"
        )
    for dim in declared.fixed:
        if shape[dim] != declared.shape[dim]:
            raise GraphError(
                f"input {name!r} has shape {tuple(shape)}: dimension {dim} was {declared.shape[dim]} at "
                "capture and is not declared dynamic"
            )
    for dim, factor, symbol, addend in declared.dynamic:
        size, rest = divmod(shape[dim] - addend, factor)
        if rest or size < 0:
            raise GraphError(
                f"input {name!r}: dimension {dim} is {shape[dim]}, which is not {want.dims[dim]}"
            )
        if sizes.setdefault(symbol, size) != size:
            raise GraphError(
                f"input {name!r}: dimension {dim} says {symbol}={size}, another input says {sizes[symbol]}"
            )

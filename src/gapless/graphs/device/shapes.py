"""What an op would return, without computing it: sizes, strides and dtypes from PyTorch's fake kernels.

Recording asks for every op; a forward repeats the same few calls in each layer, so answers are cached by the
arguments' metadata. Invariant: an answer never depends on data, and an op for which no answer exists is an
error, not a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes


class TensorSpec(NamedTuple):
    """Metadata of one tensor an op returns."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class ResultSpec(NamedTuple):
    """Metadata of one tensor that a recorded call returns, and the memory it lies in."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    argument: int | None
    """Index of the argument it is a view of; None for memory of its own."""
    storage: int
    """Results with the same number share memory."""
    num_bytes: int
    """Of that memory."""


class ShapeInference:
    """Answers ``infer`` and remembers. One per device."""

    def __init__(self) -> None:
        self._fake_mode: FakeTensorMode | None = None
        self._cache: dict[Any, Any] = {}

    def infer(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op's result with a ``TensorSpec`` in place of each tensor. Raises as the fake kernel does."""
        key = (op, torch.get_default_dtype(), _freeze(args), _freeze(kwargs))
        try:
            found = self._cache.get(key, _MISSING)
        except TypeError:  # an unhashable argument, such as a generator of some devices
            return self._run_fake(op, args, kwargs)
        if found is _MISSING:
            found = self._cache[key] = self._run_fake(op, args, kwargs)
        return found

    def infer_call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The same for any function of tensors: a ``ResultSpec`` in place of each tensor it returns."""
        key = (fn, torch.get_default_dtype(), _freeze(args))
        found = self._cache.get(key, _MISSING)
        if found is _MISSING:
            found = self._cache[key] = self._call_fake(fn, args)
        return found

    def _call_fake(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with _disable_current_modes(), torch.no_grad():
            if self._fake_mode is None:
                self._fake_mode = FakeTensorMode()
            with self._fake_mode:
                fake_args = map_tensors(_make_fake, args)
                result = fn(*fake_args)
        storages: dict[int, int | None] = {}
        for i, arg in enumerate(fake_args):
            if isinstance(arg, Tensor):
                storages.setdefault(arg.untyped_storage()._cdata, i)

        def spec(tensor: Tensor) -> ResultSpec:
            storage = tensor.untyped_storage()
            size, stride, dtype = _spec(tensor)
            argument = storages.get(storage._cdata)
            return ResultSpec(
                size, stride, int(tensor.storage_offset()), dtype, argument, storage._cdata, storage.nbytes()
            )

        return map_tensors(spec, result)

    def _run_fake(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _disable_current_modes(), torch.no_grad():
            if self._fake_mode is None:
                self._fake_mode = FakeTensorMode()
            with self._fake_mode:
                fake_args = map_tensors(_make_fake, args)
                fake_kwargs = map_tensors(_make_fake, kwargs)
                before = [(t, t.shape) for t in tensors_of(fake_args, fake_kwargs)]
                result = op(*fake_args, **fake_kwargs)
        for tensor, shape in before:
            if tensor.shape != shape:
                raise ValueError(
                    f"{op} would resize an output tensor from {tuple(shape)} to {tuple(tensor.shape)}; "
                    "give it the right shape before the capture"
                )
        return map_tensors(_spec, result)


def map_tensors(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with ``fn`` applied to each tensor in (nested) lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, tuple | list):
        return type(value)([map_tensors(fn, item) for item in value])
    if isinstance(value, dict):
        return {name: map_tensors(fn, item) for name, item in value.items()}
    return value


def leaves_of(value: Any) -> list[Any]:
    """What nested tuples and lists hold, in order; a spec is one leaf."""
    if isinstance(value, tuple | list) and not isinstance(value, ResultSpec):
        return [leaf for item in value for leaf in leaves_of(item)]
    return [value]


def nest_like(value: Any, leaves: list[Any]) -> Any:
    """``leaves`` nested as ``value`` is. Takes them out of the list."""
    if isinstance(value, tuple | list) and not isinstance(value, ResultSpec):
        return type(value)([nest_like(item, leaves) for item in value])
    return leaves.pop(0)


def tensors_of(*values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        map_tensors(found.append, value)
    return found


_MISSING = object()


def _make_fake(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _spec(tensor: Tensor) -> TensorSpec:
    if tensor.layout is not torch.strided:
        raise ValueError(f"it returns a {tensor.layout} tensor, which has no fixed address")
    return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _freeze(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (Tensor, tuple(value.shape), value.stride(), value.dtype, value.device)
    if isinstance(value, tuple | list):
        return (list, *[_freeze(item) for item in value])
    if isinstance(value, dict):
        return (dict, *[(name, _freeze(item)) for name, item in value.items()])
    if isinstance(value, float) and value != value:
        return (float, "nan")  # which equals nothing, itself included: it would be a new key each time
    return (type(value), value)  # the type, because 1 == 1.0 == True

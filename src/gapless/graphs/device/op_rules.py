"""What the emulated device does with each op while it records, and which ops it refuses.

A captured CUDA graph cannot wait for the device, so whatever brings device data to Python has no place in it:
scalars, boolean indexing, outputs whose size depends on the data. On a CPU all of these would quietly work,
hence the rules here. Invariant: a rule depends on the op and on its arguments' types and shapes, never on
their values. ``recorder.py`` applies the rules.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


class OpKind(enum.Enum):
    VIEW = enum.auto()
    """Metadata only: runs for real and is no node."""
    ALLOCATION = enum.auto()
    """Memory without contents: a block of the pool, no node."""
    MUTATION = enum.auto()
    """Writes into its arguments: recorded, not run."""
    FUNCTIONAL = enum.auto()
    """Makes new tensors: outputs are allocated, recorded, not run."""
    COMPOSITE = enum.auto()
    """Only defined through other ops: decomposed."""
    HOST_READ = enum.auto()
    """Needs device data in Python: refused."""


@functools.cache
def op_kind(op: torch._ops.OpOverload) -> OpKind:
    if op in _ALLOCATIONS:
        return OpKind.ALLOCATION
    if torch.Tag.data_dependent_output in op.tags or op in _READS_FOR_ERRORS:
        return OpKind.HOST_READ
    if (
        torch.Tag.dynamic_output_shape in op.tags
        and op not in _MASK_POSITIONS
        and op not in _SIZE_CAN_BE_GIVEN
    ):
        return OpKind.HOST_READ
    if _is_composite(op):
        return OpKind.COMPOSITE
    if torch.Tag.inplace_view in op.tags or op is _aten._unsafe_view.default:
        return OpKind.VIEW
    if op._schema.is_mutable:
        return OpKind.MUTATION
    if any(arg.alias_info is not None for arg in op._schema.arguments):
        return OpKind.VIEW
    return OpKind.FUNCTIONAL


def reads_host_data(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why this call must not be recorded although its kind is fine; None if it may."""
    position = _MASK_POSITIONS.get(op)
    if position is not None:
        masks = [i for i in args[position] if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)]
        if masks and not _is_masked_fill(op, args, masks):
            return "a boolean index has to count its true values on the host; use torch.where or masked_fill"
    if op in _SIZE_CAN_BE_GIVEN and kwargs.get("output_size") is None:
        return "the size of its output depends on device data; pass output_size"
    return None


def host_read_functions() -> dict[Callable[..., Any], str]:
    """Python-level functions that read data past the dispatcher, with the name to blame."""
    return _HOST_READ_FUNCTIONS


def one_hot(index: Tensor, num_classes: int) -> Tensor:
    """``one_hot`` with a given class count: the CPU kernel reads the data to check it, a CUDA kernel does
    not.
    """
    out = torch.zeros((*index.shape, num_classes), dtype=index.dtype, device=index.device)
    return out.scatter_(-1, index.unsqueeze(-1), 1)


_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.empty_permuted.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}

_READS_FOR_ERRORS = {_aten._linalg_check_errors.default}
"""What raises for a matrix that is singular has to look at it; the ``_ex`` functions do not."""

_MASK_POSITIONS = {
    _aten.index.Tensor: 1,
    _aten._unsafe_index.Tensor: 1,
    _aten.index_put.default: 1,
    _aten.index_put_.default: 1,
    _aten._unsafe_index_put.default: 1,
    _aten._index_put_impl_.default: 1,
}

_SIZE_CAN_BE_GIVEN = {_aten.repeat_interleave.Tensor}

_HOST_READ_FUNCTIONS: dict[Callable[..., Any], str] = {
    getattr(torch.Tensor, name): f"Tensor.{name}"
    for name in (
        "tolist",
        "numpy",
        "__array__",
        "__repr__",
        "item",
        "cpu",
        "__bool__",
        "__int__",
        "__float__",
        "__complex__",
        "__index__",
    )
}


def _is_composite(op: torch._ops.OpOverload) -> bool:
    keys = torch._C.DispatchKey
    return op.has_kernel_for_dispatch_key(
        keys.CompositeImplicitAutograd
    ) and not op.has_kernel_for_dispatch_key(keys.CPU)


def _is_masked_fill(op: torch._ops.OpOverload, args: tuple[Any, ...], masks: list[Tensor]) -> bool:
    """``x[mask] = scalar`` is executed as ``masked_fill`` on every device, without counting."""
    writes = op is not _aten.index.Tensor and op is not _aten._unsafe_index.Tensor
    if not writes or len(masks) != 1:
        return False
    given = [i for i in args[1] if i is not None]
    accumulate = len(args) > 3 and bool(args[3])
    return len(given) == 1 and args[2].numel() == 1 and not accumulate

"""Matrix products on a CPU over weights that oneDNN has brought into its own memory layout once, at load.

Why: a step of a few rows is bound by reading weights, and the default library re-packs them for every
product. Measured on one core (float32, all products of SmolLM2-135M, milliseconds of 1 / 4 / 8 / 64 / 256
rows): ``F.linear`` 57 / 86 / 93 / 279 / 922, packed 43 / 43 / 50 / 188 / 693. And the default library's last
bits depend on the address of the input, which would make a graph differ from the eager run it must equal;
these do not.

The packed form has no address of its own, so it cannot be an argument of a recorded operation. The op takes a
*handle*, a number that graphs may freeze: a ``PackedWeight`` owns its entry in the table for as long as it
lives. ``layers.MergedLinear.pack`` decides when to use it.
"""

from __future__ import annotations

import functools
import itertools
import platform
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.graphs.ops import register_custom_op

_LAYOUT_ROWS = 8
"""The row count oneDNN chooses the layout for; from 4 on the choice is the same for all."""
_MANY_ROWS = 4
"""With fewer rows oneDNN takes another kernel."""

_table: dict[int, tuple[Any, Tensor | None]] = {}
_handles = itertools.count()


class PackedWeight:
    """A packed ``[O, I]`` matrix with an optional bias, called like ``F.linear``."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._handle, self._out_features = next(_handles), weight.shape[0]
        _table[self._handle] = (_reorder(weight), bias)
        weakref.finalize(self, _table.pop, self._handle, None)

    def __call__(self, hidden_TI: Tensor) -> Tensor:
        """``[T, I] -> [T, O]``."""
        return packed_linear(hidden_TI, self._handle, self._out_features)


def can_pack(weight: Tensor) -> bool:
    """True where this build of PyTorch packs such a matrix and multiplies by it correctly."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and _reorder_call() is not None


def _fake_packed_linear(hidden_TI: Tensor, handle: int, out_features: int) -> Tensor:
    return hidden_TI.new_empty(hidden_TI.shape[0], out_features)


@register_custom_op(fake=_fake_packed_linear, is_fresh=True)
def packed_linear(hidden_TI: Tensor, handle: int, out_features: int) -> Tensor:
    """``hidden @ weight.T + bias`` for the weight behind ``handle``."""
    packed, bias = _table[handle]
    num_rows = hidden_TI.shape[0]
    if num_rows >= _fewest_rows():
        return _multiply(hidden_TI, packed, bias)
    padded = hidden_TI.new_zeros(_MANY_ROWS, hidden_TI.shape[1])
    padded[:num_rows] = hidden_TI
    return _multiply(padded, packed, bias)[:num_rows]


@functools.cache
def _fewest_rows() -> int:
    """The fewest rows that are multiplied as they are; a few are padded to ``_MANY_ROWS`` where that is
    faster: on an EPYC (35 against 43 ms for all products of SmolLM2-135M, one row), and not on a Xeon of
    Intel's (``docs/log.md``)."""
    return 1 if _is_intel() else _MANY_ROWS


def _is_intel() -> bool:
    name = "GenuineIntel"
    if name in platform.processor():  # on Windows
        return True
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as described:
            return name in described.read(1000)
    except OSError:
        return False


def _multiply(hidden_TI: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
    return _product()(hidden_TI, packed, bias, "none", [], "")


@functools.cache
def _product() -> Callable[..., Tensor]:
    """oneDNN's product, past the choice of an overload by the arguments, which is made at every call."""
    return torch.ops.mkldnn._linear_pointwise.default._op


def _reorder(weight: Tensor) -> Any:
    reorder = _reorder_call()
    assert reorder is not None  # callers ask can_pack first
    return reorder(weight)


@functools.cache
def _reorder_call() -> Callable[[Tensor], Any] | None:
    """The form of oneDNN's packing call that this PyTorch takes, tried out on a small product, or None."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    weight, hidden = torch.eye(24, 16) + 0.5, torch.arange(80.0).view(5, 16)
    for prepare in (lambda dense: dense, lambda dense: dense.to_mkldnn()):

        def reorder(dense: Tensor, prepare: Callable[[Tensor], Tensor] = prepare) -> Any:
            return torch.ops.mkldnn._reorder_linear_weight(prepare(dense), _LAYOUT_ROWS)

        try:
            product = _multiply(hidden, reorder(weight), None)
        except (RuntimeError, NotImplementedError):
            continue  # the call changed between versions of PyTorch
        if torch.allclose(product, F.linear(hidden, weight)):
            return reorder
    return None

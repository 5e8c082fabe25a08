"""The modules a decoder is made of: norms, merged linears and the table of weights a checkpoint fills.

Plain torch operations on parameters made at construction: nothing in a forward reads device data on the host
or rebinds an attribute, so every strategy may capture it. Parameters are allocated empty on their final
device and in their final dtype; loaders copy into them through ``WeightTarget`` and never replace them, so
captured addresses stay. ``T`` tokens, ``I`` input features, ``O`` output features, ``H`` heads, ``D`` head
size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gapless.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where parameters live."""

    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightTarget:
    """Where one tensor of a checkpoint goes: a view into a parameter, and the shape the file must have."""

    tensor: Tensor
    shape: tuple[int, ...]

    def load(self, name: str, value: Tensor, *, source: str) -> None:
        """Copy ``value`` in, converting dtype and device. Raises ``ModelError`` naming ``source`` and
        tensor."""
        if tuple(value.shape) != self.shape:
            raise ModelError(
                f"{source}: tensor '{name}' has shape {tuple(value.shape)}, the config asks for {self.shape}"
            )
        if not value.is_floating_point() or value.element_size() < 2:
            raise ModelError(
                f"{source}: tensor '{name}' has dtype {value.dtype}; only float32, float16 and bfloat16 can "
                f"be loaded"
            )
        with torch.no_grad():
            self.tensor.copy_(value)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, size: int, *, eps: float, placement: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _empty_parameter(size, placement=placement)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)

    def targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        yield f"{prefix}.weight", WeightTarget(tensor=self.weight, shape=tuple(self.weight.shape))


class HeadNorm(nn.Module):
    """Qwen3's norm of each query and key head, both in one pass: one row of weights per head of the merged
    tensor."""

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_size: int, eps: float, placement: Placement
    ) -> None:
        super().__init__()
        self.eps, self.num_heads, self.head_size = eps, num_heads, head_size
        self.weight_HD = _empty_parameter(num_heads + num_kv_heads, head_size, placement=placement)

    def forward(self, heads_THD: Tensor) -> Tensor:
        return F.rms_norm(heads_THD, (self.head_size,), None, self.eps) * self.weight_HD

    def targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        shape = (self.head_size,)
        yield f"{prefix}.q_norm.weight", WeightTarget(tensor=self.weight_HD[: self.num_heads], shape=shape)
        yield f"{prefix}.k_norm.weight", WeightTarget(tensor=self.weight_HD[self.num_heads :], shape=shape)


class MergedLinear(nn.Module):
    """One matrix product for several checkpoint matrices with the same input (q/k/v, gate/up), or for a
    single one.

    ``parts`` are (name, output features). On a CPU a matrix with more outputs than inputs is stored
    transposed: the vector products of decoding then run at twice the bandwidth (float32, 576 x 3072, one row:
    370 against 710 us, and never more than 20% slower up to 64 rows). The parameter's shape is ``[O, I]``
    either way.
    """

    def __init__(
        self, in_features: int, parts: tuple[tuple[str, int], ...], *, bias: bool, placement: Placement
    ) -> None:
        super().__init__()
        self.parts = parts
        out_features = sum(size for _, size in parts)
        self.weight = linear_weight(out_features, in_features, placement=placement)
        self.bias = _empty_parameter(out_features, placement=placement) if bias else None

    def forward(self, hidden_TI: Tensor) -> Tensor:
        return F.linear(hidden_TI, self.weight, self.bias)

    def targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        start = 0
        for name, size in self.parts:
            rows = self.weight[start : start + size]
            yield f"{prefix}.{name}.weight", WeightTarget(tensor=rows, shape=tuple(rows.shape))
            if self.bias is not None:
                bias = self.bias[start : start + size]
                yield f"{prefix}.{name}.bias", WeightTarget(tensor=bias, shape=tuple(bias.shape))
            start += size


def linear_weight(out_features: int, in_features: int, *, placement: Placement) -> nn.Parameter:
    """An empty ``[O, I]`` matrix in the memory layout that is fast for its shape and device."""
    if placement.device.type == "cpu" and out_features > in_features:
        stored_IO = torch.empty(in_features, out_features, dtype=placement.dtype, device=placement.device)
        return nn.Parameter(stored_IO.t(), requires_grad=False)
    return _empty_parameter(out_features, in_features, placement=placement)


def _empty_parameter(*shape: int, placement: Placement) -> nn.Parameter:
    return nn.Parameter(
        torch.empty(shape, dtype=placement.dtype, device=placement.device), requires_grad=False
    )

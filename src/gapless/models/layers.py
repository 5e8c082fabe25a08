"""The modules a decoder is made of: norms, merged linears and the table of weights a checkpoint fills.

Plain torch operations on parameters made at construction: nothing in a forward reads device data on the host
or rebinds an attribute, so every strategy may capture it. Parameters are allocated empty on their final
device and in their final dtype; loaders copy into them through ``WeightTarget`` and never replace them. Where
matrices are packed, that happens once, between loading and the first step, so captured addresses stay.
``T`` tokens, ``I`` input features, ``O`` output features, ``H`` heads, ``D`` head
size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gapless.errors import ModelError
from gapless.models.packed_linear import PackedWeight, can_pack
from gapless.parallel.shard import WHOLE, Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where parameters live, and which part of the model this process holds."""

    dtype: torch.dtype
    device: torch.device
    shard: Shard = WHOLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """``length`` rows, columns, … of a tensor from ``start`` on, in dimension ``dim``."""

    dim: int
    start: int
    length: int

    def indices(self) -> tuple[slice, ...]:
        """What to index a tensor (or a stored one) with."""
        return (*(slice(None),) * self.dim, slice(self.start, self.start + self.length))


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightTarget:
    """Where one tensor of a checkpoint goes: a view into a parameter, and the shape the file must have.

    ``part``: the slice of the checkpoint's tensor that this rank holds; None: all of it.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    part: Slice | None = None
    other: WeightTarget | None = None
    """Of the same parameter, for files by a writer who turns matrices round."""

    def of_shape(self, shape: Iterable[int]) -> WeightTarget:
        """The target for a stored tensor of ``shape``: this one, unless only the other fits."""
        shape = tuple(shape)
        return self.other if self.other is not None and shape == self.other.shape != self.shape else self

    def load(self, name: str, value: Tensor, *, source: str) -> None:
        """Copy this rank's part of the whole tensor ``value`` in, converting dtype and device. Raises
        ``ModelError`` naming source and tensor."""
        self.check_shape(name, value.shape, source=source)
        self.load_part(name, self.part_of(value), source=source)

    def part_of(self, value: Any) -> Tensor:
        """This rank's part of a whole tensor, or of one in a file that reads what it is indexed with."""
        return value if self.part is None else value[self.part.indices()]

    def load_part(self, name: str, part: Tensor, *, source: str) -> None:
        """Copy in what ``part_of`` gave. Raises ``ModelError`` for a dtype that cannot be loaded."""
        if not part.is_floating_point() or part.element_size() < 2:
            raise ModelError(
                f"{source}: tensor '{name}' has dtype {part.dtype}; only float32, float16 and bfloat16 can "
                f"be loaded"
            )
        with torch.no_grad():
            self.tensor.copy_(part)

    def check_shape(self, name: str, shape: Iterable[int], *, source: str) -> None:
        """Raises ``ModelError`` where the checkpoint's tensor has another shape than the config asks for."""
        if tuple(shape) != self.shape:
            raise ModelError(
                f"{source}: tensor '{name}' has shape {tuple(shape)}, the config asks for {self.shape}"
            )


class UnitRMS(nn.Module):
    """RMS norm without weights on a CPU, with the arithmetic of ``F.rms_norm``: ``x / sqrt(mean(x ** 2) +
    eps)``.

    Weights flush the caches between two norms, so that each kernel's code is fetched anew, which takes longer
    than running it: so these are fewer and simpler kernels (``docs/log.md``, "One request on a CPU of
    Intel's"). Both numbers are tensors, because ``addcdiv``, which divides and adds at once, takes no others.
    """

    eps_1: Tensor
    size_1: Tensor

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.register_buffer("eps_1", torch.tensor([eps], dtype=torch.float32), persistent=False)
        self.register_buffer("size_1", torch.tensor([size], dtype=torch.float32), persistent=False)

    @staticmethod
    def fits(placement: Placement) -> bool:
        """Other devices have a kernel for the whole norm; narrower types are summed in float32 there."""
        return placement.device.type == "cpu" and placement.dtype == torch.float32

    def forward(self, hidden: Tensor) -> Tensor:
        squares = (hidden * hidden).sum(dim=-1, keepdim=True)
        return hidden * torch.addcdiv(self.eps_1, squares, self.size_1).rsqrt()


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, size: int, *, eps: float, placement: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size, placement=placement)
        self.unit_rms = UnitRMS(size, eps=eps) if UnitRMS.fits(placement) else None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.unit_rms is not None:
            return self.unit_rms(hidden) * self.weight
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)

    def targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        yield f"{prefix}.weight", WeightTarget(tensor=self.weight, shape=tuple(self.weight.shape))


class HeadNorm(nn.Module):
    """Qwen3's norm of each query and key head, both in one pass: a row of weights for every head."""

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_size: int, eps: float, placement: Placement
    ) -> None:
        super().__init__()
        self.eps, self.num_heads, self.head_size = eps, num_heads, head_size
        self.weight_HD = empty_parameter(num_heads + num_kv_heads, head_size, placement=placement)
        self.unit_rms = UnitRMS(head_size, eps=eps) if UnitRMS.fits(placement) else None

    def forward(self, heads_THD: Tensor) -> Tensor:
        if self.unit_rms is not None:
            return self.unit_rms(heads_THD) * self.weight_HD
        return F.rms_norm(heads_THD, (self.head_size,), None, self.eps) * self.weight_HD

    def targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        shape = (self.head_size,)
        yield f"{prefix}.q_norm.weight", WeightTarget(tensor=self.weight_HD[: self.num_heads], shape=shape)
        yield f"{prefix}.k_norm.weight", WeightTarget(tensor=self.weight_HD[self.num_heads :], shape=shape)


class Linear(nn.Module):
    """``hidden @ weight.T + bias``, over packed weights where that is faster (see ``packed_linear.py``)."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = weight
        self.bias = bias
        self.packed: PackedWeight | None = None

    def forward(self, hidden_TI: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed(hidden_TI)
        assert self.weight is not None
        return F.linear(hidden_TI, self.weight, self.bias)

    def pack(self) -> None:
        """Once, when the weights have been loaded: change to packed weights where this device has them and
        let go of the plain ones, whose memory is then free unless another module shares them."""
        if self.weight is not None and can_pack(self.weight):
            self.packed = PackedWeight(self.weight, self.bias)
            self.weight = None


class MergedLinear(Linear):
    """One matrix product for several checkpoint matrices with the same input (q/k/v, gate/up), or for one.

    ``parts`` are (name, output features), in the order in which they lie in the output.
    """

    def __init__(
        self, in_features: int, parts: tuple[tuple[str, int], ...], *, bias: bool, placement: Placement
    ) -> None:
        out_features = sum(size for _, size in parts)
        super().__init__(
            empty_parameter(out_features, in_features, placement=placement),
            empty_parameter(out_features, placement=placement) if bias else None,
        )
        self.parts = parts

    def targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        assert self.weight is not None, "the weights are packed already"
        start = 0
        for name, size in self.parts:
            rows = self.weight[start : start + size]
            yield f"{prefix}.{name}.weight", WeightTarget(tensor=rows, shape=tuple(rows.shape))
            if self.bias is not None:
                bias = self.bias[start : start + size]
                yield f"{prefix}.{name}.bias", WeightTarget(tensor=bias, shape=tuple(bias.shape))
            start += size


def empty_parameter(*shape: int, placement: Placement) -> nn.Parameter:
    """A parameter with undefined values, which a loader fills."""
    return nn.Parameter(
        torch.empty(shape, dtype=placement.dtype, device=placement.device), requires_grad=False
    )

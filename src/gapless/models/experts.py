"""The weights of a layer's experts: stacked parameters, and where checkpoints keep them.

All experts of a layer lie in two tensors, ``[N, 2F, E]`` (gate before up) and ``[N, E, F]``, whatever a file
holds: a matrix per expert and projection (the usual form), or the same two stacks (``experts.gate_up_proj``,
what Transformers 5 has in memory). Which of the two a file has is read off its names. Of an intermediate
size that ranks share, a rank holds its slice of gate, of up and of the columns of down; where that does not
divide, or makes rows of a length that ``grouped_mm`` does not take, zeros stand behind the last real ones,
which change no result. ``N`` experts, ``E`` hidden size, ``F`` intermediate size of this rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gapless.models.grouped_experts import ROW_ALIGNMENT
from gapless.models.layers import Placement, Slice, WeightTarget, empty_parameter
from gapless.models.moe_config import ExpertConfig


class ExpertWeights(nn.Module):
    """Both stacks, with undefined values that a loader fills."""

    def __init__(self, config: ExpertConfig, *, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self._config, self._shard, self._hidden_size = config, placement.shard, hidden_size
        self.size = _padded_size(config.intermediate_size, placement)
        """F: of this rank."""
        num_experts = config.num_experts
        self.gate_up_NOE = empty_parameter(num_experts, 2 * self.size, hidden_size, placement=placement)
        self.down_NEF = empty_parameter(num_experts, hidden_size, self.size, placement=placement)
        if self._span != self.size:
            with torch.no_grad():  # behind the last real rows and columns
                self.gate_up_NOE.zero_()
                self.down_NEF.zero_()

    def targets(self, prefix: str, stored: Collection[str]) -> Iterator[tuple[str, WeightTarget]]:
        """``prefix`` is the block's. A file that holds none of the names gets the stacked ones."""
        each = (f"{prefix}.experts.{index}." for index in range(self._config.num_experts))
        gate = f"{self._config.names.gate}.weight"
        if any(expert + gate in stored for expert in each):  # the first may be missing, and be told so
            yield from self._targets_of_each(f"{prefix}.experts")
        else:
            yield from self._stacked_targets(f"{prefix}.experts")

    def _targets_of_each(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        names, full, span = self._config.names, self._config.intermediate_size, self._span
        rows, columns = self._part(0), self._part(1)
        tall, wide = (full, self._hidden_size), (self._hidden_size, full)
        for index in range(self._config.num_experts):
            gate_up_OE, down_EF = self.gate_up_NOE[index], self.down_NEF[index]
            gate, up = gate_up_OE[:span], gate_up_OE[self.size : self.size + span]
            expert = f"{prefix}.{index}"
            yield f"{expert}.{names.gate}.weight", WeightTarget(tensor=gate, shape=tall, part=rows)
            yield f"{expert}.{names.up}.weight", WeightTarget(tensor=up, shape=tall, part=rows)
            down = WeightTarget(tensor=down_EF[:, :span], shape=wide, part=columns)
            yield f"{expert}.{names.down}.weight", down

    def _stacked_targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        """Of the form that published files have and, where that is the transposed one, of Transformers' own:
        it reads both and writes the latter."""
        gate_up, down = self._gate_up_target(other=None), self._down_target(other=None)
        if self._config.names.is_transposed:
            gate_up = self._gate_up_target(is_transposed=True, other=gate_up)
            down = self._down_target(is_transposed=True, other=down)
        yield f"{prefix}.gate_up_proj", gate_up
        yield f"{prefix}.down_proj", down

    def _down_target(self, *, is_transposed: bool = False, other: WeightTarget | None) -> WeightTarget:
        num_experts, hidden, full = self._sizes
        down_NEF = self.down_NEF[:, :, : self._span]
        if not is_transposed:
            shape = (num_experts, hidden, full)
            return WeightTarget(tensor=down_NEF, shape=shape, part=self._part(2), other=other)
        shape, tensor = (num_experts, full, hidden), down_NEF.transpose(1, 2)
        return WeightTarget(tensor=tensor, shape=shape, part=self._part(1), other=other)

    def _gate_up_target(self, *, is_transposed: bool = False, other: WeightTarget | None) -> WeightTarget:
        num_experts, hidden, full = self._sizes
        dim = 2 if is_transposed else 1
        shape = (num_experts, hidden, 2 * full) if is_transposed else (num_experts, 2 * full, hidden)
        halves_N2FE = self.gate_up_NOE.unflatten(1, (2, self.size))[:, :, : self._span]
        if self._shard.is_whole:
            whole = halves_N2FE.flatten(1, 2)
            tensor = whole.transpose(1, 2) if is_transposed else whole
            return WeightTarget(tensor=tensor, shape=shape, other=other)
        tensor = halves_N2FE.permute(0, 3, 1, 2) if is_transposed else halves_N2FE
        return GateUpTarget(tensor=tensor, shape=shape, part=self._part(dim), other=other)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self._config.num_experts, self._hidden_size, self._config.intermediate_size

    @property
    def _span(self) -> int:
        """Real rows of this rank's gate."""
        return self._shard.split_padded(self._config.intermediate_size).length

    def _part(self, dim: int) -> Slice | None:
        if self._shard.is_whole:
            return None
        span = self._shard.split_padded(self._config.intermediate_size)
        return Slice(dim=dim, start=span.start, length=span.length)


def _padded_size(intermediate_size: int, placement: Placement) -> int:
    """Of a rank's slice. A whole model keeps the size that its config says."""
    if placement.shard.is_whole:
        return intermediate_size
    step = max(ROW_ALIGNMENT // placement.dtype.itemsize, 1)
    return -(-placement.shard.padded_length(intermediate_size) // step) * step


@dataclass(frozen=True, kw_only=True, slots=True)
class GateUpTarget(WeightTarget):
    """Gate and up in one tensor of the checkpoint, one behind the other in the dimension of ``part``: a rank
    takes the same slice of both, and they lie in two dimensions of ``tensor``."""

    def part_of(self, value: Any) -> Tensor:
        assert self.part is not None
        dim, half = self.part.dim, self.shape[self.part.dim] // 2
        starts = (self.part.start, half + self.part.start)
        return torch.stack(
            [value[Slice(dim=dim, start=s, length=self.part.length).indices()] for s in starts], dim=dim
        )

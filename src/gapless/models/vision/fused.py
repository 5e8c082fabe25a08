"""The blocks of a vision tower on fused kernels: what a tower's forward runs on a GPU.

Transformers' own modules stay the oracle and keep the parameters. What they do between two matrix products in
a dozen kernels of float32 (rotation of queries and keys, norms, the gated activation) is one kernel each
here, and a norm takes the residual addition before it along. The rotation reads a row of cosines and sines
per patch from the tower's workspace, so it is the decoder's kernel, and so is what fills that. Two
projections that read the same rows become one product: their weights are moved next to each other, and the
modules keep views. ``P`` patches, ``H`` hidden size, ``C`` columns of merged q/k/v heads, ``G`` heads of
queries and keys, ``D`` head size, ``F`` = D / 2, ``I`` columns of an MLP, with padding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gapless.attention.varlen import Segments, VarlenBackend
from gapless.graphs.ops import direct
from gapless.kernels import activation, layer_norm, mrope, norm, positions, rope_cache

fused_silu_mul = direct(activation.fused_silu_mul)
fused_rms_norm, fused_add_rms_norm = direct(norm.fused_rms_norm), direct(norm.fused_add_rms_norm)
rotate_heads = direct(rope_cache.rotate_heads)
fused_add_layer_norm = direct(layer_norm.fused_add_layer_norm)
fused_add_interpolated = direct(positions.add_interpolated)
write_axis_rows = direct(mrope.write_axis_rows)


_WIDTH_STEP = 64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockInputs:
    """What all blocks of a run share."""

    table_P2F: Tensor
    """Cosines and sines of every patch."""
    workspace_PHD: Tensor
    backend: VarlenBackend


class PatchAngles:
    """Fills the table: the first half of the frequencies turns with a patch's row, the second with its
    column."""

    def __init__(self, rotary: Any) -> None:
        """``rotary``: the module of Transformers that does the same."""
        frequencies: Tensor = rotary.inv_freq.float()
        axis = torch.zeros(len(frequencies), dtype=torch.int32, device=frequencies.device)
        self._frequencies_F = torch.cat([frequencies, frequencies])
        self._axes_F = torch.cat([axis, axis + 1])
        self._factor = float(rotary.attention_scaling)

    def write(self, positions_P2: Tensor, table_P2F: Tensor) -> None:
        write_axis_rows(positions_P2.t(), self._frequencies_F, self._axes_F, self._factor, table_P2F)


def merge_gated(module: nn.Module) -> None:
    """Put the two input projections of every gated MLP side by side in memory, biases too: once, before
    weights are filled in. For MLPs whose activation is SiLU; others stay as they are.

    A width that no tile of a matrix product fits (Qwen2.5-VL: 3420) is padded with rows and columns of zeros:
    they add nothing, and every row of the weights starts where it can be read 16 bytes at a time.
    """
    mlp: Any
    for mlp in module.modules():
        if not (hasattr(mlp, "gate_proj") and hasattr(mlp, "up_proj")):
            continue
        gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        width = gate.weight.shape[0]
        padded = padded_width(width)
        for name in ("weight", "bias"):
            parts = [getattr(projection, name) for projection in (gate, up)]
            merged = None
            if parts[0] is not None:
                merged = parts[0].data.new_zeros((2 * padded, *parts[0].shape[1:]))
                for start, part in zip((0, padded), parts, strict=True):
                    _move_into(part, merged[start : start + width])
            mlp.register_buffer(f"gate_up_{name}", merged, persistent=False)
        down_weight = down.weight.data
        if padded != width:
            down_weight = down_weight.new_zeros((down_weight.shape[0], padded))
            _move_into(down.weight, down_weight[:, :width])
        mlp.register_buffer("down_weight", down_weight, persistent=False)


def activate_in_products(blocks: Iterable[Any]) -> None:
    """Let the first product of every block's MLP apply the MLP's activation, the tanh form of GELU: a kernel
    less, and what the activation reads is not rounded before. cuBLASLt does it on CUDA; on a CPU the same
    operator takes the other form. Worth it, and as near as two steps, in half precision on Hopper GPUs."""
    for block in blocks:
        block.mlp.activates_in_product = True


def padded_width(width: int) -> int:
    """``width``, or the next multiple of 64 if it is none of 8: the elements of half precision in 16 bytes,
    without which products run on slow kernels."""
    return width if width % 8 == 0 else -(-width // _WIDTH_STEP) * _WIDTH_STEP


def _move_into(parameter: nn.Parameter, memory: Tensor) -> None:
    memory.copy_(parameter.data)
    parameter.data = memory


class FusedBlocks:
    """Runs a tower's blocks one behind the other. What a block adds to the residual stream waits for the norm
    of the next one, which adds it on its way.

    Nothing outlives its last use, for what lives when most does is the size of a graph's pool: with 8192
    patches queries, keys and values are 100 MiB, and the input of the MLP's activation as much again."""

    def __init__(self, hidden_PH: Tensor, inputs: BlockInputs) -> None:
        self._residual_PH, self._inputs = hidden_PH, inputs
        self._update_PH: Tensor | None = None

    def run(self, block: Any, segments: Segments) -> None:
        """``hidden = block(hidden)`` of a Qwen tower."""
        self._update_PH = self._attend(block.attn, self._normed(block.norm1), segments)
        self._update_PH = feed_forward(block.mlp, self._normed(block.norm2))

    def hidden(self) -> Tensor:
        """What the last block has put out: ``[P, H]``."""
        if self._update_PH is not None:
            self._residual_PH, self._update_PH = self._residual_PH + self._update_PH, None
        return self._residual_PH

    def _normed(self, norm: nn.Module) -> Tensor:
        """The residual stream's norm, after what waits has been added to it."""
        if self._update_PH is None:
            return _norm(norm, self._residual_PH)
        self._residual_PH, normed_PH = _add_and_norm(self._update_PH, self._residual_PH, norm)
        self._update_PH = None
        return normed_PH

    def _attend(self, attention: Any, normed_PH: Tensor, segments: Segments) -> Tensor:
        inputs, num_heads = self._inputs, attention.num_heads
        qkv_PC = linear(normed_PH, attention.qkv.weight, attention.qkv.bias)
        rotated_PGD = rotate_heads(qkv_PC, None, 0.0, inputs.table_P2F, None, num_heads)
        value_PHD = qkv_PC.unflatten(1, (-1, attention.head_dim))[:, 2 * num_heads :]
        inputs.backend.attend(
            rotated_PGD[:, :num_heads],
            rotated_PGD[:, num_heads:],
            value_PHD,
            inputs.workspace_PHD,
            inputs.backend.arguments(segments),
            scale=attention.scaling,
        )
        return linear(inputs.workspace_PHD.flatten(1), attention.proj.weight, attention.proj.bias)


def _norm(module: nn.Module, hidden_PH: Tensor) -> Tensor:
    if isinstance(module, nn.LayerNorm):
        return module(hidden_PH)
    return fused_rms_norm(hidden_PH, module.weight, module.variance_epsilon)


def _add_and_norm(update_PH: Tensor, residual_PH: Tensor, module: nn.Module) -> tuple[Tensor, Tensor]:
    if isinstance(module, nn.LayerNorm):
        return fused_add_layer_norm(update_PH, residual_PH, module.weight, module.bias, module.eps)
    return fused_add_rms_norm(update_PH, residual_PH, module.weight, module.variance_epsilon)


def feed_forward(mlp: Any, normed_PH: Tensor) -> Tensor:
    """``mlp(normed)``; on fused kernels where ``merge_gated`` or ``activate_in_products`` was at work."""
    if hasattr(mlp, "gate_up_weight"):
        gated_PI = fused_silu_mul(linear(normed_PH, mlp.gate_up_weight, mlp.gate_up_bias))
        return linear(gated_PI, mlp.down_weight, mlp.down_proj.bias)
    if hasattr(mlp, "activates_in_product"):
        first = mlp.linear_fc1
        active_PI = torch._addmm_activation(first.bias, normed_PH, first.weight.t(), use_gelu=True)
        return mlp.linear_fc2(active_PI)
    return mlp(normed_PH)

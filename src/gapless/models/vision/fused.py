"""The blocks of a vision tower on fused kernels: what a tower's forward runs on a GPU.

Transformers' own modules stay the oracle and keep the parameters. What they do between two matrix products in
a dozen kernels of float32 (rotation of queries and keys, RMS norms, the gated activation) is one kernel each
here. The rotation reads cosines and sines by row from the tower's workspace, so it is the decoder's kernel
with rows for positions. Two projections that read the same rows become one product: their weights are moved
next to each other, and the modules keep views. ``P`` patches, ``H`` hidden size, ``C`` columns of merged
q/k/v heads, ``G`` heads of queries and keys, ``D`` head size, ``F`` = D / 2, ``I`` columns of an MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gapless.attention.varlen import Segments, VarlenBackend
from gapless.graphs.ops import direct
from gapless.kernels import activation, norm, positions, rope_cache

fused_silu_mul = direct(activation.fused_silu_mul)
fused_rms_norm, fused_add_rms_norm = direct(norm.fused_rms_norm), direct(norm.fused_add_rms_norm)
rotate_heads = direct(rope_cache.rotate_heads)
fused_add_interpolated = direct(positions.add_interpolated)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockInputs:
    """What all blocks of a run share."""

    table_P2F: Tensor
    """Cosines and sines of every patch."""
    row_P: Tensor
    """0, 1, 2, ...: the table's rows."""
    workspace_PHD: Tensor
    backend: VarlenBackend


def merge_gated(module: nn.Module) -> None:
    """Put the two input projections of every gated MLP side by side in memory, biases too: once, before
    weights are filled in. For MLPs whose activation is SiLU; others stay as they are."""
    for mlp in module.modules():
        if not (hasattr(mlp, "gate_proj") and hasattr(mlp, "up_proj")):
            continue
        for name in ("weight", "bias"):
            parts = [getattr(projection, name) for projection in (mlp.gate_proj, mlp.up_proj)]
            merged = None
            if parts[0] is not None:
                merged = torch.cat([part.data for part in parts])
                half = len(merged) // 2
                parts[0].data, parts[1].data = merged[:half], merged[half:]
            mlp.register_buffer(f"gate_up_{name}", merged, persistent=False)


def fused_block(block: Any, hidden_PH: Tensor, inputs: BlockInputs, segments: Segments) -> Tensor:
    """``block(hidden)`` of a Qwen tower: ``[P, H] -> [P, H]``."""
    attention = block.attn
    num_heads = attention.num_heads
    qkv_PC = linear(_norm(block.norm1, hidden_PH), attention.qkv.weight, attention.qkv.bias)
    rotated_PGD = rotate_heads(qkv_PC, None, 0.0, inputs.table_P2F, inputs.row_P, num_heads)
    value_PHD = qkv_PC.unflatten(1, (-1, attention.head_dim))[:, 2 * num_heads :]
    inputs.backend.attend(
        rotated_PGD[:, :num_heads],
        rotated_PGD[:, num_heads:],
        value_PHD,
        inputs.workspace_PHD,
        inputs.backend.arguments(segments),
        scale=attention.scaling,
    )
    update_PH = linear(inputs.workspace_PHD.flatten(1), attention.proj.weight, attention.proj.bias)
    hidden_PH, normed_PH = _add_and_norm(update_PH, hidden_PH, block.norm2)
    return hidden_PH + _feed_forward(block.mlp, normed_PH)


def _norm(module: nn.Module, hidden_PH: Tensor) -> Tensor:
    if isinstance(module, nn.LayerNorm):
        return module(hidden_PH)
    return fused_rms_norm(hidden_PH, module.weight, module.variance_epsilon)


def _add_and_norm(update_PH: Tensor, hidden_PH: Tensor, module: nn.Module) -> tuple[Tensor, Tensor]:
    if isinstance(module, nn.LayerNorm):
        sum_PH = hidden_PH + update_PH
        return sum_PH, module(sum_PH)
    return fused_add_rms_norm(update_PH, hidden_PH, module.weight, module.variance_epsilon)


def _feed_forward(mlp: Any, normed_PH: Tensor) -> Tensor:
    if not hasattr(mlp, "gate_up_weight"):
        return mlp(normed_PH)
    gate_up_PI = linear(normed_PH, mlp.gate_up_weight, mlp.gate_up_bias)
    return mlp.down_proj(fused_silu_mul(gate_up_PI))

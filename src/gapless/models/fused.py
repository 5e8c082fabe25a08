"""The decoder's layer stack on fused kernels: what ``Decoder.layers`` runs on a GPU.

The same parameters and the same order of operations as the modules of ``decoder.py``, whose forward stays the
oracle; only what lies between two matrix products is one kernel each. A layer is nine nodes of a graph: four
products, attention, and four kernels. The residual stream and the product that is to be added to it travel
separately, so that each addition joins the norm after it. ``T`` tokens, ``E`` hidden size, ``C`` columns of
merged heads, ``H`` query heads, ``D`` head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gapless.graphs.context import get_forward_context
from gapless.kernels.activation import fused_silu_mul
from gapless.kernels.norm import fused_add_rms_norm, fused_rms_norm
from gapless.kernels.rope_cache import rotate_heads, rotate_into_cache

if TYPE_CHECKING:
    from gapless.models.decoder import Decoder, DecoderAttention, DecoderLayer
    from gapless.models.layers import RMSNorm


def fused_layers(model: Decoder, hidden_TE: Tensor, positions_T: Tensor) -> Tensor:
    """The layer stack and the final norm: ``[T, E], [T] -> [T, E]``."""
    residual_TE, update_TE = hidden_TE, None
    for block in model.blocks:
        residual_TE, update_TE = _layer(block, residual_TE, update_TE, model.rope_P2F, positions_T)
    _, normed_TE = _add_and_norm(update_TE, residual_TE, model.final_norm)
    return normed_TE


def _layer(
    block: DecoderLayer, residual_TE: Tensor, update_TE: Tensor | None, rope_P2F: Tensor, positions_T: Tensor
) -> tuple[Tensor, Tensor]:
    residual_TE, normed_TE = _add_and_norm(update_TE, residual_TE, block.attention_norm)
    attended_THD = _attention(block.attention, normed_TE, rope_P2F, positions_T)
    update_TE = block.attention.out(attended_THD.flatten(1))
    residual_TE, normed_TE = _add_and_norm(update_TE, residual_TE, block.mlp_norm)
    return residual_TE, block.mlp.down(fused_silu_mul(block.mlp.gate_up(normed_TE)))


def _attention(
    attention: DecoderAttention, hidden_TE: Tensor, rope_P2F: Tensor, positions_T: Tensor
) -> Tensor:
    qkv_TC, norm = attention.qkv(hidden_TE), attention.head_norm
    weight_HD, eps = (None, 0.0) if norm is None else (norm.weight_HD, norm.eps)
    if torch.compiler.is_compiling():
        # Traced code must not hold the slots of the step it was traced in: its attention operator writes.
        num_heads, num_kv_heads = attention.num_heads, attention.num_kv_heads
        rotated_TGD = rotate_heads(qkv_TC, weight_HD, eps, rope_P2F, positions_T, num_kv_heads)
        value_TKD = qkv_TC.unflatten(1, (-1, attention.head_size))[:, num_heads + num_kv_heads :]
        return attention.core(rotated_TGD[:, :num_heads], rotated_TGD[:, num_heads:], value_TKD)
    # The slots are a static buffer, so a captured kernel finds each step's own ones there.
    slot_mapping_T = get_forward_context().batch.slot_mapping
    query_THD = rotate_into_cache(
        qkv_TC, weight_HD, eps, rope_P2F, positions_T, slot_mapping_T, *attention.core.caches
    )
    return attention.core(query_THD)


def _add_and_norm(update_TE: Tensor | None, residual_TE: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    if update_TE is None:
        return residual_TE, fused_rms_norm(residual_TE, norm.weight, norm.eps)
    return fused_add_rms_norm(update_TE, residual_TE, norm.weight, norm.eps)

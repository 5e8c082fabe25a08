"""The decoder's layer stack on fused kernels: what ``Decoder.layers`` runs on a GPU.

The same parameters and the same order of operations as the modules of ``decoder.py``, whose forward stays the
oracle; only what lies between two matrix products is one kernel each. A layer is nine nodes of a graph: four
products, attention, and four kernels. Decode has one less where attention rotates heads itself, and one more
where splits of its keys have to be merged. The addition to the residual stream joins the norm after it, also
the next layer's, and so does the last step of the product ahead (``kernels/summed_product.py``); where ranks
meet, their sum joins the two. A mixture of experts is five nodes (six with many tokens), of which the last
adds and norms too.

A prompt needs the last layer's feed-forward for its sampled rows alone. So the stack can end behind that
layer's attention, and its *tail* follows for few rows. ``T`` tokens, ``R`` sampled rows, ``E`` hidden size,
``C`` columns of merged heads, ``H`` query heads, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from gapless.attention.base import Rotation
from gapless.env import read_env
from gapless.graphs.context import get_forward_context, in_short_warm_up
from gapless.graphs.ops import direct
from gapless.kernels import activation, linear, media, mrope, norm, rope_cache, summed_product
from gapless.kernels.matrices import Matrices, compile_products
from gapless.models.moe import MixtureOfExperts
from gapless.parallel.collectives import all_reduce, sum_add_rms_norm

if TYPE_CHECKING:
    from gapless.models.decoder import Decoder, DecoderAttention, GatedMLP
    from gapless.models.layers import Linear, RMSNorm
    from gapless.models.moe import FeedForward
    from gapless.parallel.shard import Shard

fused_silu_mul = direct(activation.fused_silu_mul)
small_linear, gate_up_silu = direct(linear.small_linear), direct(linear.gate_up_silu)
linear_add_rms_norm = direct(summed_product.linear_add_rms_norm)
fused_rms_norm = direct(norm.fused_rms_norm)
fused_embed_rms_norm = direct(norm.fused_embed_rms_norm)
fused_embed_media = direct(media.embed_media)
fused_add_media_rms_norm = direct(media.fused_add_media_rms_norm)
axis_rows = direct(mrope.axis_rows)
rotate_heads, rotate_into_cache = direct(rope_cache.rotate_heads), direct(rope_cache.rotate_into_cache)


def prepare_products(model: Decoder) -> None:
    """Once, with the weights in place and before anything is captured: compile the kernels of small products
    (see ``kernels/linear.py``), which are timed first if the environment asks for that."""
    matrices = [group for group in _all_matrices(model) if group.weights]
    if read_env().tune_linear:
        from gapless.kernels.linear_tuner import tune_products

        tune_products(matrices)
    compile_products(matrices, None if model.info.is_pooling else model.head_rows)


def fused_layers(
    model: Decoder,
    hidden_TE: Tensor,
    positions: Tensor,
    deepstack_LTE: Tensor | None = None,
    is_media_T: Tensor | None = None,
) -> Tensor:
    """The layer stack and the final norm: ``[T, E], [T] or [3, T] -> [T, E]``."""
    return _run_layers(model, *_first_norm(model, hidden_TE, positions), deepstack_LTE, is_media_T)[1]


def fused_to_tail(
    model: Decoder,
    hidden_TE: Tensor,
    positions: Tensor,
    deepstack_LTE: Tensor | None = None,
    is_media_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The layer stack up to the last layer's attention: ``(heads [T, C], residual stream [T, E])``."""
    started = _first_norm(model, hidden_TE, positions)
    return _run_layers(model, *started, deepstack_LTE, is_media_T, to_tail=True)


def fused_tail(model: Decoder, attended_RC: Tensor, residual_RE: Tensor) -> Tensor:
    """What follows ``fused_to_tail``, the final norm included: ``-> [R, E]``."""
    block, norm = model.blocks[-1], model.final_norm
    out, shard = block.attention.out, model.shard
    residual_RE, normed_RE = _linear_add_norm(out, attended_RC, residual_RE, block.mlp_norm, shard)
    return _feed_forward_add_norm(block.mlp, normed_RE, residual_RE, norm, shard)[1]


def fused_hidden_states(
    model: Decoder, input_ids_T: Tensor, positions: Tensor, *, drawn_rows_T: Tensor, drawn_R: Tensor
) -> Tensor:
    """Embedding, layers and final norm: ``[T], [T] or [3, T] -> [T, E]``. Where ``input_ids`` is 0, the token
    is ``drawn[drawn_rows]``: what the step before drew, which the host need not know."""
    return _run_layers(model, *_embed_drawn(model, input_ids_T, positions, drawn_rows_T, drawn_R))[1]


def fused_drawn_to_tail(
    model: Decoder, input_ids_T: Tensor, positions: Tensor, *, drawn_rows_T: Tensor, drawn_R: Tensor
) -> tuple[Tensor, Tensor]:
    """``fused_hidden_states`` up to the last layer's attention, as ``fused_to_tail``."""
    started = _embed_drawn(model, input_ids_T, positions, drawn_rows_T, drawn_R)
    return _run_layers(model, *started, to_tail=True)


def fused_linear(linear: Linear, hidden_TI: Tensor) -> Tensor:
    """``linear(hidden)`` by the kernel that is best for so many tokens."""
    if linear.weight is None:
        return linear(hidden_TI)
    return small_linear(hidden_TI, linear.weight, linear.bias)


def _all_matrices(model: Decoder) -> Iterator[Matrices]:
    is_whole = model.shard.is_whole
    yield _matrices([block.attention.qkv for block in model.blocks])
    yield _matrices([block.attention.out for block in model.blocks], is_summed=is_whole)
    experts = list(model.expert_layers().values())
    dense = cast("list[FeedForward]", [block.mlp for block in model.blocks if block.mlp not in experts])
    shared = [mixture.shared for mixture in experts if mixture.shared is not None]
    for mlps in (dense, shared):
        yield _matrices([mlp.gate_up for mlp in mlps], is_gated=True)
    yield _matrices([mlp.down for mlp in dense], is_summed=is_whole)
    yield _matrices([mlp.down for mlp in shared])
    may_show_media = [block.mlp for block in model.blocks[: model.info.num_deepstack]]
    yield _matrices([mlp.down for mlp in dense if mlp in may_show_media])  # another kernel's then
    yield _matrices([mixture.router for mixture in experts])
    yield _matrices([model.lm_head])


def _matrices(linears: Sequence[Linear], *, is_gated: bool = False, is_summed: bool = False) -> Matrices:
    weights = tuple(linear.weight for linear in linears if linear.weight is not None)
    bias = linears[0].bias if linears else None
    return Matrices(weights=weights, bias=bias, is_gated=is_gated, is_summed=is_summed and bias is None)


Started = tuple[Tensor, Tensor, tuple[Tensor, Tensor | None]]
"""What the layers begin with: the residual stream, its norm, the rotary table with each token's row in it."""


def _first_norm(model: Decoder, hidden_TE: Tensor, positions: Tensor) -> Started:
    rope, norm = _rope_table(model, positions), model.blocks[0].attention_norm
    return hidden_TE, fused_rms_norm(hidden_TE, norm.weight, norm.eps), rope


def _embed_drawn(
    model: Decoder, input_ids_T: Tensor, positions: Tensor, drawn_rows_T: Tensor, drawn_R: Tensor
) -> Started:
    if not model.shard.is_whole:  # a sum over ranks lies between embedding and norm
        drawn_T = drawn_R.index_select(0, drawn_rows_T)
        return _first_norm(model, model.embed(torch.maximum(input_ids_T, drawn_T)), positions)
    rope, norm = _rope_table(model, positions), model.blocks[0].attention_norm
    hidden_TE, normed_TE = fused_embed_rms_norm(
        input_ids_T, drawn_rows_T, drawn_R, model.embedding, norm.weight, norm.eps
    )
    return hidden_TE, normed_TE, rope


def _run_layers(
    model: Decoder,
    residual_TE: Tensor,
    normed_TE: Tensor,
    rope: tuple[Tensor, Tensor | None],
    deepstack_LTE: Tensor | None = None,
    is_media_T: Tensor | None = None,
    *,
    to_tail: bool = False,
) -> tuple[Tensor, Tensor]:
    """The residual stream and its final norm; ``to_tail``: what ``fused_tail`` takes."""
    last = len(model.blocks) - 1
    num_deepstack = 0 if deepstack_LTE is None else deepstack_LTE.shape[0]
    norms_after = [*(block.attention_norm for block in model.blocks[1:]), model.final_norm]
    is_short = in_short_warm_up()
    for index, (block, norm_after) in enumerate(zip(model.blocks, norms_after, strict=True)):
        ends_here = to_tail and index == last
        if is_short and index not in model.first_of_each_kind and not ends_here:
            continue
        attended_TC = _attention(block.attention, normed_TE, *rope).flatten(1)
        if ends_here:
            return attended_TC, residual_TE
        residual_TE, normed_TE = _linear_add_norm(
            block.attention.out, attended_TC, residual_TE, block.mlp_norm, model.shard
        )
        has_deepstack = index < num_deepstack
        if isinstance(block.mlp, MixtureOfExperts) and model.shard.is_whole and not has_deepstack:
            joined = block.mlp.fused_add_norm(normed_TE, residual_TE, norm_after)
            if joined is not None:
                residual_TE, normed_TE = joined
                continue
        if deepstack_LTE is not None and has_deepstack:
            update_TE = all_reduce(block.mlp.fused(normed_TE), model.shard)
            residual_TE, normed_TE = fused_add_media_rms_norm(
                update_TE, residual_TE, deepstack_LTE[index], is_media_T, norm_after.weight, norm_after.eps
            )
        else:
            residual_TE, normed_TE = _feed_forward_add_norm(
                block.mlp, normed_TE, residual_TE, norm_after, model.shard
            )
    return residual_TE, normed_TE


def _rope_table(model: Decoder, positions: Tensor) -> tuple[Tensor, Tensor | None]:
    """The rotary table of a step and each token's row in it: the model's table by position, or for m-rope
    the step's own, whose rows are the tokens (None). Its kernel lets no other one start early, so it comes
    first of all."""
    if model.angles is None:
        assert model.rope_P2F is not None
        return model.rope_P2F, positions
    angles = model.angles
    return axis_rows(positions, angles.frequencies_F, angles.axes_F, angles.factor, angles.dtype), None


def _attention(
    attention: DecoderAttention, hidden_TE: Tensor, rope_P2F: Tensor, positions_T: Tensor | None
) -> Tensor:
    qkv_TC, norm = fused_linear(attention.qkv, hidden_TE), attention.head_norm
    weight_HD, eps = (None, 0.0) if norm is None else (norm.weight_HD, norm.eps)
    if torch.compiler.is_compiling():
        # Traced code must not hold the slots of the step it was traced in: its attention operator writes.
        num_heads, num_kv_heads = attention.num_heads, attention.num_kv_heads
        rotated_TGD = rotate_heads(qkv_TC, weight_HD, eps, rope_P2F, positions_T, num_kv_heads)
        value_TKD = qkv_TC.unflatten(1, (-1, attention.head_size))[:, num_heads + num_kv_heads :]
        return attention.core(rotated_TGD[:, :num_heads], rotated_TGD[:, num_heads:], value_TKD)
    # The slots are a static buffer, so a captured kernel finds each step's own ones there.
    core = attention.core
    if core.can_rotate(qkv_TC):
        return core.attend_rotating(qkv_TC, Rotation(weight_HD, eps, rope_P2F, positions_T))
    slot_mapping_T = get_forward_context().batch.slot_mapping
    query_THD = rotate_into_cache(qkv_TC, weight_HD, eps, rope_P2F, positions_T, slot_mapping_T, *core.caches)
    return core(query_THD)


def activated(gate_up: Linear, hidden_TE: Tensor) -> Tensor:
    """``silu(gate) * up`` of a merged product."""
    if gate_up.weight is None:
        return fused_silu_mul(gate_up(hidden_TE))
    return gate_up_silu(hidden_TE, gate_up.weight, gate_up.bias)


def _feed_forward_add_norm(
    mlp: GatedMLP | MixtureOfExperts, hidden_TE: Tensor, residual_TE: Tensor, norm: RMSNorm, shard: Shard
) -> tuple[Tensor, Tensor]:
    if isinstance(mlp, MixtureOfExperts):
        return _add_and_norm(mlp.fused(hidden_TE), residual_TE, norm, shard)
    return _linear_add_norm(mlp.down, activated(mlp.gate_up, hidden_TE), residual_TE, norm, shard)


def _linear_add_norm(
    linear: Linear, hidden_TI: Tensor, residual_TE: Tensor, norm: RMSNorm, shard: Shard
) -> tuple[Tensor, Tensor]:
    """``(residual + linear(hidden), norm of that)``."""
    if shard.is_whole and linear.weight is not None and linear.bias is None:
        return linear_add_rms_norm(hidden_TI, linear.weight, residual_TE, norm.weight, norm.eps)
    return _add_and_norm(fused_linear(linear, hidden_TI), residual_TE, norm, shard)


def _add_and_norm(
    partial_TE: Tensor, residual_TE: Tensor, norm: RMSNorm, shard: Shard
) -> tuple[Tensor, Tensor]:
    return sum_add_rms_norm(partial_TE, residual_TE, norm.weight, norm.eps, shard)

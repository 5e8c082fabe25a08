"""The end of a mixture of experts as operators: the sum of a token's experts, alone or with what follows it.

``combine_experts`` writes the block's result. Where nothing stands between the block and the next norm (no
sum over ranks, no cut), ``combine_add_rms_norm`` adds the residual stream and norms in the same kernel: a
node and three passes over the activations less per layer, and the same bits as in two steps. Read
``moe_sum_jit.py`` for the kernels. ``T`` tokens, ``P`` slots (``K`` of each token), ``E`` hidden size.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from gapless.graphs.ops import register_custom_op
from gapless.kernels.launch import Constants, launch
from gapless.kernels.norm import norm_shape
from gapless.kernels.select import launch_options, next_power_of_2

_TILE = 1024


@register_custom_op(mutates_args=["out_TE"])
def combine_experts(
    by_slot_PE: Tensor,
    query_start_loc: Tensor,
    shared_TE: Tensor | None,
    shared_gate_T1: Tensor | None,
    out_TE: Tensor,
) -> None:
    """``out[t] = sum_k by_slot[t * K + k] (+ sigmoid(shared_gate[t]) * shared[t])``, summed in float32; zeros
    in rows of padding, whatever stands in their slots."""
    num_tokens, size = out_TE.shape
    if num_tokens == 0:
        return
    assert out_TE.is_contiguous()
    tile = min(_TILE, next_power_of_2(size))
    top_k = by_slot_PE.shape[0] // num_tokens
    constants = _constants(size, top_k, tile, shared_TE is not None, out_TE.device)
    args = (
        *_sources(by_slot_PE, query_start_loc, shared_TE, shared_gate_T1),
        out_TE,
        *_places(query_start_loc),
    )
    launch(_kernels().combine_kernel, (num_tokens, -(-size // tile)), args, constants)


def _fake(
    by_slot_PE: Tensor,
    query_start_loc: Tensor,
    shared_TE: Tensor | None,
    shared_gate_T1: Tensor | None,
    residual_TE: Tensor,
    weight_E: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    shape = residual_TE.shape
    return residual_TE.new_empty(shape), residual_TE.new_empty(shape)


@register_custom_op(fake=_fake, is_fresh=True)
def combine_add_rms_norm(
    by_slot_PE: Tensor,
    query_start_loc: Tensor,
    shared_TE: Tensor | None,
    shared_gate_T1: Tensor | None,
    residual_TE: Tensor,
    weight_E: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """``(residual + what combine_experts gives, norm of that sum)``, with the roundings of separate steps."""
    sum_TE, normed_TE = _fake(
        by_slot_PE, query_start_loc, shared_TE, shared_gate_T1, residual_TE, weight_E, eps
    )
    num_tokens, size = residual_TE.shape
    if num_tokens == 0:
        return sum_TE, normed_TE
    assert residual_TE.stride(1) == 1
    top_k = by_slot_PE.shape[0] // num_tokens
    constants = _norm_constants(size, top_k, shared_TE is not None, residual_TE.dtype, residual_TE.device)
    args = (
        *_sources(by_slot_PE, query_start_loc, shared_TE, shared_gate_T1),
        residual_TE,
        weight_E,
        sum_TE,
        normed_TE,
        *_places(query_start_loc),
        residual_TE.stride(0),
        eps,
    )
    launch(_kernels().combine_norm_kernel, (num_tokens,), args, constants)
    return sum_TE, normed_TE


def _sources(
    by_slot_PE: Tensor, query_start_loc: Tensor, shared_TE: Tensor | None, shared_gate_T1: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What both kernels add up; a tensor stands for one that is not there."""
    assert by_slot_PE.is_contiguous()
    assert shared_TE is None or shared_TE.is_contiguous()
    assert shared_gate_T1 is None or shared_gate_T1.is_contiguous()
    return (
        by_slot_PE,
        query_start_loc,
        by_slot_PE if shared_TE is None else shared_TE,
        by_slot_PE if shared_gate_T1 is None else shared_gate_T1,
    )


def _places(query_start_loc: Tensor) -> tuple[int]:
    """Index of the last limit."""
    return (query_start_loc.shape[0] - 1,)


@functools.cache
def _constants(size: int, top_k: int, tile: int, has_shared: bool, device: torch.device) -> Constants:
    return Constants(
        SIZE=size, TOP_K=top_k, TILE=tile, HAS_SHARED=has_shared, num_warps=4, **launch_options(device)
    )


@functools.cache
def _norm_constants(
    size: int, top_k: int, has_shared: bool, dtype: torch.dtype, device: torch.device
) -> Constants:
    return Constants(**norm_shape(size, dtype), TOP_K=top_k, HAS_SHARED=has_shared, **launch_options(device))


@functools.cache
def _kernels() -> ModuleType:
    from gapless.kernels import moe_sum_jit

    return moe_sum_jit

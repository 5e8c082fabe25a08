"""Rows that an encoder has made, taken into a step without kernels of their own.

A placeholder's embedding is the encoder's row, and Qwen3-VL adds further rows behind its first layers
(deepstack). Both happen in kernels that a step has anyway: the look-up of embeddings, and addition and norm.
Rows that are not ``is_media`` are not read, so it does not matter what an earlier step left there. ``T``
tokens, ``E`` hidden size, ``V`` vocabulary.
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


def _fake_embed(input_ids_T: Tensor, embedding_VE: Tensor, media_TE: Tensor, is_media_T: Tensor) -> Tensor:
    return embedding_VE.new_empty((input_ids_T.shape[0], embedding_VE.shape[1]))


@register_custom_op(fake=_fake_embed, is_fresh=True)
def embed_media(input_ids_T: Tensor, embedding_VE: Tensor, media_TE: Tensor, is_media_T: Tensor) -> Tensor:
    """``[T, E]``: the row of ``media`` where ``is_media`` (bool or 0/1) is set, else the token's
    embedding."""
    hidden_TE = _fake_embed(input_ids_T, embedding_VE, media_TE, is_media_T)
    num_tokens, size = hidden_TE.shape
    if num_tokens == 0:
        return hidden_TE
    tile = min(_TILE, next_power_of_2(size))
    constants = {"SIZE": size, "TILE": tile, "num_warps": min(max(tile * hidden_TE.itemsize // 512, 1), 8)}
    strides = (embedding_VE.stride(0), media_TE.stride(0))
    args = (input_ids_T, embedding_VE, media_TE, is_media_T, hidden_TE, *strides)
    launch(_kernels().embed_media_kernel, (num_tokens, -(-size // tile)), args, constants)
    return hidden_TE


def _fake_add(
    update_TE: Tensor,
    residual_TE: Tensor,
    media_TE: Tensor,
    is_media_T: Tensor | None,
    weight_E: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    shape = residual_TE.shape
    return residual_TE.new_empty(shape), residual_TE.new_empty(shape)


@register_custom_op(fake=_fake_add, is_fresh=True)
def fused_add_media_rms_norm(
    update_TE: Tensor,
    residual_TE: Tensor,
    media_TE: Tensor,
    is_media_T: Tensor | None,
    weight_E: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """``(residual + update + media, norm of that sum)``; ``media`` is added where ``is_media`` (bool or 0/1)
    is set, or everywhere. Each sum is rounded, as in separate steps."""
    sum_TE, normed_TE = _fake_add(update_TE, residual_TE, media_TE, is_media_T, weight_E, eps)
    num_tokens, size = residual_TE.shape
    if num_tokens == 0:
        return sum_TE, normed_TE
    args = (
        update_TE,
        residual_TE,
        media_TE,
        weight_E if is_media_T is None else is_media_T,  # without a mask any pointer will do
        weight_E,
        sum_TE,
        normed_TE,
        update_TE.stride(0),
        residual_TE.stride(0),
        media_TE.stride(0),
        eps,
    )
    constants = _constants(size, residual_TE.dtype, residual_TE.device, is_media_T is not None)
    launch(_kernels().add_media_norm_kernel, (num_tokens,), args, constants)
    return sum_TE, normed_TE


@functools.cache
def _constants(size: int, dtype: torch.dtype, device: torch.device, has_mask: bool) -> Constants:
    return Constants(**norm_shape(size, dtype), HAS_MASK=has_mask, **launch_options(device))


@functools.cache
def _kernels() -> ModuleType:
    from gapless.kernels import media_jit

    return media_jit

"""RMS norm, alone or together with what comes before it: a residual addition, or the embedding.

The operators are functional: the residual stream gets a new tensor at each addition, which costs nothing in
a graph (the pool hands the old one's memory to the next) and leaves static inputs untouched. ``T`` tokens,
``E`` hidden size, ``V`` vocabulary, ``R`` rows that the step before drew tokens for.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gapless.errors import ConfigError
from gapless.graphs.ops import register_custom_op
from gapless.kernels.launch import Constants, launch
from gapless.kernels.select import kernels, launch_options, next_power_of_2

MAX_SIZE = 65536
"""A row is one program's tile."""


@register_custom_op(out_shape="hidden_TE", is_fresh=True)
def fused_rms_norm(hidden_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """``[T, E] -> [T, E]``: ``hidden / rms(hidden) * weight``, one rounding at the end."""
    normed_TE = _rows_like(hidden_TE)
    _launch(None, hidden_TE, weight_E, None, normed_TE, eps)
    return normed_TE


def _fake(update_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _rows_like(residual_TE), _rows_like(residual_TE)


@register_custom_op(fake=_fake, is_fresh=True)
def fused_add_rms_norm(
    update_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``(residual + update, norm of that sum)``. The sum is rounded before it is normed, as in two steps."""
    sum_TE, normed_TE = _fake(update_TE, residual_TE, weight_E, eps)
    _launch(update_TE, residual_TE, weight_E, sum_TE, normed_TE, eps)
    return sum_TE, normed_TE


def add_rms_norm_into(
    update_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float, sum_TE: Tensor, normed_TE: Tensor
) -> None:
    """``fused_add_rms_norm`` inside another operator: its results go to ``sum`` and ``normed``, which are
    contiguous."""
    _launch(update_TE, residual_TE, weight_E, sum_TE, normed_TE, eps)


def add_parts_rms_norm_into(
    parts_PTE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float, sum_TE: Tensor, normed_TE: Tensor
) -> None:
    """``add_rms_norm_into`` where the update is the sum of ``parts``, which are float32 and contiguous; it is
    rounded to the residual stream's dtype before it is added."""
    assert parts_PTE.is_contiguous()
    _launch(parts_PTE, residual_TE, weight_E, sum_TE, normed_TE, eps, num_parts=parts_PTE.shape[0])


def _fake_embed(
    input_ids_T: Tensor,
    drawn_rows_T: Tensor,
    drawn_R: Tensor,
    embedding_VE: Tensor,
    weight_E: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    shape = (input_ids_T.shape[0], embedding_VE.shape[1])
    return embedding_VE.new_empty(shape), embedding_VE.new_empty(shape)


@register_custom_op(fake=_fake_embed, is_fresh=True)
def fused_embed_rms_norm(
    input_ids_T: Tensor,
    drawn_rows_T: Tensor,
    drawn_R: Tensor,
    embedding_VE: Tensor,
    weight_E: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """``(embedding of each token, norm of that)``.

    A token's id is the larger of ``input_ids[t]`` and ``drawn[drawn_rows[t]]``, one of which is 0 (or less,
    for an invalid token) unless they agree: so ids may come from the host or from the step before.
    """
    hidden_TE, normed_TE = _fake_embed(input_ids_T, drawn_rows_T, drawn_R, embedding_VE, weight_E, eps)
    num_tokens, size = hidden_TE.shape
    if num_tokens == 0:
        return hidden_TE, normed_TE
    stride = embedding_VE.stride(0)
    args = (input_ids_T, drawn_rows_T, drawn_R, embedding_VE, weight_E, hidden_TE, normed_TE, stride, eps)
    constants = _constants(size, hidden_TE.dtype, hidden_TE.device)
    launch(kernels().embed_norm_kernel, (num_tokens,), args, constants)
    return hidden_TE, normed_TE


def _launch(
    update_TE: Tensor | None,
    residual_TE: Tensor,
    weight_E: Tensor,
    sum_TE: Tensor | None,
    normed_TE: Tensor,
    eps: float,
    *,
    num_parts: int = 1,
) -> None:
    num_tokens, size = residual_TE.shape
    if num_tokens == 0:
        return
    args = (
        residual_TE if update_TE is None else update_TE,
        residual_TE,
        weight_E,
        normed_TE if sum_TE is None else sum_TE,
        normed_TE,
        size if update_TE is None else update_TE.stride(-2),
        residual_TE.stride(0),
        eps,
    )
    constants = _norm_constants(
        size, residual_TE.dtype, residual_TE.device, has_update=update_TE is not None, num_parts=num_parts
    )
    launch(kernels().rms_norm_kernel, (num_tokens,), args, constants)


def _rows_like(hidden_TE: Tensor) -> Tensor:
    return torch.empty_like(hidden_TE, memory_format=torch.contiguous_format)


@functools.cache
def _constants(size: int, dtype: torch.dtype, device: torch.device) -> Constants:
    return Constants(**norm_shape(size, dtype), **launch_options(device))


@functools.cache
def _norm_constants(
    size: int, dtype: torch.dtype, device: torch.device, *, has_update: bool, num_parts: int
) -> Constants:
    shape = norm_shape(size, dtype)
    if num_parts > 1:
        # 16 numbers of all parts for a thread: with more of them the assembler waits for some before it asks
        # for the rest, to save registers, and a row takes two or three times the latency of memory.
        most = max(shape["num_warps"], shape["SIZE_PAD"] * num_parts // (16 * 32))
        shape = Constants(**{**shape, "num_warps": min(most, 16)})
    return Constants(**shape, HAS_UPDATE=has_update, NUM_PARTS=num_parts, **launch_options(device))


def norm_shape(size: int, dtype: torch.dtype) -> Constants:
    """Constants of a kernel that norms rows of ``size`` elements. Raises ``ConfigError`` for rows too
    long."""
    size_pad = _size_pad(size)
    return Constants(SIZE=size, SIZE_PAD=size_pad, num_warps=_num_warps(size_pad, dtype.itemsize))


def _size_pad(size: int) -> int:
    if size > MAX_SIZE:
        raise ConfigError(f"the fused norm handles rows of up to {MAX_SIZE} elements, not {size}")
    return next_power_of_2(size)


def _num_warps(size_pad: int, itemsize: int) -> int:
    """One 16-byte access per thread and tensor where that gives 1 to 16 warps."""
    return min(max(size_pad * itemsize // (16 * 32), 1), 16)

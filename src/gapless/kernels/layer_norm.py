"""Layer norm together with the residual addition before it: what lies between two products of a ViT block.

The counterpart of ``norm.py`` for encoders whose norms have a mean and a bias. ``T`` rows, ``E`` hidden size.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from gapless.graphs.ops import register_custom_op
from gapless.kernels.launch import Constants, launch
from gapless.kernels.norm import norm_shape
from gapless.kernels.select import launch_options


def _fake(
    update_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, bias_E: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    shape = residual_TE.shape
    return residual_TE.new_empty(shape), residual_TE.new_empty(shape)


@register_custom_op(fake=_fake, is_fresh=True)
def fused_add_layer_norm(
    update_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, bias_E: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``(residual + update, layer norm of that sum)``. The sum is rounded before it is normed, as in two
    steps."""
    sum_TE, normed_TE = _fake(update_TE, residual_TE, weight_E, bias_E, eps)
    num_rows, size = residual_TE.shape
    if num_rows == 0:
        return sum_TE, normed_TE
    strides = (update_TE.stride(0), residual_TE.stride(0))
    args = (update_TE, residual_TE, weight_E, bias_E, sum_TE, normed_TE, *strides, eps)
    constants = _constants(size, residual_TE.dtype, residual_TE.device)
    launch(_kernels().add_layer_norm_kernel, (num_rows,), args, constants)
    return sum_TE, normed_TE


@functools.cache
def _constants(size: int, dtype: torch.dtype, device: torch.device) -> Constants:
    return Constants(**norm_shape(size, dtype), **launch_options(device))


@functools.cache
def _kernels() -> ModuleType:
    from gapless.kernels import layer_norm_jit

    return layer_norm_jit

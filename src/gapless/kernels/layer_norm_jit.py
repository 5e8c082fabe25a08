"""The Triton kernel of residual addition and layer norm (see ``layer_norm.py``; ``jit.py`` for ``EARLY``)."""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: allow-untyped-defs


@triton.jit
def add_layer_norm_kernel(
    update_TE,
    residual_TE,
    weight_E,
    bias_E,
    sum_TE,
    normed_TE,
    update_stride_t,
    residual_stride_t,
    eps,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per row. The variance is that of values around their mean, as in two passes."""
    row = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, SIZE_PAD)
    is_element = element < SIZE
    weight = tl.load(weight_E + element, mask=is_element, other=0.0).to(tl.float32)
    bias = tl.load(bias_E + element, mask=is_element, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    update = tl.load(update_TE + row * update_stride_t + element, mask=is_element, other=0.0)
    residual = tl.load(residual_TE + row * residual_stride_t + element, mask=is_element, other=0.0)
    total = (residual.to(tl.float32) + update.to(tl.float32)).to(sum_TE.dtype.element_ty)
    tl.store(sum_TE + row * SIZE + element, total, mask=is_element)
    value = total.to(tl.float32)
    centred = tl.where(is_element, value - tl.sum(value, 0) / SIZE, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / SIZE + eps)
    normed = (centred * scale * weight + bias).to(normed_TE.dtype.element_ty)
    tl.store(normed_TE + row * SIZE + element, normed, mask=is_element)

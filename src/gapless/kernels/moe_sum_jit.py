"""Triton kernels at the end of a mixture of experts: a token's slots are added up, alone or together with the
residual stream and the norm of the next layer.

A program owns a row, or a tile of one, and adds slots in their order, so results are the same bits in every
run, and in both kernels. What rows of padding have in their slots was never written and may be NaN: it is
loaded, so that no load waits for the limits of the batch, and replaced by zeros. Letters as in
``moe_jit.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.kernels.jit import write_rms_norm

# mypy: allow-untyped-defs


@triton.jit(do_not_specialize=["num_places"])
def combine_kernel(
    by_slot_PE,
    query_start_loc,
    shared_TE,
    shared_gate_T,
    out_TE,
    num_places,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per token and tile: the sum of its slots and of the shared expert times
    ``sigmoid(shared_gate)``; zeros for padding, whatever its slots hold."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_element = element < SIZE
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = _sum_of_token(
        by_slot_PE, query_start_loc, shared_TE, shared_gate_T, num_places, token, element, is_element,
        SIZE, TOP_K, HAS_SHARED,
    )  # fmt: skip
    tl.store(out_TE + token * SIZE + element, total.to(out_TE.dtype.element_ty), mask=is_element)


@triton.jit(do_not_specialize=["num_places"])
def combine_norm_kernel(
    by_slot_PE,
    query_start_loc,
    shared_TE,
    shared_gate_T,
    residual_TE,
    weight_E,
    sum_TE,
    normed_TE,
    num_places,
    residual_stride_t,
    eps,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per token: ``combine_kernel`` and ``rms_norm_kernel`` of ``jit.py`` in one, with every
    rounding of the two."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, SIZE_PAD)
    is_element = element < SIZE
    weight = tl.load(weight_E + element, mask=is_element, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dtype = sum_TE.dtype.element_ty
    row_E = tl.load(residual_TE + token * residual_stride_t + element, mask=is_element, other=0.0)
    update = _sum_of_token(
        by_slot_PE, query_start_loc, shared_TE, shared_gate_T, num_places, token, element, is_element,
        SIZE, TOP_K, HAS_SHARED,
    )  # fmt: skip
    row_E = (row_E.to(tl.float32) + update.to(dtype).to(tl.float32)).to(dtype)
    tl.store(sum_TE + token * SIZE + element, row_E, mask=is_element)
    write_rms_norm(row_E, weight, normed_TE, token, element, is_element, eps, SIZE)


@triton.jit
def _sum_of_token(
    by_slot_PE,
    query_start_loc,
    shared_TE,
    shared_gate_T,
    num_places,
    token,
    element,
    is_element,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
):
    first, last = tl.load(query_start_loc), tl.load(query_start_loc + num_places)
    source = by_slot_PE + token * (TOP_K * SIZE) + element
    total = tl.load(source, mask=is_element, other=0.0).to(tl.float32)
    for k in tl.static_range(1, TOP_K):
        total += tl.load(source + k * SIZE, mask=is_element, other=0.0).to(tl.float32)
    if HAS_SHARED:
        gate = tl.load(shared_gate_T + token).to(tl.float32)
        shared = tl.load(shared_TE + token * SIZE + element, mask=is_element, other=0.0).to(tl.float32)
        total += shared / (1.0 + tl.exp(-gate))
    return tl.where((token >= first) & (token < last), total, 0.0)

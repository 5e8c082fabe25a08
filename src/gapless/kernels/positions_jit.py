"""The Triton kernel of interpolated position embeddings (see ``positions.py``)."""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: allow-untyped-defs


@triton.jit
def add_interpolated_kernel(
    embedded_PH,
    table_SH,
    indices_PC,
    weights_PC,
    out_PH,
    SIZE: tl.constexpr,
    NUM_CORNERS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per patch and tile of features. Sums in float32, in the order of the corners."""
    patch = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_feature = feature < SIZE
    total = tl.zeros([TILE], dtype=tl.float32)
    for corner in tl.static_range(NUM_CORNERS):
        row = tl.load(indices_PC + patch * NUM_CORNERS + corner).to(tl.int64)
        weight = tl.load(weights_PC + patch * NUM_CORNERS + corner)
        value = tl.load(table_SH + row * SIZE + feature, mask=is_feature, other=0.0)
        total += value.to(tl.float32) * weight
    position = patch * SIZE + feature
    embedded = tl.load(embedded_PH + position, mask=is_feature, other=0.0)
    dtype = out_PH.dtype.element_ty
    result = embedded.to(tl.float32) + total.to(dtype).to(tl.float32)
    tl.store(out_PH + position, result.to(dtype), mask=is_feature)

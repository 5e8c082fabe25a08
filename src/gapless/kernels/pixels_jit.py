"""The Triton kernel of ``pixels.py``; see there for shapes.

One kernel for pictures and videos of every patch size: what differs is no constant, so that a server has
compiled it when it starts. The table (1.5 KB) stays in the first cache; bytes and values are read and written
once.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: allow-untyped-defs


@triton.jit(
    do_not_specialize=["num_rows", "num_channels", "size", "num_repeats"],
    do_not_specialize_on_alignment=["bytes_PKA", "values_PKRA"],
)
def write_values_kernel(
    bytes_PKA,
    table_KV,
    values_PKRA,
    num_rows,
    num_channels,
    size,
    num_repeats,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per ``ROWS`` channels of patches."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    table = table_KV + (row % num_channels) * 256
    first_byte = bytes_PKA + row.to(tl.int64) * size
    first_value = values_PKRA + row.to(tl.int64) * size * num_repeats
    for start in range(0, size, TILE):
        index = start + tl.arange(0, TILE)[None, :]
        is_pixel = (row < num_rows) & (index < size)
        byte = tl.load(first_byte + index, mask=is_pixel, other=0).to(tl.int32)
        value = tl.load(table + byte, mask=is_pixel, other=0.0)
        for repeat in range(num_repeats):
            tl.store(first_value + repeat * size + index, value, mask=is_pixel)

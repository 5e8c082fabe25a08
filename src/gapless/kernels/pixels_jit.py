"""The Triton kernel of ``pixels.py``; see there for shapes.

One kernel for pictures and videos of every patch size: what differs is no constant, so that a server has
compiled it when it starts. The table (1.5 KB) stays in the first cache; so do a patch's bytes (a few hundred)
for the programs of its channels, which read every third of them. Values are written once, side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: allow-untyped-defs


@triton.jit(
    do_not_specialize=["num_channels", "size", "num_repeats"],
    do_not_specialize_on_alignment=["bytes_PAK", "values_PKRA"],
)
def write_values_kernel(
    bytes_PAK,
    table_KV,
    values_PKRA,
    num_channels,
    size,
    num_repeats,
    TILE: tl.constexpr,
):
    """One program per channel of a patch. Tiles have one dimension: with two, Triton 3.6 looks values up in
    another layout than it loads bytes in, by way of shared memory."""
    row = tl.program_id(0).to(tl.int64)
    channel = row % num_channels
    table = table_KV + channel * 256
    first_byte = bytes_PAK + (row - channel) * size + channel
    first_value = values_PKRA + row * size * num_repeats
    for start in range(0, size, TILE):
        index = start + tl.arange(0, TILE)
        is_pixel = index < size
        byte = tl.load(first_byte + index * num_channels, mask=is_pixel, other=0).to(tl.int32)
        value = tl.load(table + byte, mask=is_pixel, other=0.0)
        for repeat in range(num_repeats):
            tl.store(first_value + repeat * size + index, value, mask=is_pixel)

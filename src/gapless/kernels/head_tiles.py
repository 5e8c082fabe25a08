"""How the kernel of ``head_product_jit.py`` cuts a head up, and for which shapes it is taken at all.

The choice depends on the shape of a call alone, so a graph and the padded eager run it must equal take the
same kernel. ``None`` means the product and ``finish_greedy``, one after the other. Every program reads all
activations of its rows through the second-level cache, whose traffic is what a head of many rows waits for:
more rows want more tokens of the vocabulary in a program. ``R`` rows, ``E`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from gapless.kernels.linear_tiles import token_bucket
from gapless.kernels.select import has_early_launch, shared_memory_bytes, stages_that_fit

MAX_HEAD_ROWS = 128
"""With more, the tensor cores are what a head waits for, and cuBLAS keeps them busier: at 256 rows it and the
choice take 0.158 ms, this kernel 0.182 (``benchmarks/results/h200_head_products.json``)."""
_MAX_LONG_HEAD_ROWS = 64
"""The same where a program has more than 1,024 columns to add up."""
MIN_HEAD_SIZE = 1 << 16
"""Of a vocabulary: below, there are too few tiles to spread over a GPU, and little to spare."""
MAX_CHUNKS = 1 << 14
"""That the kernel behind picks among, in one program for each row."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeadTiles:
    """The arguments of ``head_product_kernel`` that are not the model's; powers of two all but stages."""

    block_r: int
    """Rows that one program multiplies at most; more rows are several tiles, side by side."""
    block_o: int
    """Tokens of the vocabulary, at most 8,192."""
    block_i: int
    split: int = 1
    num_early: int = 0
    prefetch: int = 0
    num_warps: int
    num_stages: int

    def rows_pad(self, num_rows: int) -> int:
        """Rows of a tile, for a call with ``num_rows``."""
        return min(max(token_bucket(num_rows), 8), self.block_r)


def head_tiles(
    num_rows: int, num_in: int, size: int, dtype: torch.dtype, device: torch.device
) -> HeadTiles | None:
    """What is taken for ``[R, E] x [V, E]`` on ``device``; None: the product, then ``finish_greedy``."""
    if not 2 <= num_rows <= MAX_HEAD_ROWS or device.type != "cuda":  # one row: a kernel without tensor cores
        return None
    return _head_tiles(token_bucket(num_rows), num_in, size, dtype, device)


@functools.cache
def _head_tiles(
    num_rows: int, num_in: int, size: int, dtype: torch.dtype, device: torch.device
) -> HeadTiles | None:
    if dtype not in (torch.bfloat16, torch.float16) or num_in % 64 != 0 or size < MIN_HEAD_SIZE:
        return None
    if not has_early_launch(device) or (num_in > 1024 and num_rows > _MAX_LONG_HEAD_ROWS):
        return None
    tiles = default_head_tiles(num_rows)
    if -(-size // tiles.block_o) > MAX_CHUNKS:
        return None
    return that_fit(tiles, num_rows, shared_bytes=shared_memory_bytes(device))


def default_head_tiles(num_rows: int) -> HeadTiles:
    """By a bucket of rows, from ``h200_head_products.json``: the heads of Qwen3-0.6B (1,024 columns) and
    Llama-3.1-8B (4,096). Where the rule takes them, a norm and they need 2 to 13 % less than the norm, the
    product and the choice one after the other."""
    if num_rows <= 32:
        return HeadTiles(block_r=32, block_o=64, block_i=128, num_warps=4, num_stages=4)
    if num_rows <= 64:
        return HeadTiles(block_r=64, block_o=128, block_i=64, num_warps=4, num_stages=4)
    return HeadTiles(block_r=128, block_o=128, block_i=64, num_warps=4, num_stages=3)


def that_fit(tiles: HeadTiles, num_rows: int, *, shared_bytes: int) -> HeadTiles | None:
    """``tiles`` with as many stages as there is shared memory for; None where not even two fit."""
    stage_bytes = (tiles.block_o + tiles.rows_pad(num_rows)) * tiles.split * tiles.block_i * 2
    num_stages = stages_that_fit(
        tiles.num_stages,
        stage_bytes=stage_bytes,
        other_bytes=tiles.num_early * stage_bytes + _OTHER_BYTES,
        shared_bytes=shared_bytes,
    )
    return dataclasses.replace(tiles, num_stages=num_stages) if num_stages >= 2 else None


_OTHER_BYTES = 4096
"""For sums that warps exchange, rounded up."""

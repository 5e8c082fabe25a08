"""The built-in choices: tiles for the shape of a product, rules and tables made from timings on an H200.

Stored timings of the GPU at hand go before them (``linear_choice.py``). ``None`` means cuBLAS.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from gapless.kernels.linear_tiles import (
    MAX_PARTS,
    MAX_TOKENS,
    GatedTiles,
    Product,
    Tiles,
    takes_gated_tiles,
)
from gapless.kernels.select import next_power_of_2


@functools.cache
def default_tiles(product: Product) -> Tiles | None:
    """The rule, from ``benchmarks/results/h200_linear.json`` and, for products with a norm behind them,
    ``h200_summed_products.json``: every matrix of Qwen3-0.6B and Llama-3.1-8B. Of more than 16 tokens, and of
    4,096 rows, steps of an engine decided between those parts; they also decided gate and up of 8 tokens, and
    rows of 1,024 columns with 64 and 128 (*lead*, ``docs/log.md``)."""
    if product.dtype not in (torch.bfloat16, torch.float16) or product.num_in % 16 != 0:
        return None  # rows that are not aligned would be read two bytes at a time
    if product.is_summed:
        tiles = _tiles_in_parts(product)
        if tiles is not None:
            return tiles
    if product.num_tokens > MAX_TOKENS or takes_gated_tiles(product):
        return None
    if product.num_tokens == 1:
        return _gemv_tiles(product.num_in)
    if product.num_tokens <= 8:
        return _tiles_for_a_few(product)
    if product.num_tokens <= 32:
        return _tiles_for_some(product)
    if product.num_in > 1024:
        return None
    if product.is_gated:
        return _streaming_tiles() if product.num_rows <= 16384 else None
    if 2048 < product.num_rows <= 4096:  # cuBLAS is as quick, but no kernel starts early behind it
        return _streaming_tiles(num_warps=4 if product.num_tokens <= 64 else 8)
    return None


_ENOUGH_PROGRAMS = 128
"""About one for each of an H200's 132 multiprocessors."""
_WIDE = GatedTiles(block_t=128, block_o=128, block_i=64, num_stages=4, shared_by=16, skew=0)
_NARROW = GatedTiles(block_t=128, block_o=64, block_i=64, num_stages=6, shared_by=16, skew=4)
_SLIM = GatedTiles(block_t=128, block_o=32, block_i=64, num_stages=6, shared_by=16, skew=0)
_GATED = {
    (1024, 3072): {128: _SLIM, 256: _NARROW, 512: _NARROW, 1024: _NARROW, 2048: _WIDE, 4096: _WIDE},
    (4096, 14336): {256: _WIDE, 1024: _WIDE, 2048: _WIDE, 4096: _WIDE},
}
"""By input and output features, then by tokens."""


def default_gated_tiles(product: Product) -> GatedTiles | None:
    """Where our kernel took at most 0.98 of cuBLAS and the activation's kernel, in
    ``benchmarks/results/h200_gate_up_products.json``: gate and up of Qwen3-0.6B and Llama-3.1-8B in bfloat16.
    With 128 tokens steps of an engine decided, which take 0.7 % less with it (*lead*, ``docs/log.md``).
    A table and no rule: with 512 tokens of the latter cuBLAS wins, and of other shapes nothing is known, so
    those take our kernel after timings of their own alone."""
    if product.dtype is not torch.bfloat16:
        return None
    return _GATED.get((product.num_in, product.num_out), {}).get(product.num_tokens)


def _gemv_tiles(num_in: int) -> Tiles:
    is_long = num_in > 4096  # such rows stream; of shorter ones all is in flight before the wait
    block_i = 2048 if is_long else min(1024, next_power_of_2(num_in))
    num_early = 2 if is_long else -(-num_in // block_i)
    return Tiles(on_tensor_cores=False, block_o=4, block_i=block_i, num_early=num_early, num_warps=4)


def _tiles_for_a_few(product: Product) -> Tiles:
    """Little arithmetic: warps share the columns of a few rows, all in flight before the wait if they fit."""
    num_in, num_rows = product.num_in, product.num_rows
    if num_in <= 1024 and 6144 <= num_rows <= 16384:
        if product.num_tokens > 4 and product.is_gated:
            return _split_tiles(block_o=16, block_i=256, split=4, num_early=1)
        return _split_tiles(block_o=32, block_i=128, split=4, num_early=2)
    if num_in <= 2048 and num_rows <= 16384:
        return _split_tiles(block_o=16, block_i=256, split=4, num_early=-(-num_in // 1024))
    if num_in <= 4096 and num_rows <= 2048:
        return _split_tiles(block_o=16, block_i=256, split=8, num_early=2)
    if num_in > 2048 and num_rows > 65536:
        return _split_tiles(block_o=32, block_i=64, split=4, num_early=2)
    num_stages = 3 if num_in <= 2048 else 5
    return _split_tiles(block_o=16, block_i=128, split=4, num_early=0, num_stages=num_stages)


def _tiles_for_some(product: Product) -> Tiles:
    """Every program reads all activations, so it should own many rows, where there are enough of them."""
    num_in, num_rows = product.num_in, product.num_rows
    if num_rows <= 2048:
        if num_in <= 2048:
            return _split_tiles(block_o=16, block_i=256, split=4, num_early=-(-num_in // 1024))
        block_i = 256 if product.num_tokens <= 16 else 128  # shared memory has no room for more
        return _split_tiles(block_o=16, block_i=block_i, split=4, num_early=0, prefetch=2048, num_stages=4)
    if num_rows <= 4096 and num_in >= 4096:
        return _split_tiles(block_o=32, block_i=64, split=4, num_early=0, num_stages=5)
    if num_in <= 1024 and num_rows <= 16384 and product.num_tokens > 16:
        return _streaming_tiles(num_early=2)
    if num_in <= 1024 and num_rows > 65536 and product.num_tokens <= 16:
        return _streaming_tiles(block_i=64, num_stages=6)
    return _streaming_tiles()


def _tiles_in_parts(product: Product) -> Tiles | None:
    """Rows are so few that whole ones make half as many programs as there are processors, each with all
    activations to read: parts make it up to 128 programs. None where that gains nothing or does not divide.
    """
    num_tokens, num_rows = product.num_tokens, product.num_rows
    if not 2 <= num_tokens <= 128 or num_rows > 2048:
        return None
    block_o = 16 if num_tokens <= 8 else 64
    num_blocks, parts = -(-num_rows // block_o), MAX_PARTS
    while parts > 1 and (num_blocks * parts > _ENOUGH_PROGRAMS or product.num_in % (16 * parts) != 0):
        parts //= 2
    if parts == 1:
        return None
    columns = product.num_in // parts
    if num_tokens <= 8:  # all in flight before the wait, if it fits
        block_i = min(max(next_power_of_2(-(-columns // 8)), 16), 256)
        tiles = _split_tiles(block_o=block_o, block_i=block_i, split=4, num_early=2)
    elif num_tokens <= 16 and columns <= 512:
        rest = columns - 2 * 128
        tiles = _streaming_tiles(num_early=2, prefetch=max(next_power_of_2(rest), 64) if rest > 0 else 0)
    else:
        tiles = _streaming_tiles()
    return dataclasses.replace(tiles, parts=parts)


def _split_tiles(
    *, block_o: int, block_i: int, split: int, num_early: int, prefetch: int = 0, num_stages: int = 3
) -> Tiles:
    return Tiles(
        on_tensor_cores=True,
        block_o=block_o,
        block_i=block_i,
        split=split,
        num_early=num_early,
        prefetch=prefetch,
        num_warps=split,
        num_stages=num_stages,
    )


def _streaming_tiles(
    *, block_i: int = 128, num_early: int = 0, prefetch: int = 0, num_warps: int = 4, num_stages: int = 4
) -> Tiles:
    return Tiles(
        on_tensor_cores=True,
        block_o=64,
        block_i=block_i,
        num_early=num_early,
        prefetch=prefetch,
        num_warps=num_warps,
        num_stages=num_stages,
    )

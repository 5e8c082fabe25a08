"""Shapes of products and tiles of them, for tests of what is chosen, timed and compiled."""

from __future__ import annotations

from dataclasses import replace

import torch

from gapless.kernels.linear_tiles import Product, Tiles

CPU = torch.device("cpu")
GEMV = Tiles(on_tensor_cores=False, block_o=8, block_i=1024, num_early=1, num_warps=4)
TILE = Tiles(on_tensor_cores=True, block_o=16, block_i=64, split=4, num_early=2, num_warps=4)
PARTS = replace(TILE, parts=4)


def make_product(num_tokens: int = 1, **changes: object) -> Product:
    fields = {"num_in": 1024, "num_out": 4096, "is_gated": False, "dtype": torch.bfloat16, **changes}
    return Product(num_tokens=num_tokens, **fields)  # type: ignore[arg-type]


def make_summed(num_tokens: int, **changes: object) -> Product:
    return make_product(num_tokens, **{"num_in": 2048, "num_out": 1024, "is_summed": True, **changes})

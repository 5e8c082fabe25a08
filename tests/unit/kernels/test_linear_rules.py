"""The built-in tiles: which shapes have some, and into how many parts products are cut."""

from __future__ import annotations

import pytest
import torch
from product_shapes import make_product, make_summed

from gapless.kernels.linear_rules import default_tiles


@pytest.mark.parametrize("num_in", [2048, 3072])
@pytest.mark.parametrize(
    ("num_tokens", "block_o", "split", "parts"),
    [(2, 16, 4, 2), (8, 16, 4, 2), (16, 64, 1, 8), (32, 64, 1, 8), (64, 64, 1, 8), (128, 64, 1, 8)],
)
def test_few_rows_with_a_norm_behind_them_are_cut_into_128_programs(
    num_tokens: int, block_o: int, split: int, parts: int, num_in: int
) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        product = make_summed(num_tokens, num_in=num_in, dtype=dtype)
        tiles = default_tiles(product)
        assert tiles is not None
        assert tiles.fits(product)
        assert (tiles.block_o, tiles.split, tiles.parts) == (block_o, split, parts)
        assert -(-1024 // tiles.block_o) * tiles.parts == 128


@pytest.mark.parametrize("num_tokens", [2, 8, 32, 128])
def test_parts_are_as_many_as_divide_the_columns(num_tokens: int) -> None:
    product = make_summed(num_tokens, num_out=576, num_in=576)
    tiles = default_tiles(product)
    assert tiles is not None
    assert tiles.fits(product)
    assert 1 < tiles.parts <= 4


@pytest.mark.parametrize("num_tokens", [2, 8, 16, 128])
@pytest.mark.parametrize("size", [576, 896, 1024, 1536, 2048])
def test_every_width_of_common_models_is_cut_evenly(size: int, num_tokens: int) -> None:
    for num_in in (576, 896, 1536, 2048, 3072, 4864, 5504, 5632, 8192, 8960, 11008):
        tiles = default_tiles(make_summed(num_tokens, num_out=size, num_in=num_in))
        if tiles is None or tiles.parts == 1:
            continue
        columns, rest = divmod(num_in, tiles.parts)
        assert (rest, columns % 16) == (0, 0), "each part begins on 32 bytes, and none is left over"
        assert -(-size // tiles.block_o) * tiles.parts <= 128


@pytest.mark.parametrize(
    ("num_tokens", "changes"),
    [
        (1, {}),
        (256, {}),
        (512, {}),
        (8, {"num_out": 4096, "num_in": 4096}),
        (128, {"num_out": 4096, "num_in": 14336}),
        (32, {"num_out": 4096, "num_in": 4096}),
        (32, {"num_in": 1008}),
        (32, {"dtype": torch.float32}),
    ],
    ids=str,
)
def test_elsewhere_a_norm_behind_a_product_changes_no_choice(
    num_tokens: int, changes: dict[str, object]
) -> None:
    summed = default_tiles(make_summed(num_tokens, **changes))
    assert summed == default_tiles(make_summed(num_tokens, **changes, is_summed=False))
    assert summed is None or summed.parts == 1


@pytest.mark.parametrize("num_tokens", [64, 128, 256])
@pytest.mark.parametrize("changes", [{}, {"num_in": 4096}, {"num_out": 6144}, {"num_out": 2048}], ids=str)
def test_rows_of_the_shape_that_was_timed_have_a_kernel_that_starts_early(
    num_tokens: int, changes: dict[str, int]
) -> None:
    """cuBLAS is as quick there, but attention can begin early only behind a product that lets it."""
    tiles = default_tiles(make_product(num_tokens, **changes))
    assert (tiles is not None) == (num_tokens <= 128 and not changes)


def test_gate_and_up_of_eight_tokens_have_tiles_of_their_own() -> None:
    gated, plain, fewer = (
        default_tiles(make_product(tokens, num_out=out, is_gated=gated))
        for tokens, out, gated in ((8, 3072, True), (8, 6144, False), (4, 3072, True))
    )
    assert gated is not None
    assert (gated.block_o, gated.block_i, gated.split, gated.num_early) == (16, 256, 4, 1)
    assert plain == fewer != gated


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_half_precision_has_tiles(dtype: torch.dtype) -> None:
    assert default_tiles(make_product(dtype=dtype)) is None


@pytest.mark.parametrize("num_in", [1, 7, 1000, 1001])
def test_rows_that_are_not_aligned_are_left_to_the_library(num_in: int) -> None:
    assert default_tiles(make_product(num_in=num_in)) is None
    assert default_tiles(make_product(num_in=1008)) is not None

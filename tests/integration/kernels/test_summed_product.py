"""Products whose columns are shared between programs, and the norm that adds the parts up, under Triton's
interpreter: against float64, and bit for bit against the separate steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from linear_cases import HALVES, gemv, tile
from summed_cases import make_operands, part_tile, parts_oracle, sum_in_order

from gapless.kernels import linear, summed_product
from gapless.kernels.linear import launch_parts, small_linear
from gapless.kernels.linear_choice import forget_stored_choices, store_choices
from gapless.kernels.linear_tiles import MAX_SUMMED_TOKENS, Tiles
from gapless.kernels.matrices import Matrices
from gapless.kernels.norm import fused_add_rms_norm
from gapless.kernels.summed_product import launch_summed, linear_add_rms_norm

pytestmark = pytest.mark.usefixtures("poisoned_memory")
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)
CPU = torch.device("cpu")
TILES = [
    part_tile(16, 16, 1, 0, 2),
    part_tile(16, 32, 1, 1, 4),
    part_tile(32, 16, 1, 2, 2),
    part_tile(16, 16, 2, 2, 4),
    part_tile(32, 16, 4, 1, 2),
    part_tile(16, 16, 4, 0, 8),
]
SHAPES = [(128, 24), (384, 41), (192, 64)]
"""Input features and rows: the last steps of parts reach beyond them, and into the next part's columns."""


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("triton")
    monkeypatch.setenv("GAPLESS_CACHE_DIR", str(tmp_path / "store"))
    forget_stored_choices()
    yield
    forget_stored_choices()


@interpreted
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("num_in", "size"), SHAPES)
@pytest.mark.parametrize("tiles", TILES, ids=lambda t: f"{t.block_o}x{t.split}x{t.block_i}-{t.parts}")
@pytest.mark.parametrize("num_tokens", [1, 7, 33])
def test_every_part_equals_float64(
    num_tokens: int, tiles: Tiles, num_in: int, size: int, dtype: torch.dtype
) -> None:
    """Scratch that no program wrote would be NaN."""
    x, weight, *_ = make_operands(num_tokens, num_in, size, dtype=dtype)
    parts = launch_parts(x, weight, tiles)
    expected = parts_oracle(x, weight, tiles.parts)
    assert (parts.dtype, parts.shape) == (torch.float32, expected.shape)
    torch.testing.assert_close(parts.double(), expected, atol=2e-5, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("num_tokens", [65, 128, 200])
def test_many_tokens(num_tokens: int) -> None:
    x, weight, *_ = make_operands(num_tokens, 64, 40, dtype=torch.bfloat16)
    parts = launch_parts(x, weight, part_tile(32, 16, 1, 0, 2))
    torch.testing.assert_close(parts.double(), parts_oracle(x, weight, 2), atol=2e-5, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize(
    ("num_tokens", "parts", "size"), [(1, 2, 576), (7, 4, 100), (7, 16, 576), (33, 8, 100), (65, 16, 16)]
)
def test_equals_parts_summed_in_order_rounded_added_and_normed(
    num_tokens: int, parts: int, size: int, dtype: torch.dtype
) -> None:
    x, weight, residual, *end = make_operands(num_tokens, 256, size, dtype=dtype)
    tiles, before = part_tile(32, 16, 1, 0, parts), residual.clone()
    total, normed = launch_summed(x, weight, residual, *end, tiles)
    update = sum_in_order(launch_parts(x, weight, tiles), dtype)
    expected = fused_add_rms_norm(update, residual, *end)
    assert torch.equal(total, expected[0])
    assert torch.equal(normed, expected[1])
    assert torch.equal(residual, before), "it may be a static input"


@interpreted
@pytest.mark.parametrize("tiles", [gemv(8, 32, 2), tile(16, 16, 4, 1), None], ids=["gemv", "tile", "library"])
def test_without_parts_it_is_the_product_and_the_norm(tiles: Tiles | None) -> None:
    x, weight, residual, *end = make_operands(3, 48, 40, dtype=torch.bfloat16)
    choose_for(weight, {4: tiles}, is_summed=True)
    choose_for(weight, {4: tiles}, is_summed=False)
    expected = fused_add_rms_norm(small_linear(x, weight, None), residual, *end)
    for actual, wanted in zip(linear_add_rms_norm(x, weight, residual, *end), expected, strict=True):
        assert torch.equal(actual, wanted)


@interpreted
@pytest.mark.parametrize("num_tokens", [5, 9, 33, 200, MAX_SUMMED_TOKENS + 1])
def test_the_operator_takes_what_is_chosen_for_the_shape(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, residual, *end = make_operands(num_tokens, 64, 40, dtype=torch.bfloat16)
    tiles = part_tile(32, 16, 1, 0, 4)
    choose_for(weight, {8: tiles, 64: tiles, 256: tiles}, is_summed=True)
    launched: list[Tiles] = []
    real = summed_product.launch_parts
    monkeypatch.setattr(
        summed_product, "launch_parts", lambda x, w, t: (launched.append(t), real(x, w, t))[1]
    )
    total, normed = linear_add_rms_norm(x, weight, residual, *end)
    assert launched == ([tiles] if num_tokens in (5, 33, 200) else [])
    update = (x.double() @ weight.double().t()).to(x.dtype)
    torch.testing.assert_close(total, residual + update, atol=0.05, rtol=0.02)
    assert normed.isfinite().all()
    assert linear.choose_tiles(x[:5], weight) is None, "a product that no norm follows has its own choice"


@interpreted
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x, weight, residual, *end = make_operands(4, 128, 24, dtype=torch.bfloat16)
    others = x.clone()
    others[0], others[2:] = float("nan"), 1e4
    tiles = part_tile(16, 16, 2, 1, 4)
    one, two = (launch_summed(rows, weight, residual, *end, tiles) for rows in (x, others))
    assert torch.equal(one[0][1], two[0][1])
    assert torch.equal(one[1][1], two[1][1])
    assert two[0][0].isnan().all()


def test_traced_calls_do_not_see_the_choice() -> None:
    x, weight = (torch.empty(shape, device="meta", dtype=torch.float16) for shape in ((3, 64), (40, 64)))
    results = linear_add_rms_norm(x, weight, x.new_empty(3, 48)[:, :40], x.new_empty(40), 1e-6)
    assert [(t.shape, t.dtype, t.is_contiguous()) for t in results] == [((3, 40), torch.float16, True)] * 2


@interpreted
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_parts_keep_the_operators_contract(num_tokens: int) -> None:
    operands = make_operands(num_tokens, 64, 40, dtype=torch.bfloat16)
    choose_for(operands[1], {1: TILES[0], 4: TILES[0]}, is_summed=True)
    utilities = ("test_schema", "test_faketensor")
    with torch.no_grad():
        torch.library.opcheck(linear_add_rms_norm, operands, test_utils=utilities)


def test_no_rows_launch_nothing() -> None:
    x, weight, residual, *end = make_operands(0, 64, 40, dtype=torch.bfloat16)
    choose_for(weight, {1: part_tile(16, 16, 1, 0, 2)}, is_summed=True)
    assert [t.shape for t in linear_add_rms_norm(x, weight, residual, *end)] == [(0, 40)] * 2


def choose_for(weight: torch.Tensor, tiles: dict[int, Tiles | None], *, is_summed: bool) -> None:
    """Store ``tiles`` for the buckets of tokens they stand under."""
    group = Matrices(weights=(weight,), bias=None, is_gated=False, is_summed=is_summed)
    store_choices({group.product(tokens): t for tokens, t in tiles.items()}, CPU)

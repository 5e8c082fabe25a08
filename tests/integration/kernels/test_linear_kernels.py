"""Small matrix products under Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from linear_cases import (
    HALVES,
    assert_close_to_oracle,
    gemv,
    linear_oracle,
    make_product,
    tile,
)

from gapless.kernels import linear
from gapless.kernels.linear import gate_up_silu, launch_product, small_linear
from gapless.kernels.linear_tiles import MAX_TOKENS, Product, Tiles

pytestmark = pytest.mark.usefixtures("poisoned_memory")
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)

GEMV = [gemv(4, 32, 1), gemv(8, 64, 1), gemv(8, 16, 2), gemv(4, 16, 3), gemv(8, 16, 4)]
TILE = [
    tile(16, 32, 1, 0),
    tile(16, 32, 1, 1),
    tile(32, 16, 1, 2),
    tile(16, 16, 4, 0),
    tile(16, 32, 2, 1),
    tile(16, 16, 2, 2),
]
SHAPES = [(64, 7), (41, 20), (1, 1), (130, 17)]
"""Input and output features."""


@interpreted
@pytest.mark.parametrize(("dtype", "has_bias"), list(zip(HALVES, (False, True), strict=True)))
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
@pytest.mark.parametrize(
    ("tiles", "num_tokens"),
    [*((t, n) for t in GEMV for n in (1, 3)), *((t, n) for t in TILE for n in (1, 9))],
)
def test_equals_float64(
    tiles: Tiles, num_tokens: int, num_in: int, num_out: int, has_bias: bool, dtype: torch.dtype
) -> None:
    x, weight, bias = make_product(num_tokens, num_in, num_out, dtype=dtype, has_bias=has_bias)
    out = launch_product(x, weight, bias, tiles, is_gated=False)
    assert_close_to_oracle(out, linear_oracle(x, weight, bias, is_gated=False))


@interpreted
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_in", "num_out"), [(64, 24), (41, 7), (33, 1)])
@pytest.mark.parametrize(
    ("tiles", "num_tokens"),
    [(gemv(8, 32, 2), 1), (gemv(4, 64, 1), 2), (tile(16, 16, 2, 1), 5), (tile(32, 32, 1, 0), 17)],
)
def test_gate_and_up_end_in_the_activation(
    tiles: Tiles, num_tokens: int, num_in: int, num_out: int, has_bias: bool, dtype: torch.dtype
) -> None:
    x, weight, bias = make_product(num_tokens, num_in, 2 * num_out, dtype=dtype, has_bias=has_bias)
    out = launch_product(x, weight, bias, tiles, is_gated=True)
    assert_close_to_oracle(out, linear_oracle(x, weight, bias, is_gated=True))


@interpreted
@pytest.mark.parametrize("num_tokens", [2, 4, 8, 15, 16, 17, 31, 32, 33, 64])
@pytest.mark.parametrize("is_gated", [False, True])
def test_every_number_of_tokens(num_tokens: int, is_gated: bool) -> None:
    x, weight, bias = make_product(num_tokens, 48, 20, dtype=torch.bfloat16, has_bias=True)
    out = launch_product(x, weight, bias, tile(16, 16, 2, 1), is_gated=is_gated)
    assert_close_to_oracle(out, linear_oracle(x, weight, bias, is_gated=is_gated))


@interpreted
@pytest.mark.parametrize("tiles", [gemv(8, 32, 2), tile(16, 16, 4, 1), tile(16, 32, 1, 0)])
def test_a_row_does_not_depend_on_its_neighbours(tiles: Tiles) -> None:
    x, weight, _ = make_product(4, 80, 24, dtype=torch.bfloat16, has_bias=False)
    others = x.clone()
    others[0] = float("nan")
    others[2:] = 1e4
    one = launch_product(x, weight, None, tiles, is_gated=False)
    two = launch_product(others, weight, None, tiles, is_gated=False)
    assert torch.equal(one[1], two[1])
    assert two[0].isnan().all()


@interpreted
@pytest.mark.parametrize("tiles", [gemv(8, 32, 1), tile(16, 16, 2, 1)])
def test_nothing_beyond_the_tensors_is_read(tiles: Tiles) -> None:
    """The memory behind each row of activations and behind the weights holds NaN."""
    around = torch.full((3, 64), float("nan"), dtype=torch.bfloat16)
    around[:2, :40] = torch.randn(2, 40)
    matrix = torch.full((19, 64), float("nan"), dtype=torch.bfloat16)
    matrix[:17, :40] = torch.randn(17, 40)
    x, weight = around[:2, :40], matrix[:17, :40]
    out = launch_product(x, weight, None, tiles, is_gated=False)
    torch.testing.assert_close(out, linear_oracle(x, weight, None, is_gated=False), atol=0.05, rtol=0.01)


@interpreted
@pytest.mark.parametrize("num_tokens", [1, 5, MAX_TOKENS, MAX_TOKENS + 1])
@pytest.mark.parametrize("is_gated", [False, True])
def test_the_operators_ask_for_the_shape_and_launch_the_answer(
    num_tokens: int, is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Product] = []

    def choose(product: Product, device: torch.device) -> Tiles | None:
        asked.append(product)
        return tile(16, 32, 1, 0) if product.num_tokens <= MAX_TOKENS else None

    monkeypatch.setattr(linear, "choose", choose)
    x, weight, bias = make_product(num_tokens, 48, 40, dtype=torch.bfloat16, has_bias=True)
    op = gate_up_silu if is_gated else small_linear
    out = op(x, weight, bias)
    assert_close_to_oracle(out, linear_oracle(x, weight, bias, is_gated=is_gated))
    if num_tokens > MAX_TOKENS and not is_gated:
        assert asked == []
    else:
        bucket = {1: 1, 5: 8, MAX_TOKENS: MAX_TOKENS, MAX_TOKENS + 1: 2 * MAX_TOKENS}[num_tokens]
        num_out = 20 if is_gated else 40
        assert asked == [
            Product(num_tokens=bucket, num_in=48, num_out=num_out, is_gated=is_gated, dtype=torch.bfloat16)
        ]


@interpreted
@pytest.mark.parametrize("is_gated", [False, True])
def test_without_tiles_the_library_multiplies(is_gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "choose", lambda product, device: None)
    monkeypatch.setattr(linear, "launch_product", None)
    x, weight, bias = make_product(3, 48, 40, dtype=torch.bfloat16, has_bias=True)
    out = (gate_up_silu if is_gated else small_linear)(x, weight, bias)
    assert_close_to_oracle(out, linear_oracle(x, weight, bias, is_gated=is_gated))


@pytest.mark.parametrize(("op", "num_out"), [(small_linear, 40), (gate_up_silu, 20)])
def test_no_rows_launch_nothing(op: object, num_out: int) -> None:
    out = op(torch.empty(0, 16), torch.randn(40, 16), None)  # type: ignore[operator]
    assert out.shape == (0, num_out)


@pytest.mark.parametrize(("op", "num_out"), [(small_linear, 40), (gate_up_silu, 20)])
def test_traced_calls_have_the_right_shape(op: object, num_out: int) -> None:
    x = torch.empty(3, 16, device="meta", dtype=torch.float16)
    out = op(x, torch.empty(40, 16, device="meta", dtype=torch.float16), None)  # type: ignore[operator]
    assert (out.shape, out.dtype) == ((3, num_out), torch.float16)

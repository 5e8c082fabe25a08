"""When a gated product of many tokens takes its own kernel: what was timed and stored, and nothing else."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gated_product_on_cpu import run_kernel
from linear_cases import linear_oracle

from gapless.kernels import linear, linear_tuner, matrices
from gapless.kernels.linear import gate_up_silu, small_linear
from gapless.kernels.linear_choice import choose, forget_stored_choices, store_choices
from gapless.kernels.linear_rules import default_gated_tiles, default_tiles
from gapless.kernels.linear_tiles import (
    MAX_GATED_IN_ROWS,
    MAX_GATED_TOKENS,
    MAX_TOKENS,
    GatedTiles,
    Product,
)
from gapless.kernels.linear_tuner import best_tiles, gated_candidates, tune_products
from gapless.kernels.matrices import Matrices, compile_products

CPU = torch.device("cpu")
RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "h200_gate_up_products.json"
TILES = GatedTiles(block_t=128, block_o=64, block_i=64, num_stages=2, shared_by=4, skew=1)


def make_product(num_tokens: int = 128, num_in: int = 256) -> Product:
    return Product(num_tokens=num_tokens, num_in=num_in, num_out=96, is_gated=True, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A store of its own, and a CPU that plays the kernel; numbers of tokens of its launches."""
    monkeypatch.setenv("GAPLESS_CACHE_DIR", str(tmp_path / "store"))
    forget_stored_choices()
    launches: list[int] = []

    def launch(x_TI: Tensor, weight_OI: Tensor, out_TO: Tensor, tiles: GatedTiles) -> None:
        launches.append(x_TI.shape[0])
        run_kernel(x_TI, weight_OI, out_TO, tiles, num_programs=2)

    monkeypatch.setattr(linear, "launch_gated", launch)
    for module in (linear, linear_tuner, matrices):
        monkeypatch.setattr(module, "can_run_gated", lambda device: True)
    yield launches
    forget_stored_choices()


def make_operands(num_tokens: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(num_tokens, 256).bfloat16(), torch.randn(192, 256).bfloat16()


def assert_right(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    torch.testing.assert_close(out, linear_oracle(x, weight, bias, is_gated=True), atol=0.5, rtol=0.02)


def test_what_was_stored_is_taken_for_its_bucket_alone(launched: list[int]) -> None:
    store_choices({make_product(128): TILES}, CPU)
    forget_stored_choices()
    assert choose(make_product(128), CPU) == TILES
    for num_tokens in (65, 100, 128, 129):
        x, weight = make_operands(num_tokens)
        assert_right(gate_up_silu(x, weight, None), x, weight, None)
    assert launched == [65, 100, 128]


def test_a_bias_rows_that_are_not_aligned_and_other_devices_take_two_steps(
    launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store_choices({make_product(128): TILES}, CPU)
    x, weight = make_operands(100)
    bias = torch.randn(192).bfloat16()
    assert_right(gate_up_silu(x, weight, bias), x, weight, bias)
    shifted = torch.randn(100, 257).bfloat16()[:, 1:]
    assert_right(gate_up_silu(shifted, weight, None), shifted, weight, None)
    monkeypatch.setattr(linear, "can_run_gated", lambda device: False)
    assert_right(gate_up_silu(x, weight, None), x, weight, None)
    assert small_linear(x, weight, None).shape == (100, 192)
    assert launched == []


@pytest.mark.parametrize("num_tokens", [128, 1024, MAX_GATED_TOKENS, 2 * MAX_GATED_TOKENS])
def test_without_timings_of_a_shape_the_library_multiplies(num_tokens: int) -> None:
    assert default_tiles(make_product(num_tokens)) is None
    assert default_gated_tiles(make_product(num_tokens)) is None


def test_the_built_in_table_says_what_was_measured() -> None:
    """Every entry took at most 0.98 of cuBLAS and the activation, and where there is none no tiles did."""
    results = json.loads(RESULT.read_text())["results"]
    names = {(128, 0): "128x128", (64, 4): "128x64 skewed"}
    for model, (num_in, num_out) in (("Qwen3-0.6B", (1024, 3072)), ("Llama-3.1-8B", (4096, 14336))):
        for num_tokens in (256, 512, 1024, 2048, 4096):
            product = replace(make_product(num_tokens, num_in), num_out=num_out)
            timed = {
                name: row["ours"][model][str(num_tokens)] for name, row in results.items() if "ours" in row
            }
            library = [
                row["cublas + silu"][model][str(num_tokens)] for row in results.values() if "cublas" in row
            ]
            chosen = default_gated_tiles(product)
            if chosen is None:
                assert min(timed.values()) > 0.98 * min(library)
            else:
                assert timed[names[chosen.block_o, chosen.skew]] <= 0.98 * min(library)
                assert chosen.fits(product)
            assert default_gated_tiles(replace(product, dtype=torch.float16)) is None


@pytest.mark.parametrize(
    "wrong",
    [{"skew": 2}, {"skew": -1}, {"num_stages": 5}, {"block_o": 96}, {"block_t": 0}, {"shared_by": 0}],
    ids=str,
)
def test_stored_tiles_with_which_the_kernel_would_wait_for_ever_are_not_used(
    wrong: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    store_choices({make_product(): replace(TILES, **wrong)}, CPU)
    forget_stored_choices()
    with caplog.at_level(logging.WARNING):
        assert choose(make_product(), CPU) is None
    assert "cannot be read" in caplog.text


def test_candidates_fill_their_ring() -> None:
    assert len(set(gated_candidates(make_product(num_in=1024)))) == 5
    assert list(gated_candidates(make_product(num_in=192))) == []
    assert list(gated_candidates(make_product(num_in=1001))) == []


def test_the_fastest_is_stored_for_every_bucket_and_compiled_once(launched: list[int]) -> None:
    """Timings are made up: what launches our kernel takes half as long with narrow tiles."""

    def timer(run: object) -> float:
        before = len(launched)
        run()  # type: ignore[operator]
        return 1.0 if len(launched) == before else 0.5

    weights = (torch.randn(192, 256).bfloat16(),)
    group = Matrices(weights=weights, bias=None, is_gated=True)
    product = make_product(256)
    best = best_tiles(product, weights, timer)
    assert best == next(iter(gated_candidates(product)))
    store_choices({make_product(tokens): TILES for tokens in (256, 512)}, CPU)
    launched.clear()
    compile_products([group])
    assert launched == [1, 1]
    biased = Matrices(weights=weights, bias=torch.zeros(192).bfloat16(), is_gated=True)
    compile_products([biased])
    unaligned = torch.randn(192 * 256 + 1).bfloat16()[1:].view(192, 256)
    compile_products([Matrices(weights=(unaligned,), bias=None, is_gated=True)])
    assert launched == [1, 1]


def test_with_a_bias_many_tokens_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_tuner, "best_tiles", lambda product, weights, timer: None)
    weights = (torch.randn(192, 256).bfloat16(),)
    plain = tune_products([Matrices(weights=weights, bias=None, is_gated=True)])
    biased = tune_products([Matrices(weights=weights, bias=torch.zeros(192), is_gated=True)])
    single = tune_products([Matrices(weights=weights, bias=None, is_gated=False)])
    assert max(p.num_tokens for p in plain) == MAX_GATED_TOKENS
    assert max(p.num_tokens for p in biased) == MAX_GATED_IN_ROWS
    assert max(p.num_tokens for p in single) == MAX_TOKENS

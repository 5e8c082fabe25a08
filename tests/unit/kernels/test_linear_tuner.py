"""The tuner: what it times, and what it stores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from product_shapes import CPU, make_product, make_summed

from gapless.kernels import linear_tuner
from gapless.kernels.linear_choice import choose, forget_stored_choices
from gapless.kernels.linear_rules import default_tiles
from gapless.kernels.linear_tiles import MAX_GATED_IN_ROWS, MAX_TOKENS, Tiles
from gapless.kernels.linear_tuner import best_tiles, candidates, tune_products
from gapless.kernels.matrices import Matrices

pytestmark = pytest.mark.usefixtures("own_store")


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("num_in", [1, 576, 4096, 14336])
@pytest.mark.parametrize("num_out", [1, 1024, 151936])
@pytest.mark.parametrize("is_gated", [False, True])
def test_candidates_fit_a_program(num_tokens: int, num_in: int, num_out: int, is_gated: bool) -> None:
    product = make_product(num_tokens, num_in=num_in, num_out=num_out, is_gated=is_gated)
    offered = list(candidates(product))
    assert 0 < len(offered) == len(set(offered))
    assert default_tiles(product) in (None, offered[0])
    for tiles in offered:
        for size in (tiles.block_o, tiles.block_i, tiles.split, tiles.num_warps):
            assert size & (size - 1) == 0
        assert 0 <= tiles.num_early <= 4
        if tiles.on_tensor_cores:
            stages = tiles.num_early + (tiles.num_stages if tiles.num_early == 0 else 0)
            columns = tiles.split * tiles.block_i
            assert (tiles.block_o + max(num_tokens, 8)) * columns * 2 * min(stages, 2) <= 227 * 1024
        else:
            assert tiles.block_o * tiles.block_i * tiles.num_early <= 1 << 15


@pytest.mark.parametrize("num_tokens", [1, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize(("num_in", "num_out"), [(2048, 1024), (3072, 1024), (4096, 4096), (576, 576)])
def test_candidates_in_parts_fit_a_program_and_are_not_too_many(
    num_tokens: int, num_in: int, num_out: int
) -> None:
    product = make_summed(num_tokens, num_in=num_in, num_out=num_out)
    offered = list(candidates(product))
    assert len(offered) == len(set(offered)) <= (55 if num_tokens <= 8 else 45)
    assert default_tiles(product) in (None, offered[0])
    for tiles in offered:
        assert tiles.fits(product)
        if tiles.parts > 1:
            columns = tiles.split * tiles.block_i
            assert (tiles.block_o + max(num_tokens, 8)) * columns * 2 <= 200_000
            assert tiles.prefetch == 0 or tiles.prefetch & (tiles.prefetch - 1) == 0
    if (num_in, num_out) == (2048, 1024):
        assert {tiles.parts for tiles in offered} >= ({1, 2, 4} if num_tokens <= 8 else {4, 8, 16})


def timer_that_prefers(monkeypatch: pytest.MonkeyPatch, ms: Callable[[Tiles | None], float]) -> list[Tiles]:
    """``timed`` lists what was launched; ``ms`` says how long it took (None: cuBLAS)."""
    timed: list[Tiles] = []
    launched: list[Tiles] = []

    def launch(x: object, weight: object, bias: object, tiles: Tiles, *, is_gated: bool) -> None:
        launched.append(tiles)

    def timer(run: Callable[[], None]) -> float:
        launched.clear()
        run()
        timed.extend(launched[:1])
        return ms(launched[0] if launched else None)

    monkeypatch.setattr(linear_tuner, "launch_product", launch)
    monkeypatch.setattr(linear_tuner, "time_in_graph", timer)
    return timed


@pytest.mark.parametrize("index", [0, 3, -1])
def test_the_fastest_candidate_wins(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    product = make_product(8, num_in=64, num_out=16)
    wanted = list(candidates(product))[index]
    timed = timer_that_prefers(monkeypatch, lambda tiles: 0.5 if tiles == wanted else 1.0)
    weights = (torch.randn(16, 64, dtype=torch.bfloat16),)
    assert best_tiles(product, weights, linear_tuner.time_in_graph) == wanted
    assert timed == list(candidates(product))


def test_the_library_wins_when_it_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    timer_that_prefers(monkeypatch, lambda tiles: 1.0 if tiles is None else 0.99)
    weights = (torch.randn(16, 64, dtype=torch.bfloat16),)
    product = make_product(8, num_in=64, num_out=16)
    assert best_tiles(product, weights, linear_tuner.time_in_graph) is None


@pytest.mark.parametrize("is_tritons", [True, False])
def test_a_candidate_that_does_not_fit_is_passed_over(
    is_tritons: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = make_product(8, num_in=64, num_out=16)
    error = RuntimeError("invalid argument")
    if is_tritons:
        errors = pytest.importorskip("triton.runtime.errors")
        error = errors.OutOfResources(245760, 232448, "shared memory")
    first, *_, last = candidates(product)

    def ms(tiles: Tiles | None) -> float:
        if tiles == first:
            raise error
        return 0.5 if tiles == last else 1.0

    timer_that_prefers(monkeypatch, ms)
    weights = (torch.randn(16, 64, dtype=torch.bfloat16),)
    assert best_tiles(product, weights, linear_tuner.time_in_graph) == last


def test_a_product_is_timed_with_the_norm_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with cuBLAS; the fastest is stored for every bucket there may be."""
    launched: list[Tiles] = []
    norms: list[torch.Size] = []
    timer = timer_that_prefers(monkeypatch, lambda tiles: 1.0)
    monkeypatch.setattr(
        linear_tuner, "fused_add_rms_norm", lambda update, residual, *end: norms.append(residual.shape)
    )
    monkeypatch.setattr(linear_tuner, "launch_summed", lambda *args: launched.append(args[-1]))

    def time(run: Callable[[], None]) -> float:
        launched.clear()
        run()
        return 1.0 if not launched else 0.5 if launched[0].parts == 4 else 0.9

    weight = torch.randn(1024, 2048, dtype=torch.bfloat16)
    group = Matrices(weights=(weight,), bias=None, is_gated=False, is_summed=True)
    choices = tune_products([group], timer=time)
    assert [p.num_tokens for p in choices] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert all(p.is_summed and tiles is not None and tiles.parts == 4 for p, tiles in choices.items())
    assert norms == [torch.Size([tokens, 1024]) for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    assert timer == []
    forget_stored_choices()
    assert {p: choose(p, CPU) for p in choices} == choices


def test_tuning_stores_a_choice_for_every_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    timer_that_prefers(monkeypatch, lambda tiles: 1.0 if tiles is None else 0.5)
    weight = torch.randn(32, 64, dtype=torch.bfloat16)
    groups = [Matrices(weights=(weight,), bias=None, is_gated=gated) for gated in (False, True)]
    choices = tune_products(groups)
    assert {(p.num_tokens, p.num_out, p.is_gated) for p in choices} == {
        (tokens, out, gated)
        for out, gated, most in ((32, False, MAX_TOKENS), (16, True, MAX_GATED_IN_ROWS))
        for tokens in (1, 2, 4, 8, 16, 32, 64, 128)
        if tokens <= most
    }
    forget_stored_choices()
    assert {p: choose(p, CPU) for p in choices} == choices

"""Which kernel multiplies: the built-in rule, the store of timings, and the tuner."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gapless.kernels import linear, linear_choice, linear_tuner, matrices, norm, select
from gapless.kernels.linear_choice import choose, forget_stored_choices, store_choices, store_path
from gapless.kernels.linear_rules import default_tiles
from gapless.kernels.linear_tiles import MAX_TOKENS, Product, Tiles, token_bucket
from gapless.kernels.linear_tuner import best_tiles, candidates, tune_products
from gapless.kernels.matrices import Matrices, compile_products
from gapless.models import fused
from gapless.models.layers import Linear

CPU = torch.device("cpu")
GEMV = Tiles(on_tensor_cores=False, block_o=8, block_i=1024, num_early=1, num_warps=4)
TILE = Tiles(on_tensor_cores=True, block_o=16, block_i=64, split=4, num_early=2, num_warps=4)


def make_product(num_tokens: int = 1, **changes: object) -> Product:
    fields = {"num_in": 1024, "num_out": 4096, "is_gated": False, "dtype": torch.bfloat16, **changes}
    return Product(num_tokens=num_tokens, **fields)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("triton")
    monkeypatch.setenv("GAPLESS_CACHE_DIR", str(tmp_path / "store"))
    forget_stored_choices()
    yield
    forget_stored_choices()


@pytest.mark.parametrize(
    ("num_tokens", "bucket"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (33, 64), (64, 64)]
)
def test_calls_of_a_bucket_share_a_choice(num_tokens: int, bucket: int) -> None:
    assert token_bucket(num_tokens) == bucket


def test_stored_choices_are_found_by_the_next_process() -> None:
    choices = {make_product(): GEMV, make_product(8, is_gated=True, dtype=torch.float16): TILE}
    store_choices({**choices, make_product(64): None}, CPU)
    forget_stored_choices()
    assert {p: choose(p, CPU) for p in choices} == choices
    assert choose(make_product(64), CPU) is None


def test_stored_choices_add_up() -> None:
    store_choices({make_product(1): GEMV}, CPU)
    store_choices({make_product(2): TILE}, CPU)
    forget_stored_choices()
    assert (choose(make_product(1), CPU), choose(make_product(2), CPU)) == (GEMV, TILE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        "null",
        '{"product": 1}',
        '[{"product": {}, "tiles": null}]',
        '[{"product": {"num_tokens": 1, "num_in": 1, "num_out": 1, "is_gated": false, "dtype": "x"}}]',
        '[{"product": {"num_tokens": "1", "num_in": 1, "num_out": 1, "is_gated": false, '
        '"dtype": "torch.float16"}, "tiles": null}]',
        '[{"product": {"num_tokens": 1, "num_in": 1, "num_out": 1, "is_gated": false, '
        '"dtype": "torch.float16"}, "tiles": {"block_o": 3}}]',
    ],
)
def test_a_damaged_store_costs_one_warning(text: str, caplog: pytest.LogCaptureFixture) -> None:
    store_path(CPU).parent.mkdir()
    store_path(CPU).write_text(text)
    with caplog.at_level(logging.WARNING):
        for num_tokens in (1, 2, 64):
            assert choose(make_product(num_tokens), CPU) == default_tiles_on_cpu(num_tokens)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(store_path(CPU)) in caplog.text


def default_tiles_on_cpu(num_tokens: int) -> Tiles | None:
    return linear_choice.built_in_choice(make_product(num_tokens), CPU)


@pytest.mark.parametrize(
    ("capability", "has_tiles"), [((8, 0), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)]
)
def test_the_built_in_rule_is_for_hopper_alone(
    capability: tuple[int, int], has_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tiles take up to 196,608 bytes of shared memory, of which others may have 101,376."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    select.is_hopper.cache_clear()
    try:
        tiles = linear_choice.built_in_choice(make_product(16), torch.device("cuda", 0))
    finally:
        select.is_hopper.cache_clear()
    assert (tiles is not None) is has_tiles


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GAPLESS_CACHE_DIR", str(tmp_path / "file" / "store"))
    with caplog.at_level(logging.WARNING):
        store_choices({make_product(): GEMV}, CPU)
    assert "cannot be stored" in caplog.text
    assert choose(make_product(), CPU) == GEMV


def test_a_store_belongs_to_one_gpu_and_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {store_path(CPU)}
    monkeypatch.setattr(linear_choice, "_device_name", lambda device: "another")
    paths.add(store_path(CPU))
    monkeypatch.setattr(torch, "__version__", "9.9")
    paths.add(store_path(CPU))
    monkeypatch.setattr(linear_choice, "_kernel_source", lambda: "other kernels")
    paths.add(store_path(CPU))
    assert len(paths) == 4


def test_a_store_does_not_change_under_a_running_process() -> None:
    before = choose(make_product(), CPU)
    other = GEMV if before != GEMV else TILE
    entry = {
        "product": {"num_tokens": 1, "num_in": 1024, "num_out": 4096, "is_gated": False,
                    "dtype": "torch.bfloat16"},
        "tiles": {"on_tensor_cores": other.on_tensor_cores, "block_o": other.block_o,
                  "block_i": other.block_i, "num_early": 1, "num_warps": 4},
    }  # fmt: skip
    store_path(CPU).parent.mkdir()
    store_path(CPU).write_text(json.dumps([entry]))
    assert choose(make_product(), CPU) == before
    forget_stored_choices()
    assert choose(make_product(), CPU) != before


def test_timings_made_later_do_not_change_what_graphs_were_captured_with() -> None:
    """A second engine in the process tunes again: the first one's graphs and eager runs must still agree."""
    store_choices({make_product(1): GEMV}, CPU)
    before = choose(make_product(1), CPU), choose(make_product(2), CPU)
    store_choices({make_product(1): TILE, make_product(2): GEMV, make_product(4): TILE}, CPU)
    assert (choose(make_product(1), CPU), choose(make_product(2), CPU)) == before
    assert choose(make_product(4), CPU) == TILE
    forget_stored_choices()  # the next process
    assert (choose(make_product(1), CPU), choose(make_product(2), CPU)) == (TILE, GEMV)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_early": 0},
        {"num_early": 5},
        {"on_tensor_cores": True, "num_early": 3},
        {"block_o": 0},
        {"block_o": 12},
        {"block_i": 96},
        {"split": 3},
        {"num_warps": 5},
        {"num_stages": 0},
        {"prefetch": -64},
    ],
    ids=str,
)
def test_stored_tiles_that_no_kernel_understands_are_not_used(
    wrong: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Some of them would leave columns out of the sums, or take them twice."""
    store_choices({make_product(): replace(GEMV, **wrong)}, CPU)
    forget_stored_choices()
    with caplog.at_level(logging.WARNING):
        assert choose(make_product(), CPU) is None
    assert "cannot be read" in caplog.text


PARTS = replace(TILE, parts=4)


def make_summed(num_tokens: int, **changes: object) -> Product:
    return make_product(num_tokens, **{"num_in": 2048, "num_out": 1024, "is_summed": True, **changes})


def test_parts_are_stored_for_products_that_a_norm_follows() -> None:
    store_choices({make_summed(256): PARTS, make_summed(128): None}, CPU)
    forget_stored_choices()
    assert (choose(make_summed(256), CPU), choose(make_summed(128), CPU)) == (PARTS, None)
    assert choose(make_summed(256, is_summed=False), CPU) is None


@pytest.mark.parametrize(
    ("product", "wrong"),
    [
        (make_product(16, num_in=2048), {}),  # nothing would add them up
        (make_summed(16), {"parts": 3}),
        (make_summed(16), {"parts": 0}),
        (make_summed(16), {"parts": 32}),
        (make_summed(16, num_in=2048 + 32), {}),  # a part would begin on 16 bytes
        (make_summed(1), {"on_tensor_cores": False}),
    ],
)
def test_stored_parts_that_no_kernel_adds_up_are_not_used(
    product: Product, wrong: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    store_choices({product: replace(PARTS, **wrong)}, CPU)
    forget_stored_choices()
    with caplog.at_level(logging.WARNING):
        assert choose(product, CPU) is None
    assert "cannot be read" in caplog.text


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_half_precision_has_tiles(dtype: torch.dtype) -> None:
    assert default_tiles(make_product(dtype=dtype)) is None


@pytest.mark.parametrize("num_in", [1, 7, 1000, 1001])
def test_rows_that_are_not_aligned_are_left_to_the_library(num_in: int) -> None:
    assert default_tiles(make_product(num_in=num_in)) is None
    assert default_tiles(make_product(num_in=1008)) is not None


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
        for tokens in (1, 2, 4, 8, 16, 32, MAX_TOKENS)
        for out, gated in ((32, False), (16, True))
    }
    forget_stored_choices()
    assert {p: choose(p, CPU) for p in choices} == choices


class RecordingKernel:
    def __init__(self) -> None:
        self.compiled: list[dict[str, object]] = []

    def warmup(self, *args: object, grid: tuple[int, ...], **constants: object) -> None:
        self.compiled.append(constants)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_kernels_of_every_bucket_are_compiled_before_they_are_needed(
    is_gated: bool, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemv, tile = RecordingKernel(), RecordingKernel()
    monkeypatch.setattr(linear, "_kernels", lambda: SimpleNamespace(gemv_kernel=gemv, tile_kernel=tile))
    built_in = {1: GEMV, **dict.fromkeys((2, 4, 8, 16, 32, 64), TILE)}
    monkeypatch.setattr(matrices, "choose", lambda p, device: built_in.get(p.num_tokens))
    weight, bias = torch.randn(32, 64).bfloat16(), torch.randn(32).bfloat16() if has_bias else None
    compile_products([Matrices(weights=(weight,), bias=bias, is_gated=is_gated)])
    assert [constants["NUM_TOKENS"] for constants in gemv.compiled] == [1]
    assert [constants["TOKENS_PAD"] for constants in tile.compiled] == [8, 16, 32, 64]  # each once
    for constants in (*gemv.compiled, *tile.compiled):
        assert (constants["IS_GATED"], constants["HAS_BIAS"]) == (is_gated, has_bias)
        assert constants["NUM_IN"] == 64


def test_kernels_in_parts_and_their_norms_are_compiled_before_they_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tile, norms = RecordingKernel(), RecordingKernel()
    monkeypatch.setattr(linear, "_kernels", lambda: SimpleNamespace(tile_kernel=tile))
    monkeypatch.setattr(norm, "kernels", lambda: SimpleNamespace(rms_norm_kernel=norms))
    stored = {16: PARTS, 128: replace(PARTS, parts=8), 256: replace(PARTS, parts=8)}
    monkeypatch.setattr(matrices, "choose", lambda p, device: stored.get(p.num_tokens))
    weights = (torch.randn(32, 256).bfloat16(),)
    compile_products([Matrices(weights=weights, bias=None, is_gated=False, is_summed=True)])
    assert [(c["TOKENS_PAD"], c["PARTS"]) for c in tile.compiled] == [(16, 4), (128, 8), (256, 8)]
    assert [c["NUM_PARTS"] for c in norms.compiled] == [4, 8]


@pytest.mark.parametrize("asked", [False, True])
def test_a_loaded_model_times_its_products_only_when_asked(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GAPLESS_TUNE_LINEAR", "1" if asked else "0")
    calls: list[tuple[str, list[tuple[int, bool, bool]]]] = []

    def note(name: str) -> Callable[[list[Matrices]], None]:
        return lambda groups: calls.append(
            (name, [(len(g.weights), g.is_gated, g.is_summed) for g in groups])
        )

    monkeypatch.setattr(linear_tuner, "tune_products", note("time"))
    monkeypatch.setattr(fused, "compile_products", note("compile"))
    blocks = [
        SimpleNamespace(
            attention=SimpleNamespace(qkv=make_linear(), out=make_linear()),
            mlp=SimpleNamespace(gate_up=make_linear(), down=make_linear()),
        )
        for _ in range(3)
    ]
    model = SimpleNamespace(
        blocks=blocks,
        lm_head=make_linear(),
        expert_layers=dict,
        shard=SimpleNamespace(is_whole=True),
        info=SimpleNamespace(num_deepstack=2),
    )
    fused.prepare_products(model)  # type: ignore[arg-type]
    qkv, out, gate_up, down = (3, False, False), (3, False, True), (3, True, False), (3, False, True)
    down_with_media, head = (2, False, False), (1, False, False)
    products = [qkv, out, gate_up, down, down_with_media, head]
    assert calls == [("time", products), ("compile", products)][0 if asked else 1 :]


def make_linear() -> Linear:
    return Linear(torch.nn.Parameter(torch.randn(4, 4), requires_grad=False))

"""Encoder graphs on a real GPU: the cases of the unit tests, the compiled kernel, and real pools."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_cases import (
    CONFIGS,
    GRIDS,
    assert_close,
    assert_equal,
    check_random_sets,
    fill,
    media,
    of_transformers,
    runner_of,
    tiny_tower,
)
from gapless.attention.varlen import Segments, create_varlen_backend
from gapless.errors import ConfigError
from gapless.graphs.device import get_device
from gapless.graphs.encoder import EncoderFallback, EncoderMode, EncoderOptions, EncoderRunner
from gapless.graphs.encoder_budgets import DEFAULT_FINE_FROM, budget_ladder
from gapless.graphs.modes import Phase
from gapless.kernels.launch import is_compiling_ahead
from gapless.kernels.select import is_hopper
from gapless.models.vision.fused import feed_forward
from gapless.models.vision.tower import VisionTower, make_tower

pytestmark = pytest.mark.gpu

TOWERS = sorted(CONFIGS)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


@pytest.fixture(scope="module")
def cuda() -> Any:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return get_device("cuda")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_size", [64, 72, 80, 96, 128])
@pytest.mark.parametrize("name", ["triton_varlen", "torch_varlen", "torch_reference", "torch_segments"])
def test_every_attention_equals_dense_attention(name: str, head_size: int, dtype: torch.dtype, cuda) -> None:
    if name == "torch_varlen":
        if dtype == torch.float32:
            pytest.skip("half precision only")
        try:
            create_varlen_backend(name, device_type="cuda")
        except ConfigError as error:
            pytest.skip(str(error))
    check_attention(name, head_size, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_size", "first"), [(72, 1), (72, 4), (68, 0), (36, 0), (64, 1), (128, 1)])
def test_heads_that_are_not_read_16_bytes_at_a_time(head_size: int, first: int, dtype, cuda) -> None:
    """``first``: the element of the buffer that the rows start at. Loads that are not asynchronous make other
    kernels, one of which the assembler got wrong."""
    check_attention("triton_varlen", head_size, dtype, first=first)


def check_attention(name: str, head_size: int, dtype: torch.dtype, *, first: int = 0) -> None:
    lens, num_rows = (256, 3, 64, 1, 700), 1100
    buffer = torch.randn(num_rows * 12 * head_size + first, device="cuda").to(dtype)
    qkv = buffer[first:].view(num_rows, 3, 4, head_size)
    qkv[sum(lens) :] = float("nan")
    query, key, value = qkv.unbind(1)
    filled = torch.tensor([*lens, *[0] * 11], dtype=torch.int32, device="cuda")
    starts = torch.nn.functional.pad(filled.cumsum(0, dtype=torch.int32), (1, 0))
    segments = Segments(cu_seqlens=starts, cu_seqlens_kk=filled, max_len=1100, lengths=lens)
    backend = create_varlen_backend(name, device_type="cuda")
    out = torch.full((num_rows, 4, head_size), float("nan"), device="cuda", dtype=dtype)
    backend.attend(query, key, value, out, backend.arguments(segments), scale=0.125)
    first = 0
    for length in lens:
        own = slice(first, first + length)
        score = torch.einsum("qhd,khd->hqk", query[own].double(), key[own].double()) * 0.125
        expected = torch.einsum("hqk,khd->qhd", score.softmax(-1), value[own].double())
        torch.testing.assert_close(out[own].double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        first += length
    assert (out[first:] == 0).all()


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("attention", ["triton_varlen", "torch_reference", "torch_segments"])
@pytest.mark.parametrize("model_type", TOWERS)
def test_towers_equal_transformers(model_type: str, attention: str, is_fused: bool, cuda) -> None:
    tower = tiny_tower(model_type, device=cuda, attention=attention, is_fused=is_fused)
    runner = EncoderRunner(tower, device=cuda, options=EncoderOptions(mode=EncoderMode.OFF))
    items = [media(tower, grid) for grid in GRIDS]
    assert_close(runner.eager(items), [of_transformers(tower, item) for item in items])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gelu_in_the_product_is_as_near_as_behind_it(dtype: torch.dtype, cuda) -> None:
    config = {**CONFIGS["qwen3_vl"], "hidden_size": 144, "intermediate_size": 536}
    tower = make_tower("qwen3_vl", config, dtype=dtype, device=cuda.torch_device)
    fill(tower)
    mlp: Any = tower.module.blocks[0].mlp  # type: ignore[index, union-attr]
    assert hasattr(mlp, "activates_in_product") == is_hopper(cuda.torch_device)
    hidden = torch.randn(300, 144, device="cuda", dtype=dtype)
    first, second = mlp.linear_fc1, mlp.linear_fc2
    inner = torch.nn.functional.linear(hidden.double(), first.weight.double(), first.bias.double())
    inner = torch.nn.functional.gelu(inner, approximate="tanh")
    expected = torch.nn.functional.linear(inner, second.weight.double(), second.bias.double())
    with torch.no_grad():
        within, behind = (
            float((found.double() - expected).norm()) for found in (feed_forward(mlp, hidden), mlp(hidden))
        )
    assert within <= 1.25 * behind


@pytest.mark.parametrize("mode", ["budget", "exact"])
@pytest.mark.parametrize(("attention", "is_fused"), [("triton_varlen", True), ("torch_reference", False)])
@pytest.mark.parametrize("model_type", TOWERS)
def test_graphs_equal_their_oracle_on_random_sets(model_type, attention, is_fused, mode, cuda) -> None:
    tower = tiny_tower(model_type, device=cuda, attention=attention, is_fused=is_fused)
    runner = runner_of(tower, mode, device=cuda)
    check_random_sets(runner, count=60, seed=1)
    assert not runner.report()["failures"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", ["triton_varlen", "torch_varlen"])
@pytest.mark.parametrize("model_type", TOWERS)
def test_half_precision_graphs_equal_their_oracle(model_type, attention, dtype, cuda) -> None:
    try:
        tower = tiny_tower(model_type, device=cuda, attention=attention, dtype=dtype)
    except ConfigError as error:
        pytest.skip(str(error))
    for mode in ("budget", "exact"):
        runner = runner_of(tower, mode, device=cuda)
        items = [media(tower, grid) for grid in GRIDS]
        assert_equal(runner.run(items), runner.padded_eager(items))
        runner.release()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("mode", ["budget", "exact"])
@pytest.mark.parametrize("model_type", TOWERS)
def test_graphs_make_the_same_of_pixels_and_of_their_values(model_type, mode, dtype, cuda) -> None:
    runner = runner_of(tiny_tower(model_type, device=cuda, dtype=dtype), mode, device=cuda)
    pixels = [media(runner.adapter, grid, is_pixels=True) for grid in GRIDS]
    values = [replace(item, patches_PC=item.values_PC(), normalisation=None) for item in pixels]
    expected = runner.run(values)
    assert_equal(runner.run(pixels), expected)
    assert_equal(runner.run([*values[:3], *pixels[3:]]), expected)
    assert_equal(runner.padded_eager(pixels), expected)
    assert runner._memory is not None
    runner._memory.inputs.poison = True
    assert_equal(runner.run(pixels), expected)


def test_nothing_is_compiled_for_pixels_after_the_start(cuda, monkeypatch) -> None:
    from triton.runtime.jit import JITFunction

    runner = runner_of(tiny_tower("qwen3_vl", device=cuda), "budget", device=cuda)
    monkeypatch.setattr(JITFunction, "_do_compile", None)
    runner.run([media(runner.adapter, grid, is_pixels=True) for grid in ((1, 4, 4), (3, 2, 4))])


@pytest.mark.parametrize("model_type", TOWERS)
def test_warm_ups_find_every_kernel_compiled_and_its_launcher_built(
    model_type: str, cuda: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With Triton's store empty, and sizes that no other tower of this process has."""
    from triton.runtime import build
    from triton.runtime.jit import JITFunction

    late: list[str] = []
    compile_one, build_c = JITFunction._do_compile, build._build

    def compiled(kernel: Any, *arguments: Any) -> Any:
        if not is_compiling_ahead():
            late.append(kernel.fn.__name__)
        return compile_one(kernel, *arguments)

    def built(name: str, *arguments: Any) -> str:
        if threading.current_thread() is threading.main_thread():
            late.append(name)
        return build_c(name, *arguments)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    monkeypatch.setattr(build, "_build", built)
    config = {**CONFIGS[model_type], "hidden_size": 96, "intermediate_size": 208}
    tower = make_tower(model_type, config, dtype=torch.bfloat16, device=cuda.torch_device)
    fill(tower)
    with runner_of(tower, "budget", device=cuda, max_tokens=2048, smallest_budget=64) as runner:
        ladder = budget_ladder(smallest=64, largest=2048, granule=4, fine_from=DEFAULT_FINE_FROM)
        assert len(runner.report()["graphs"]) == len(ladder)
        assert late == []
        assert list(tmp_path.rglob("__triton_launcher*.so"))
        items = [media(tower, grid, is_pixels=True) for grid in GRIDS]
        assert_equal(runner.run(items), runner.padded_eager(items))
        assert late == []


@pytest.mark.parametrize("mode", ["budget", "exact"])
@pytest.mark.parametrize("model_type", TOWERS)
def test_small_large_small_and_poisoned_padding(model_type, mode, cuda) -> None:
    runner = runner_of(tiny_tower(model_type, device=cuda), mode, device=cuda)
    tower = runner.adapter
    small, large = media(tower, (1, 2, 2)), media(tower, (1, 8, 14))
    before = runner.run([small])
    assert runner._memory is not None
    runner._memory.inputs.poison = True
    runner.run([large])
    assert_equal(runner.run([small]), before)


@pytest.mark.parametrize("attention", ["triton_varlen", "torch_reference"])
@pytest.mark.parametrize("model_type", TOWERS)
def test_an_image_that_is_no_numbers_spoils_no_other(model_type, attention, cuda) -> None:
    tower = tiny_tower(model_type, device=cuda, attention=attention)
    runner = runner_of(tower, "budget", device=cuda)
    items = [media(tower, grid, seed=7) for grid in ((1, 4, 4), (1, 2, 4), (2, 2, 4))]
    clean = runner.run(items)
    broken = media(tower, (1, 2, 4), seed=7)
    broken.patches_PC[3, 5] = float("nan")
    got = runner.run([items[0], broken, items[2]])
    assert_equal([got[0], got[2]], [clean[0], clean[2]])
    assert not any(row.isfinite().all() for row in got[1])
    assert_equal(runner.run(items), clean)


@pytest.mark.parametrize("model_type", TOWERS)
def test_eviction_under_live_use_gives_memory_back(model_type, cuda) -> None:
    runner = runner_of(tiny_tower(model_type, device=cuda), "exact", device=cuda, max_graphs=3)
    items = [media(runner.adapter, grid) for grid in GRIDS[:7]]
    kept = runner.run(items)
    for _ in range(3):
        assert_equal(runner.run(items), kept)
        assert len(runner.report()["graphs"]) <= 3
    assert runner.summary()["evictions"] >= 6
    assert_close(kept, runner.eager(items))


def test_budgets_are_timed_and_items_packed_by_what_replays_cost(cuda) -> None:
    runner = runner_of(tiny_tower("qwen3_vl", device=cuda), "budget", device=cuda)
    budgets = runner.summary()["budgets"]
    assert all(0 < budget["cost"] < 1 for budget in budgets)  # seconds
    ledger = runner.report()["graphs"]
    assert all(row["replays"] == 0 for row in ledger)  # the timing is no traffic
    runner.run([media(runner.adapter, (1, 2, 4), seed=seed) for seed in range(8)])
    assert sum(count.count for count in runner.log.replays.values()) == 1


def with_a_host_read_at(tokens: int, tower: VisionTower, monkeypatch: pytest.MonkeyPatch) -> EncoderRunner:
    """Budgets of 32, 64 and 128 tokens, of which one cannot be captured."""
    forward = tower.forward

    def reads(run: Any) -> Any:
        if run.sizes["tokens"] == tokens:
            run["position_ids"].sum().item()
        return forward(run)

    monkeypatch.setattr(tower, "forward", reads)
    runner = runner_of(tower, "budget", device=get_device("cuda"))
    assert {row["num_tokens"] for row in runner.report()["graphs"]} == {32, 64, 128} - {tokens}
    assert len(runner.report()["failures"]) == 1
    return runner


def replayed(runner: EncoderRunner) -> dict[int, int]:
    return {bucket: counts.count for (_, _, bucket), counts in runner.log.replays.items()}


def test_a_host_read_in_a_tower_leaves_budgets_eager(cuda, monkeypatch) -> None:
    tower = tiny_tower("qwen3_vl", device=cuda)
    runner = with_a_host_read_at(128, tower, monkeypatch)
    large, small = media(tower, (1, 10, 8)), media(tower, (1, 4, 4))  # 80 patches fit no other budget
    got = runner.run([large]) + runner.run([small])
    assert_close(got, runner.eager([large, small]))
    assert dict(runner.log.eager) == {(Phase.ENCODER, EncoderFallback.CAPTURE_FAILED): 1}
    assert sum(replayed(runner).values()) == 1


def test_a_larger_graph_serves_a_failed_budget_where_it_is_cheaper(cuda, monkeypatch) -> None:
    """In a tower this small it is: its replays take what their launches take, whatever the budget."""
    tower = tiny_tower("qwen3_vl", device=cuda)
    runner = with_a_host_read_at(64, tower, monkeypatch)
    middle = media(tower, (1, 10, 6))
    assert_close(runner.run([middle]), runner.eager([middle]))
    cost = {budget["tokens"]: budget["cost"] for budget in runner.summary()["budgets"]}
    if cost[128] < cost[64]:
        assert (replayed(runner), dict(runner.log.eager)) == ({128: 1}, {})
    else:
        assert replayed(runner) == {}
        assert dict(runner.log.eager) == {(Phase.ENCODER, EncoderFallback.CAPTURE_FAILED): 1}

"""Mixtures of experts on a real GPU: compiled kernels against float64, one captured graph for every routing,
and engines under every strategy."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gapless.config import EngineConfig
from gapless.engine.build import OpenedEngine, open_engine
from gapless.engine.core import EngineCore
from gapless.engine.outputs import RequestOutput
from gapless.errors import ModelError
from gapless.kernels import moe, moe_sum
from gapless.kernels.norm import fused_add_rms_norm
from gapless.models.grouped_experts import choose_experts, grouped_experts
from gapless.models.moe_config import MOE_OP
from gapless.sampling.params import SamplingParams
from moe_oracles import Case, error_bound, make_inputs, mixture, mixture_oracle, route, route_oracle

pytestmark = pytest.mark.gpu

SIZES = {"num_experts": 32, "top_k": 4, "hidden": 256, "size": 192}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BATCHES = {
    "one token": {"num_tokens": 1, "real": (0, 1)},
    "a few": {"num_tokens": 13, "real": (2, 11)},
    "decode": {"num_tokens": 32, "real": (0, 27)},
    "two chunks": {"num_tokens": 64, "real": (5, 64)},
    "prefill": {"num_tokens": 300, "real": (0, 290)},
    "a lot": {"num_tokens": 1500, "real": (100, 1400)},
    "all to one": {"num_tokens": 200, "real": (0, 200), "only_expert": 31},
    "large experts": {"num_tokens": 64, "real": (0, 60), "num_experts": 8, "top_k": 2, "size": 2048},
    "groups of blocks": {"num_tokens": 700, "real": (3, 700), "num_experts": 4, "top_k": 2, "size": 520},
    "odd sizes": {"num_tokens": 33, "real": (0, 33), "num_experts": 60, "hidden": 72, "size": 40},
}


def make_case(batch: dict[str, Any], dtype: torch.dtype) -> Case:
    return Case(**{**SIZES, **batch}, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_kernels_equal_float64(batch: dict[str, Any], dtype: torch.dtype) -> None:
    case = make_case(batch, dtype)
    inputs = make_inputs(case)
    weights, experts = route(case, inputs)[:2]
    expected_weights, expected_experts = route_oracle(case, inputs.logits_TN)
    # In half precision logits tie; then any order of the same probabilities is right.
    torch.testing.assert_close(weights[case.rows].double(), expected_weights, atol=1e-5, rtol=1e-4)
    if dtype is torch.float32:
        assert torch.equal(experts[case.rows].long(), expected_experts)
    out, expected = mixture(case, inputs), mixture_oracle(case, inputs)
    error = (out.double() - expected).norm() / expected.norm()
    assert error < error_bound(case), error
    is_padding = torch.ones(case.num_tokens, dtype=torch.bool, device="cuda")
    is_padding[case.rows] = False
    assert not out[is_padding].any()
    assert torch.equal(out, mixture(case, inputs)), "the same bits in every run"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_graph_serves_every_routing_and_number_of_real_tokens(dtype: torch.dtype) -> None:
    case = make_case(BATCHES["two chunks"], dtype)
    static = make_inputs(case)
    mixture(case, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mixture(case, static)
    for seed, real in enumerate([(0, 64), (0, 1), (10, 40), (64, 64)], start=1):
        fresh_case = make_case({**BATCHES["two chunks"], "real": real}, dtype)
        fresh = make_inputs(fresh_case, seed=seed)
        for name in ("x_TE", "logits_TN", "gate_up_NOE", "down_NEF", "query_start_loc"):
            getattr(static, name).copy_(getattr(fresh, name))
        graph.replay()
        assert torch.equal(out, mixture(fresh_case, fresh))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2048, 72])
@pytest.mark.parametrize("has_shared", [False, True])
def test_sum_and_norm_in_one_kernel_are_the_bits_of_two(
    has_shared: bool, size: int, dtype: torch.dtype
) -> None:
    """Cuts and breaks use the two, full graphs the one."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda")

    by_slot, residual, weight = normal(33 * 8, size), normal(33, size), normal(size)
    shared = (normal(33, size), normal(33, 1)) if has_shared else (None, None)
    by_slot[: 2 * 8], by_slot[-8:] = torch.nan, torch.nan
    terms = (by_slot, torch.tensor([2, 5, 32], dtype=torch.int32, device="cuda"), *shared)
    update = torch.full_like(residual, torch.nan)
    with torch.no_grad():
        moe_sum.combine_experts(*terms, update)
        expected = fused_add_rms_norm(update, residual, weight, 1e-6)
        found = moe_sum.combine_add_rms_norm(*terms, residual, weight, 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not update[:2].any()


def test_grouped_mm_equals_the_kernels_and_is_captured() -> None:
    case = make_case(BATCHES["prefill"], torch.bfloat16)
    inputs = make_inputs(case)
    row_T = torch.arange(case.num_tokens, device="cuda")
    is_real_T = (row_T >= case.real[0]) & (row_T < case.real[1])

    def by_grouped_mm() -> tuple[Tensor, Tensor]:
        weights, experts = choose_experts(inputs.logits_TN, is_real_T, top_k=case.top_k, renormalizes=True)
        return grouped_experts(inputs.x_TE, inputs.gate_up_NOE, inputs.down_NEF, weights, experts)

    with torch.no_grad():
        by_grouped_mm()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, counts = by_grouped_mm()
    graph.replay()
    expected = mixture_oracle(case, inputs)
    assert (out.double() - expected).norm() / expected.norm() < 4 * torch.finfo(torch.bfloat16).eps
    assert counts.tolist() == route(case, inputs)[4].tolist()


# --- engines ---------------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "eos_token_id": 2,
}
QWEN2 = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "shared_expert_intermediate_size": 512,
}
NAMED = {"splitting_ops": [MOE_OP]}
CASES = [
    ("full", {}, "bfloat16", {}),
    ("full", {}, "float16", {}),
    ("full", {}, "bfloat16", QWEN2),
    ("breakable", {}, "bfloat16", {}),
    ("breakable", NAMED, "bfloat16", {}),
    ("tc_piecewise", {}, "bfloat16", {}),
    ("tc_piecewise", {"splitting_ops": ["gapless::attention_layer"]}, "bfloat16", {}),
]


def open_moe(
    folder: Path, strategy: str, compilation: dict[str, Any], dtype: str, changes: dict[str, Any]
) -> OpenedEngine:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return open_engine(
        EngineConfig.from_sources(
            python={
                "model": str(folder),
                "load_format": "dummy",
                "device": "cuda",
                "dtype": dtype,
                "max_running_requests": 8,
                "chunked_prefill_size": 256,
                "kv_cache_tokens": 4096,
                "count_expert_tokens": True,
                "cuda_graph_backend_prefill": strategy,
                "cuda_graph_backend_decode": strategy,
                "cuda_graph_bs_prefill": [16, 64, 256],
                "cuda_graph_bs_decode": [1, 4, 8],
                "compilation_config": compilation,
            }
        )
    )


LENGTHS, NUM_NEW = (3, 70, 400, 20, 9), 8


def generate(opened: OpenedEngine) -> list[list[int]]:
    rng, core = random.Random(0), EngineCore(opened.runner)
    for index, length in enumerate(LENGTHS):
        params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False)
        core.add_request(str(index), [rng.randrange(4096) for _ in range(length)], params)
    last: dict[str, RequestOutput] = {}
    while core.has_unfinished():
        last.update((output.request_id, output) for output in core.step())
    return [list(last[str(index)].outputs[0].token_ids) for index in range(len(LENGTHS))]


@pytest.mark.parametrize(("strategy", "compilation", "dtype", "changes"), CASES)
def test_graphs_equal_padded_eager_and_count_real_tokens(
    strategy: str, compilation: dict[str, Any], dtype: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    opened = open_moe(tmp_path, strategy, compilation, dtype, changes)
    opened.runner.graphs.keeps_logits = True
    opened.runner.max_steps_ahead = 0  # a step ahead would count tokens that are dropped
    with_graphs = generate(opened)
    report = opened.runner.report()
    assert not report["eager"]
    assert not report["failures"]
    num_tokens = sum(LENGTHS) + len(LENGTHS) * (NUM_NEW - 1)
    assert [sum(row["tokens"]) for row in report["experts"]] == [num_tokens * 4] * 3
    logits = opened.runner._graphs.logits.clone()
    with opened.runner.padded_eager():
        assert generate(opened) == with_graphs
    assert torch.equal(opened.runner._graphs.logits, logits)
    opened.runner.shutdown()


def test_grouped_mm_in_the_engine_is_bfloat16_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAPLESS_MOE_BACKEND", "grouped_mm")
    monkeypatch.setattr(moe, "launch_expert_product", lambda *args, **kwargs: pytest.fail("our kernels ran"))
    with pytest.raises(ModelError, match="with float16 it copies offsets to the host"):
        open_moe(tmp_path, "full", {}, "float16", {})
    opened = open_moe(tmp_path, "full", {}, "bfloat16", {})
    opened.runner.max_steps_ahead = 0
    with_graphs = generate(opened)
    assert not opened.runner.report()["eager"]
    with opened.runner.padded_eager():
        assert generate(opened) == with_graphs
    opened.runner.shutdown()

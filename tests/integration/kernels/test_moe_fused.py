"""Mixtures of experts on fused kernels (interpreted) in the decoder and the engine: as the torch path, with
the wish for ``grouped_mm`` granted, and graphs equal to padded eager."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gapless.attention.torch_reference import TorchReferenceBackend
from gapless.config import EngineConfig
from gapless.engine.build import open_engine
from gapless.engine.core import EngineCore
from gapless.errors import ConfigError, ModelError
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.models import decoder, moe
from gapless.models.config import parse_config
from gapless.models.decoder import Decoder
from gapless.models.dummy import fill_dummy_weights
from gapless.models.grouped_experts import why_no_grouped_mm
from gapless.models.moe_config import MOE_OP
from gapless.sampling.params import SamplingParams
from kernel_oracles import assert_close_to
from ragged_batches import make_batch

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3, one dense layer": {"mlp_only_layers": [0]},
    "qwen2": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 24,
    },
}


def run_layers(
    changes: dict[str, Any], dtype: torch.dtype, *, fused: bool, is_break: bool = False
) -> tuple[Tensor, Tensor, Decoder]:
    """Hidden states of a padded batch: of the real tokens, and what the mixture of the last layer makes of
    NaN-poisoned padding."""
    config = parse_config({**CONFIG, **changes}, source="test")
    model = Decoder(config, max_positions=64, dtype=dtype, device=CPU)
    fill_dummy_weights(model, seed=0)
    for layer in model.expert_layers().values():
        layer.router.weight.mul_(50)  # apart from each other, so that rounding moves no choice
        layer.start_counting()
        layer.is_break = is_break
    batch = make_batch(
        [(0, 5), (7, 1), (0, 0), (3, 2)], num_heads=4, num_kv_heads=2, head_size=8, pad_tokens=2, dtype=dtype
    )
    for attention in model.attention_layers():
        attention.bind(TorchReferenceBackend(), batch.k_cache.clone(), batch.v_cache.clone())
    model.has_fused_kernels = fused
    positions = torch.tensor([0, 1, 2, 3, 4, 7, 3, 4, 0, 0], dtype=torch.int32)
    with torch.no_grad(), use_forward_context(ForwardContext(batch=batch.metadata)):
        hidden = model.embed(torch.arange(10, dtype=torch.int32) * 3)
        hidden[batch.num_real_tokens :] = torch.nan
        out = model.layers(hidden, positions)
        mixture = model.expert_layers()[1]
        ends = (mixture.fused if fused else mixture)(hidden)[batch.num_real_tokens :]
    return out[: batch.num_real_tokens], ends, model


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.float32) for family in FAMILIES), ("qwen3", torch.bfloat16), ("qwen2", torch.float16)],
)
def test_fused_layers_equal_the_torch_path_and_padding_reaches_no_expert(
    family: str, dtype: torch.dtype
) -> None:
    expected, expected_ends, torch_model = run_layers(FAMILIES[family], dtype, fused=False)
    actual, ends, model = run_layers(FAMILIES[family], dtype, fused=True)
    assert actual.isfinite().all()
    assert_close_to(actual, expected, ulps=8, fraction=0.5)
    assert not ends.any()
    assert not expected_ends.any()
    counts = [[layer.counts_N.tolist() for layer in m.expert_layers().values()] for m in (model, torch_model)]
    assert counts[0] == counts[1]
    assert {sum(layer) for layer in counts[0][:-1]} <= {8 * 2}
    assert sum(counts[0][-1]) == 2 * 8 * 2, "the last one ran twice"


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_a_block_that_ends_in_the_next_norm_gives_the_bits_of_one_that_cannot(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart, _, model = run_layers(FAMILIES[family], torch.bfloat16, fused=True, is_break=True)
    monkeypatch.setattr(moe, "_compute", lambda *args: pytest.fail("not joined"))
    monkeypatch.setattr(moe.MixtureOfExperts, "fused", lambda self, hidden: hidden)
    joined, _, same = run_layers(FAMILIES[family], torch.bfloat16, fused=True)
    assert torch.equal(joined, apart)
    first, again = (m.expert_layers()[0].counts_N for m in (model, same))
    assert torch.equal(first, again)


def test_graphs_of_the_kernels_equal_padded_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill breaks at the mixture, decode holds it."""
    monkeypatch.setattr(decoder, "has_fused_kernels", lambda device: True)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    opened = open_engine(
        EngineConfig.from_sources(
            python={
                "model": str(tmp_path),
                "load_format": "dummy",
                "device": "cpu",
                "max_running_requests": 2,
                "chunked_prefill_size": 8,
                "kv_cache_tokens": 32 * 16,
                "cuda_graph_backend_prefill": "breakable",
                "cuda_graph_backend_decode": "full",
                "cuda_graph_bs_prefill": [8],
                "cuda_graph_bs_decode": [2],
                "compilation_config": {"splitting_ops": [MOE_OP]},
            }
        )
    )

    opened.runner.graphs.keeps_logits = True

    def generate() -> tuple[list[int], list[Tensor]]:
        core, rng = EngineCore(opened.runner), random.Random(0)
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
        core.add_request("0", [rng.randrange(61) for _ in range(5)], params)
        logits, outputs = [], []
        while core.has_unfinished():
            outputs += core.step()
            logits.append(opened.runner._graphs.logits.clone())
        return list(outputs[-1].outputs[0].token_ids), logits

    tokens, logits = generate()
    assert opened.runner.report()["eager"] == []
    with opened.runner.padded_eager():
        eager_tokens, eager_logits = generate()
    assert tokens == eager_tokens
    assert all(torch.equal(a, b) for a, b in zip(logits, eager_logits, strict=True))


def test_grouped_mm_is_taken_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAPLESS_MOE_BACKEND", "grouped_mm")
    monkeypatch.setattr(moe, "route_tokens", lambda *args: pytest.fail("the kernels ran"))
    expected, _, _ = run_layers({}, torch.float32, fused=False)
    actual, ends, _ = run_layers({}, torch.float32, fused=True)
    assert_close_to(actual, expected)
    assert not ends.any()


def test_a_wish_that_cannot_be_granted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config(CONFIG, source="test")
    monkeypatch.setenv("GAPLESS_MOE_BACKEND", "triton")
    with pytest.raises(ConfigError, match="GAPLESS_MOE_BACKEND=triton: cpu has no Triton"):
        Decoder(config, max_positions=8, dtype=torch.float32, device=CPU)
    monkeypatch.setenv("GAPLESS_MOE_BACKEND", "cutlass")
    with pytest.raises(ConfigError, match="GAPLESS_MOE_BACKEND=cutlass: must be one of triton, grouped_mm"):
        Decoder(config, max_positions=8, dtype=torch.float32, device=CPU)
    monkeypatch.delenv("GAPLESS_MOE_BACKEND")
    odd = parse_config({**CONFIG, "moe_intermediate_size": 18}, source="test")
    with pytest.raises(ModelError, match="the intermediate size=18 makes rows of 72 bytes in float32"):
        Decoder(odd, max_positions=8, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("device", "dtype", "why"),
    [
        ("cuda", torch.bfloat16, None),
        ("cuda", torch.float16, "with float16 it copies offsets to the host"),
        ("cuda", torch.float32, "in bfloat16 only"),
        ("cpu", torch.float16, None),
    ],
)
def test_grouped_mm_has_reasons(device: str, dtype: torch.dtype, why: str | None) -> None:
    reason = why_no_grouped_mm(device=torch.device(device), dtype=dtype, hidden_size=64, intermediate_size=32)
    assert (reason is None) if why is None else (why in (reason or ""))

"""Mixtures of experts through the engine: every strategy equals padded eager bit for bit, padding is in no
count, and the block is a cut, a break or neither, as asked."""

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
from gapless.engine.rules import capabilities_for
from gapless.errors import ConfigError
from gapless.graphs.capabilities import GraphRequest
from gapless.graphs.modes import Phase, Strategy
from gapless.graphs.plan import resolve
from gapless.models.base import ModelInfo
from gapless.models.moe_config import MOE_OP
from gapless.sampling.params import SamplingParams

LAYERS, EXPERTS, TOP_K = 2, 6, 2
CONFIG: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "num_experts_per_tok": TOP_K,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": EXPERTS,
        "moe_intermediate_size": 24, "norm_topk_prob": True,
    },
    "qwen2": {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": EXPERTS,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": EXPERTS,
    },
}  # fmt: skip
STRATEGIES = ("full", "breakable", "tc_piecewise")
NAMED = {"splitting_ops": [MOE_OP]}
ATTENTION_ALONE = {"splitting_ops": ["gapless::attention_layer"]}


def open_moe(
    folder: Path,
    strategy: str,
    *,
    family: str = "qwen3",
    compilation: dict[str, Any] | None = None,
    **options: Any,
) -> OpenedEngine:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **FAMILIES[family]}))
    return open_engine(
        EngineConfig.from_sources(
            python={
                "model": str(folder),
                "load_format": "dummy",
                "device": "cpu",
                "max_running_requests": 4,
                "chunked_prefill_size": 16,
                "kv_cache_tokens": 32 * 16,
                "cuda_graph_backend_prefill": strategy,
                "cuda_graph_backend_decode": strategy,
                "cuda_graph_bs_prefill": [8, 16],
                "cuda_graph_bs_decode": [2, 4],
                "compilation_config": compilation or {},
                **options,
            }
        )
    )


LENGTHS, NEW = (3, 19), (2, 3)
"""Of the prompts, and tokens generated: padded prefill chunks, and decode batches of 2 and of 1."""


def generate(opened: OpenedEngine) -> tuple[list[list[int]], list[Tensor]]:
    """Tokens of every request, and the logits of every step."""
    rng = random.Random(0)
    core = EngineCore(opened.runner)
    for index, (length, num_new) in enumerate(zip(LENGTHS, NEW, strict=True)):
        prompt = [rng.randrange(97) for _ in range(length)]
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        core.add_request(str(index), prompt, params)
    last: dict[str, RequestOutput] = {}
    logits = []
    while core.has_unfinished():
        last.update((output.request_id, output) for output in core.step())
        logits.append(opened.runner._graphs.logits.clone())
    return [list(last[str(index)].outputs[0].token_ids) for index in range(len(LENGTHS))], logits


def breaks_of(opened: OpenedEngine, phase: Phase) -> set[int]:
    return {row.num_breaks for row in opened.runner._graphs.store.ledger if row.key.phase is phase}


@pytest.mark.parametrize(
    ("family", "strategy"),
    [(f, s) for f in FAMILIES for s in STRATEGIES if (f, s) != ("mixtral", "tc_piecewise")],
)
def test_every_strategy_equals_padded_eager_bit_for_bit(family: str, strategy: str, tmp_path: Path) -> None:
    opened = open_moe(tmp_path, strategy, family=family)
    tokens, logits = generate(opened)
    assert opened.runner.report()["eager"] == []
    with opened.runner.padded_eager():
        eager_tokens, eager_logits = generate(opened)
    assert tokens == eager_tokens
    for ours, eager in zip(logits, eager_logits, strict=True):
        assert ours.isfinite().all()
        assert torch.equal(ours, eager)


@pytest.mark.parametrize(
    ("strategy", "compilation", "breaks_per_layer"),
    [
        ("full", {}, 0),
        ("breakable", {}, 1),
        ("breakable", NAMED, 2),
        ("tc_piecewise", {}, 2),
        ("tc_piecewise", ATTENTION_ALONE, 1),
    ],
)
def test_the_block_is_cut_out_where_it_should_be(
    strategy: str, compilation: dict[str, Any], breaks_per_layer: int, tmp_path: Path
) -> None:
    opened = open_moe(tmp_path, strategy, compilation=compilation, count_expert_tokens=True)
    assert breaks_of(opened, Phase.PREFILL) == {breaks_per_layer * LAYERS}
    tokens, _ = generate(opened)
    counted = opened.runner.report()["experts"]
    assert [row["layer"] for row in counted] == list(range(LAYERS))
    num_tokens = sum(LENGTHS) + sum(num_new - 1 for num_new in NEW)
    for row in counted:
        assert len(row["tokens"]) == EXPERTS
        assert sum(row["tokens"]) == num_tokens * TOP_K, "padding and start-up are in no count"
    opened.runner.reset_report()
    assert sum(opened.runner.report()["experts"][0]["tokens"]) == 0
    with opened.runner.padded_eager():
        assert generate(opened)[0] == tokens
    assert opened.runner.report()["experts"] == counted


@pytest.mark.parametrize(
    ("strategy", "ops", "is_used"),
    [
        (Strategy.FULL, (MOE_OP,), False),
        (Strategy.BREAKABLE, (MOE_OP,), True),
        (Strategy.BREAKABLE, ("gapless::other",), False),
        (Strategy.TC_PIECEWISE, (MOE_OP,), True),
    ],
)
def test_splitting_ops_that_nothing_can_use_are_reported(
    strategy: Strategy, ops: tuple[str, ...], is_used: bool
) -> None:
    info = ModelInfo(
        architecture="Qwen3MoeForCausalLM", num_layers=1, hidden_size=8, num_heads=1, num_kv_heads=1,
        head_size=8, vocab_size=9, max_model_len=64, dtype=torch.float32, num_experts=4,
    )  # fmt: skip
    facts = capabilities_for(
        info, attention=(), supports_graphs=True, max_running_requests=4, chunked_prefill_size=16
    )
    plan = resolve(GraphRequest(prefill=strategy, decode=strategy, splitting_ops=ops), facts)
    assert ("splitting_ops" in str(plan.to_dict()["decisions"])) == (not is_used)


def test_a_dense_model_has_no_tokens_to_count(tmp_path: Path) -> None:
    dense = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8}
    raw = {key: value for key, value in CONFIG.items() if key != "num_experts_per_tok"}
    (tmp_path / "config.json").write_text(json.dumps({**raw, **dense}))
    options = {"model": str(tmp_path), "load_format": "dummy", "device": "cpu", "count_expert_tokens": True}
    with pytest.raises(ConfigError, match="--count-expert-tokens: this model has no experts"):
        open_engine(EngineConfig.from_sources(python=options))


def test_no_rule_switches_graphs_off_for_experts(tmp_path: Path) -> None:
    plan = open_moe(tmp_path, "auto").runner.report()["plan"]
    assert [plan[phase]["strategy"] for phase in ("prefill", "decode")] == ["full", "full"]

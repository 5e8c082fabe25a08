"""Mixtures of experts whose ranks hold a slice of every expert: tokens, logits and loads are those of one
rank, in every family and strategy, on two and four ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import greedy, open_llm, tokens_of, write_model

from gapless import LLM
from gapless.models.moe_config import MOE_OP

LAYERS, EXPERTS, TOP_K = 2, 4, 2
PROMPTS = [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11], [7] * 16, [95, 94, 93]]
NUM_NEW = 6
COMMON: dict[str, Any] = {"num_experts_per_tok": TOP_K, "rms_norm_eps": 1e-6}
QWEN3: dict[str, Any] = {
    **COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": EXPERTS,
    "moe_intermediate_size": 24,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {**QWEN3, "norm_topk_prob": True},
    "qwen2": {
        **QWEN3,
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "head_dim": None,
        "shared_expert_intermediate_size": 22,
    },
    "mixtral": {
        **COMMON,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": EXPERTS,
        "intermediate_size": 20,
    },
}
AT_EXPERTS = {"compilation_config": {"splitting_ops": [MOE_OP]}}


def backends(name: str, **others: Any) -> dict[str, Any]:
    return {"cuda_graph_backend_prefill": name, "cuda_graph_backend_decode": name, **others}


CASES: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "shared expert, full": ("qwen2", 2, backends("full"), 0),
    # The embedding's sum, and in each layer attention, the sum behind it, and experts with theirs.
    "shared expert, tc_piecewise": ("qwen2", 2, backends("tc_piecewise"), 1 + 3 * LAYERS),
    "mixtral, breakable": ("mixtral", 2, backends("breakable"), LAYERS),
    # Attention, experts, and two sums. Embeddings are made before the graph.
    "mixtral, breaks at experts and sums": (
        "mixtral",
        2,
        backends("breakable", break_at_all_reduce=True, **AT_EXPERTS),
        4 * LAYERS,
    ),
    "four ranks, full": ("qwen3", 4, backends("full"), 0),
    "four ranks, uneven slices, breaks at experts": (
        "qwen2",
        4,
        backends("breakable", **AT_EXPERTS),
        2 * LAYERS,
    ),
}
"""Family, ranks, options, and what graphs of prefill are broken at."""


@pytest.mark.parametrize("case", CASES)
def test_tokens_logits_and_loads_are_those_of_one_rank(case: str, tmp_path: Path) -> None:
    family, num_ranks, options, num_breaks = CASES[case]
    source = write_model(tmp_path, **FAMILIES[family])
    results = []
    for size, chosen in ((1, {"enforce_eager": True}), (num_ranks, options)):
        with open_llm(source, size, count_expert_tokens=True, **chosen) as llm:
            llm.runner.max_steps_ahead = 0  # a step ahead would count tokens that are dropped
            tokens_of(llm, PROMPTS, greedy(1))
            logits = llm.runner.graphs.logits[: len(PROMPTS)].clone()
            llm.reset_prefix_cache()
            llm.reset_report()
            tokens = tokens_of(llm, PROMPTS, greedy(NUM_NEW))
            report = llm.report()
            results.append((tokens, logits, report["experts"]))
            if size == 1:
                continue
            assert {row["breaks"] for row in report["graphs"] if row["phase"] == "prefill"} == {num_breaks}
            assert not report["eager"]
            assert not report["failures"]
            others = llm.runner.reports_of_others()
            assert len(others) == size - 1
            for other in others:
                for part in ("steps", "eager", "plan"):
                    assert other[part] == report[part], "ranks have dispatched to different graphs"
    (tokens, logits, load), (parallel_tokens, parallel_logits, parallel_load) = results
    assert parallel_tokens == tokens
    assert float((parallel_logits - logits).abs().max()) <= 1e-4
    assert parallel_load == load
    num_tokens = sum(map(len, PROMPTS)) + len(PROMPTS) * (NUM_NEW - 1)
    assert [sum(row["tokens"]) for row in load] == [num_tokens * TOP_K] * LAYERS, "padding is in no count"


@pytest.fixture
def four(tmp_path: Path) -> Iterator[LLM]:
    """Not shared: tests may run in any order, and others here open engines of several ranks too."""
    source = write_model(tmp_path, **FAMILIES["qwen3"])
    with open_llm(source, 4) as llm:
        yield llm


def test_an_abort_in_the_middle_harms_nobody_on_four_ranks(four: LLM) -> None:
    four.reset_prefix_cache()
    expected = tokens_of(four, PROMPTS[:2], greedy(8))
    stream = four.stream(PROMPTS[2], greedy(50))
    next(stream)
    stream.close()
    four.reset_prefix_cache()
    assert tokens_of(four, PROMPTS[:2], greedy(8)) == expected
    assert not four.core.has_unfinished()


def test_four_ranks_that_are_idle_wait_and_go_on_alike(four: LLM) -> None:
    four.reset_report()
    before = tokens_of(four, PROMPTS, greedy(3))
    four.core.check()
    assert four.core.step() == []
    four.reset_prefix_cache()
    assert tokens_of(four, PROMPTS, greedy(3)) == before
    report = four.report()
    others = four.runner.reports_of_others()
    assert [other["steps"] for other in others] == [report["steps"]] * 3

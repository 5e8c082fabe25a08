"""Engines of two, three and four ranks give what one rank gives, in every strategy.

Each test opens engines of its own, of which a process has one at a time: what shares one is in
``test_tensor_parallel.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import greedy, open_llm, tokens_of, write_model

from gapless import LLM

PROMPTS = [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11], [7] * 16, [95, 94, 93]]
QWEN: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False}
QWEN2 = {
    **QWEN,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "attention_bias": None,
    "head_dim": None,
}
QWEN3 = {**QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
QWEN3_MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def backends(name: str, **others: Any) -> dict[str, Any]:
    return {"cuda_graph_backend_prefill": name, "cuda_graph_backend_decode": name, **others}


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tied head, breakable": (2, {"tie_word_embeddings": True}, backends("breakable")),
    "qwen2 bias, tc_piecewise": (2, QWEN2, backends("tc_piecewise")),
    "qwen3 norms, breaks at sums": (
        2,
        QWEN3,
        {**backends("breakable", break_at_all_reduce=True), "cuda_graph_backend_decode": "full"},
    ),
    "all biases, full": (2, {"attention_bias": True, "mlp_bias": True}, backends("full")),
    "experts, tc_piecewise": (2, QWEN3_MOE, backends("tc_piecewise")),
    "experts, full": (2, {**QWEN3_MOE, "vocab_size": 96}, backends("full")),
    "repeated key/value heads": (4, {"vocab_size": 99}, {}),
    "three ranks": (3, {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 50}, {}),
    "uneven feed-forward, no graphs": (2, {"intermediate_size": 47}, {"enforce_eager": True}),
}
BREAKS = {
    "tied head, breakable": 2,  # attention, in each of two layers: sums are in the segments
    "qwen2 bias, tc_piecewise": 2 + 4 + 1,  # and two sums in each, and the embedding's
    "qwen3 norms, breaks at sums": 2 + 4,
    "all biases, full": 0,
}
"""Of a graph of prefill."""


def last_logits(llm: LLM, num_rows: int) -> torch.Tensor:
    return llm.runner.graphs.logits[:num_rows].clone()


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logits_are_those_of_one_rank(case: str, tmp_path: Path):
    num_ranks, changes, options = CASES[case]
    source = write_model(tmp_path, **changes)
    results = []
    for size, chosen in ((1, {"enforce_eager": True}), (num_ranks, options)):
        with open_llm(source, size, **chosen) as llm:
            tokens_of(llm, PROMPTS, greedy(1))
            logits = last_logits(llm, len(PROMPTS))
            llm.reset_prefix_cache()
            llm.reset_report()
            tokens = tokens_of(llm, PROMPTS, greedy(6))
            results.append((tokens, logits))
            report = llm.report()
            if size == 1:
                continue
            for other in llm.runner.reports_of_others():
                assert other["steps"] == report["steps"], "ranks have dispatched to different graphs"
                assert other["eager"] == report["eager"]
                assert other["plan"] == report["plan"]
            if case in BREAKS:
                breaks = {r["breaks"] for r in report["graphs"] if r["phase"] == "prefill"}
                assert breaks == {BREAKS[case]}
            if "enforce_eager" not in options:
                assert report["graphs"]
                assert not report["eager"], "a step has fallen back to eager"
                assert not report["failures"]
    (tokens, logits), (parallel_tokens, parallel_logits) = results
    assert parallel_tokens == tokens
    assert float((parallel_logits - logits).abs().max()) <= 1e-4


@pytest.mark.parametrize(("backend", "each"), [("full", 2), ("breakable", 2 + 2)])
def test_a_captured_size_costs_two_agreements_and_one_for_each_break(tmp_path: Path, backend: str, each: int):
    """A break at attention, in each of two layers."""
    source, counts = write_model(tmp_path), []
    for sizes in ([8], [8, 16, 32]):
        chosen = {**backends("full", cuda_graph_backend_prefill=backend), "cuda_graph_bs_prefill": sizes}
        with open_llm(source, 2, **chosen) as llm:
            report = llm.report()
            assert [graph["phase"] for graph in report["graphs"]].count("prefill") == len(sizes)
            counts.append(report["startup"]["ranks"]["agreements"])
    assert counts[1] - counts[0] == 2 * each

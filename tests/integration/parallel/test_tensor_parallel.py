"""Engines of two, three and four ranks give what one rank gives, in every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_ranks import OPTIONS, greedy, open_llm, tokens_of, write_model

from gapless import LLM, SamplingParams
from gapless.config import EngineConfig
from gapless.engine import ranks
from gapless.engine.verify import verify_engine
from gapless.errors import ConfigError

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
def test_a_captured_size_costs_two_agreements_and_one_for_each_break(source: str, backend: str, each: int):
    """A break at attention, in each of two layers."""
    counts = []
    for sizes in ([8], [8, 16, 32]):
        chosen = {**backends("full", cuda_graph_backend_prefill=backend), "cuda_graph_bs_prefill": sizes}
        with open_llm(source, 2, **chosen) as llm:
            report = llm.report()
            assert [graph["phase"] for graph in report["graphs"]].count("prefill") == len(sizes)
            counts.append(report["startup"]["ranks"]["agreements"])
    assert counts[1] - counts[0] == 2 * each


SMALL_CACHE = {"kv_cache_tokens": 160}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one(source: str) -> Iterator[LLM]:
    with open_llm(source, 1, **SMALL_CACHE) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(source: str) -> Iterator[LLM]:
    with open_llm(source, 2, **SMALL_CACHE) as llm:
        yield llm


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, seed=3, max_tokens=6),
        SamplingParams(temperature=1.0, seed=4, max_tokens=6, top_k=5, top_p=0.9, min_p=0.01),
        SamplingParams(temperature=1.0, seed=5, max_tokens=6, repetition_penalty=1.4),
        SamplingParams(temperature=0.0, max_tokens=6, presence_penalty=1.0, frequency_penalty=0.7),
        SamplingParams(temperature=1.0, seed=6, max_tokens=6, min_tokens=4),
        SamplingParams(temperature=1.0, seed=7, max_tokens=4, n=3),
    ],
    ids=["plain", "filters", "repetition", "penalties", "min_tokens", "choices"],
)
def test_every_kind_of_sampling_draws_the_same_tokens(one: LLM, two: LLM, params: SamplingParams):
    drawn = []
    for llm in (one, two):
        llm.reset_prefix_cache()
        outputs = llm.generate(PROMPTS, _without_text(params))
        drawn.append([[choice.token_ids for choice in output.outputs] for output in outputs])
    assert drawn[0] == drawn[1]


def test_different_parameters_in_one_batch(one: LLM, two: LLM):
    params = [greedy(6), SamplingParams(temperature=1.0, seed=1, max_tokens=9, detokenize=False)] * 2
    assert tokens_of(one, PROMPTS, params) == tokens_of(two, PROMPTS, params)


def test_log_probabilities_and_prompt_scores(one: LLM, two: LLM):
    params = greedy(3, logprobs=3, prompt_logprobs=2)
    for ours, theirs in zip(one.generate(PROMPTS, params), two.generate(PROMPTS, params), strict=True):
        for expected, found in zip(
            [*ours.prompt_logprobs[1:], *ours.outputs[0].logprobs],
            [*theirs.prompt_logprobs[1:], *theirs.outputs[0].logprobs],
            strict=True,
        ):
            assert expected.keys() == found.keys()
            for token in expected:
                assert found[token].logprob == pytest.approx(expected[token].logprob, abs=1e-4)


def test_preempted_requests_get_the_same_tokens(one: LLM, two: LLM):
    prompts = [[i] * 20 for i in range(1, 5)]
    expected = [tokens_of(one, [prompt], greedy(40))[0] for prompt in prompts]
    generations = []
    two.reset_prefix_cache()
    for request in two._prepare(prompts, greedy(40), errors="raise").requests:
        generations += two.core.add(request)
    while two.core.has_unfinished():
        two.core.step()
    assert [tuple(sequence.output_token_ids) for sequence in generations] == expected
    assert any(sequence.generation for sequence in generations), "the cache was large enough for all"


def test_a_cached_prefix_is_found_and_changes_nothing(one: LLM, two: LLM):
    prompt = list(range(1, 41))
    expected = tokens_of(one, [prompt], greedy(5))
    two.reset_prefix_cache()
    assert tokens_of(two, [prompt], greedy(5)) == expected
    again = two.generate([prompt], greedy(5))[0]
    assert again.num_cached_tokens == 32
    assert [again.outputs[0].token_ids] == expected


def test_an_abort_in_the_middle_harms_nobody(one: LLM, two: LLM):
    expected = tokens_of(one, [PROMPTS[0]], greedy(12))
    streams = two.stream(PROMPTS[1], greedy(50))
    next(streams)
    streams.close()
    assert tokens_of(two, [PROMPTS[0]], greedy(12)) == expected
    assert not two.core.has_unfinished()


def test_a_long_prompt_runs_in_chunks_beside_decodes(one: LLM, two: LLM):
    prompts = [[3, 1, 4], list(range(90))]
    assert tokens_of(two, prompts, greedy(10)) == tokens_of(one, prompts, greedy(10))


def test_padded_eager_is_the_oracle_on_all_ranks(two: LLM):
    two.reset_prefix_cache()
    expected = tokens_of(two, PROMPTS, greedy(6))
    two.reset_report()
    two.reset_prefix_cache()
    with two.padded_eager():
        assert tokens_of(two, PROMPTS, greedy(6)) == expected
    eager = {row["reason"] for row in two.report()["eager"]}
    assert eager == {"padded_eager"}
    assert all(other["eager"] == two.report()["eager"] for other in two.runner.reports_of_others())


def test_idle_ranks_wait_and_go_on(two: LLM):
    before = tokens_of(two, [PROMPTS[0]], greedy(4))
    two.core.check()
    assert two.core.step() == []
    assert tokens_of(two, [PROMPTS[0]], greedy(4)) == before


def test_each_rank_holds_its_part_of_cache_and_weights(one: LLM, two: LLM):
    ours, (theirs,) = two.report()["startup"], two.runner.reports_of_others()
    whole = one.report()["startup"]["cache_bytes"]
    assert ours["cache_bytes"] == theirs["startup"]["cache_bytes"] == whole // 2
    assert ours["num_blocks"] == theirs["startup"]["num_blocks"]
    agreements = {name: ours["ranks"].pop(name) for name in ("agreements", "agreements_s")}
    how = {"sums_by": "gloo", "breaks_at_sums": False, "agrees_by": "shared memory"}
    assert ours["ranks"] == {"size": 2, **how}
    assert agreements["agreements_s"] >= 0
    assert one.report()["startup"]["ranks"] is None


def test_the_same_graphs_in_the_same_order_on_all_ranks(two: LLM):
    ours, (theirs,) = two.report(), two.runner.reports_of_others()

    def keys(report: dict[str, Any]) -> list[tuple[Any, ...]]:
        return [(row["phase"], row["num_tokens"], row["num_reqs"]) for row in report["graphs"]]

    assert keys(ours) == keys(theirs)
    assert keys(ours)


def test_each_rank_needs_a_gpu_of_its_own(source, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = EngineConfig(model=source, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="this machine has 1 GPUs that are visible"):
        ranks._check(config, device_type="cuda", is_local=True)
    ranks._check(config, device_type="cuda", is_local=False)  # torchrun may have spread them


def test_models_that_take_images_are_refused(source, monkeypatch):
    monkeypatch.setattr(ranks, "read_model_info", lambda *_, **__: SimpleNamespace(is_multimodal=True))
    with pytest.raises(ConfigError, match="models that take images run on one GPU only"):
        LLM(source, tensor_parallel_size=2, **OPTIONS)


def test_graphs_of_several_ranks_are_not_verified(two: LLM):
    opened: Any = SimpleNamespace(runner=two.runner, loaded=SimpleNamespace(model=None))
    with pytest.raises(ConfigError, match="on one rank only: give --tensor-parallel-size=1"):
        verify_engine(opened)


@pytest.mark.parametrize(
    ("num_ranks", "changes", "message"),
    [
        (3, {}, "=3 does not divide num_attention_heads=4"),
        (8, {}, "=8 does not divide num_attention_heads=4"),
        (
            4,
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            "=4 is neither a divisor nor a multiple of num_key_value_heads=6",
        ),
    ],
)
def test_a_number_of_ranks_that_does_not_fit_is_refused(num_ranks, changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        LLM(write_model(tmp_path, **changes), tensor_parallel_size=num_ranks, **OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size=0: must be between 1"),
        ({"tensor_parallel_size": 2.0}, "--tensor-parallel-size=2.0: must be an integer"),
        ({"break_at_all_reduce": True}, "one rank has no sums"),
    ],
)
def test_options_that_say_nothing_sensible_are_refused(options, message, source):
    with pytest.raises(ConfigError, match=message):
        LLM(source, **{**OPTIONS, **options})


def _without_text(params: SamplingParams) -> SamplingParams:
    return replace(params, detokenize=False, ignore_eos=True)

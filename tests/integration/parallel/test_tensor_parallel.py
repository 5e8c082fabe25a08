"""One engine of two ranks beside one of one rank: sampling, limits, aborts, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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

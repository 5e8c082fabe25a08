"""A real runner fed one step ahead: the device hands drawn tokens to the next step, and nothing changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tiny_model import VOCAB_SIZE, open_tiny

from gapless.engine.build import OpenedEngine
from gapless.llm import LLM
from gapless.sampling.params import SamplingParams

STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {"cuda_graph_backend_prefill": "full", "cuda_graph_backend_decode": "full"},
    "breakable": {"cuda_graph_backend_prefill": "breakable", "cuda_graph_backend_decode": "breakable"},
    "eager": {"enforce_eager": True},
}


@pytest.fixture(scope="module", params=STRATEGIES)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenedEngine:
    return open_tiny(tmp_path_factory.mktemp("tiny"), **STRATEGIES[request.param])


def generate(opened: OpenedEngine, ahead: int, seed: int, **params: Any) -> list[Any]:
    rng = random.Random(seed)
    opened.runner.max_steps_ahead = ahead
    llm = LLM._from_parts(opened.runner, None, eos_token_ids=(2,))
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 45))] for _ in range(7)]
    sampling = [
        SamplingParams(**{"max_tokens": rng.randint(1, 15), "seed": i, "detokenize": False, **params})
        for i in range(len(prompts))
    ]
    outputs = llm.generate(prompts, sampling)
    return [(o.token_ids, o.finish_reason, o.logprobs) for output in outputs for o in output.outputs]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    """Up to the last bits of log-probabilities: a step ahead has other rows beside these, and some CPUs
    multiply other numbers of rows to other bits."""
    assert [choice[:2] for choice in found] == [choice[:2] for choice in expected]
    for (*_, steps), (*_, wanted) in zip(found, expected, strict=True):
        for step, wanted_step in zip(steps or (), wanted or (), strict=True):
            assert {token: entry.rank for token, entry in step.items()} == {
                token: entry.rank for token, entry in wanted_step.items()
            }
            for token, entry in step.items():
                assert entry.logprob == pytest.approx(wanted_step[token].logprob, abs=1e-5)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.7, "n": 2},
        {"temperature": 0.0, "min_tokens": 3, "max_tokens": 9},
        {"temperature": 0.7, "repetition_penalty": 1.3},
        {"temperature": 0.0, "logprobs": 2, "max_tokens": 5},
    ],
    ids=str,
)
def test_tokens_are_those_of_steps_one_at_a_time(opened: OpenedEngine, params: dict[str, Any]) -> None:
    expected = generate(opened, 0, 1, **params)
    assert_same(generate(opened, 1, 1, **params), expected)
    assert_same(generate(opened, 2, 1, **params), expected)


def test_preemption_under_a_tiny_cache_changes_nothing(tmp_path: Path) -> None:
    roomy = open_tiny(tmp_path / "roomy", kv_cache_tokens=1024)
    tight = open_tiny(tmp_path / "tight", kv_cache_tokens=96)
    params = {"temperature": 0.0, "ignore_eos": True}
    expected = generate(roomy, 0, 3, **params)
    assert generate(tight, 0, 3, **params) == expected
    assert generate(tight, 1, 3, **params) == expected


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
@pytest.mark.parametrize("ahead", [0, 1])
def test_what_would_end_a_choice_is_banned_for_exactly_min_tokens(
    opened: OpenedEngine, min_tokens: int, ahead: int
) -> None:
    """All tokens but one end the choice, so while they are banned that one is drawn, and then no longer."""
    opened.runner.max_steps_ahead = ahead
    llm = LLM._from_parts(opened.runner, None, eos_token_ids=(2,))
    only, prompt = 7, [1, 3, 5]
    plain = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    ((free,),) = (o.outputs[0].token_ids for o in llm.generate([prompt + [only] * min_tokens], plain))
    assert free != only, "the model would go on drawing it by itself"
    stops = [token for token in range(VOCAB_SIZE) if token != only]
    params = SamplingParams(
        temperature=0.0, max_tokens=9, min_tokens=min_tokens, stop_token_ids=stops, detokenize=False
    )
    (output,) = llm.generate([prompt], params)
    assert list(output.outputs[0].token_ids) == [only] * min_tokens + [free]
    assert output.outputs[0].finish_reason == "stop"


def test_a_nan_row_fails_its_request_while_a_step_is_in_flight(opened: OpenedEngine) -> None:
    opened.runner.max_steps_ahead = 1
    llm = LLM._from_parts(opened.runner, None, eos_token_ids=())
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    alone = llm.generate([[9, 8, 7]], params)[0].outputs[0].token_ids
    layer = opened.loaded.model.attention_layers()[0]
    assert layer.v_cache is not None
    results = {}
    for number, output in enumerate(llm.stream([[1, 2, 3], [9, 8, 7]], params)):
        if number == 1:
            sick = next(s for s in llm.core.scheduler.running if s.token_ids[:3] == [1, 2, 3])
            layer.v_cache[sick.block_table[0], 0] = float("nan")
        results[output.request_id.rsplit("-", 1)[1]] = output.outputs[0]
    layer.v_cache.zero_()
    assert results["0"].finish_reason == "error"
    assert "NaN" in (results["0"].error or "")
    assert results["1"].token_ids == alone

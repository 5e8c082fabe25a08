"""Scores of a prompt's own tokens, and embeddings: what they must equal, whatever runs beside them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tiny_model import VOCAB_SIZE, open_tiny

from gapless.engine.core import EngineCore
from gapless.engine.outputs import ChoiceDelta
from gapless.errors import RequestError
from gapless.llm import LLM
from gapless.sampling.params import SamplingParams

STRATEGIES = ["full", "breakable", "disabled"]
K = 5


def prompt_of(num_tokens: int, *, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    made = {}

    def open_once(strategy: str):
        if strategy not in made:
            folder = tmp_path_factory.mktemp(strategy)
            made[strategy] = open_tiny(Path(folder), cuda_graph_backend_prefill=strategy)
        return made[strategy]

    yield open_once
    for engine in made.values():
        engine.runner.shutdown()


def params(**values) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, "detokenize": False, **values}
    )


def run(runner, requests: dict[str, tuple[list[int], SamplingParams]], *, streams: bool = True):
    """All deltas of each request."""
    core = EngineCore(runner)
    for name, (prompt, asked) in requests.items():
        core.add_request(name, prompt, asked, streams=streams)
    deltas: dict[str, list[ChoiceDelta]] = {name: [] for name in requests}
    while core.has_unfinished():
        for delta in core.step_deltas():
            deltas[delta.request_id].append(delta)
    assert core.scheduler.allocator.num_used == 0
    return deltas


def prompt_scores(deltas: list[ChoiceDelta]):
    (scores,) = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    return scores


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_tokens", [2, 31, 32, 33, 34, 70])
def test_scores_of_a_prompt_equal_those_of_generating_it_token_by_token(opened, strategy, num_tokens):
    runner = opened(strategy).runner
    prompt = prompt_of(num_tokens)
    scores = prompt_scores(run(runner, {"a": (prompt, params(prompt_logprobs=K))})["a"])
    assert len(scores) == num_tokens
    assert scores[0] is None
    for position in {1, num_tokens // 2, num_tokens - 1} - {0}:
        asked = params(max_tokens=1, logprobs=20)
        (delta,) = run(runner, {"b": (prompt[:position], asked)})["b"]
        expected = list(delta.logprobs[0].items())
        best = sorted(expected, key=lambda item: item[1].rank)[:K]
        row = scores[position]
        assert next(iter(row)) == prompt[position]
        assert len(row) in (K, K + 1)
        for token, entry in best:
            assert row[token].rank == entry.rank
            assert math.isclose(row[token].logprob, entry.logprob, abs_tol=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scores_do_not_depend_on_what_runs_beside(opened, strategy):
    runner = opened(strategy).runner
    prompt = prompt_of(50)
    alone = prompt_scores(run(runner, {"a": (prompt, params(prompt_logprobs=0))})["a"])
    others = {f"o{i}": (prompt_of(20 + i, seed=i), params(max_tokens=8)) for i in range(3)}
    beside = run(runner, {**others, "a": (prompt, params(prompt_logprobs=0))})
    for one, two in zip(alone[1:], prompt_scores(beside["a"])[1:], strict=True):
        assert list(one) == list(two)
        for token in one:
            assert math.isclose(one[token].logprob, two[token].logprob, abs_tol=1e-4)
    for name, (other, asked) in others.items():
        tokens = [t for d in run(runner, {name: (other, asked)})[name] for t in d.token_ids]
        assert [t for d in beside[name] for t in d.token_ids] == tokens


def test_scores_come_once_and_with_the_first_choice_only(opened):
    deltas = run(opened("full").runner, {"a": (prompt_of(9), params(n=3, prompt_logprobs=1))})["a"]
    told = [delta for delta in deltas if delta.prompt_logprobs is not None]
    assert [delta.choice for delta in told] == [0]
    assert len([d for d in deltas if d.choice == 0]) == 3


def test_scoring_is_counted_as_an_eager_run_of_the_head(opened):
    runner = opened("full").runner
    runner.reset_report()
    run(runner, {"a": (prompt_of(40), params(prompt_logprobs=1))})
    eager = {(row["phase"], row["reason"]): row["count"] for row in runner.report()["eager"]}
    assert eager["head", "prompt_logprobs"] == 2, "one for each chunk"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_tokens", [1, 2, 32, 33, 70])
def test_an_embedding_is_the_normalised_state_that_the_next_token_comes_from(opened, strategy, num_tokens):
    engine = opened(strategy)
    prompt = prompt_of(num_tokens)
    embed = params(max_tokens=1, pooling="last")
    (delta,) = run(engine.runner, {"a": (prompt, embed)}, streams=False)["a"]
    (token,) = [
        t for d in run(engine.runner, {"b": (prompt, params(max_tokens=1))})["b"] for t in d.token_ids
    ]
    vector = torch.tensor(delta.embedding)
    assert vector.norm().item() == pytest.approx(1.0, abs=1e-5)
    with torch.no_grad():
        assert engine.loaded.model.head(vector[None]).argmax().item() == token
    beside = run(
        engine.runner, {"o": (prompt_of(5), params(max_tokens=20)), "a": (prompt, embed)}, streams=False
    )
    torch.testing.assert_close(torch.tensor(beside["a"][-1].embedding), vector, atol=1e-4, rtol=0)


def test_a_one_token_embedding_beside_decodes_says_why_its_step_is_eager(opened):
    runner = opened("full").runner
    runner.reset_report()
    run(runner, {"a": ([5], params(max_tokens=1, pooling="last"))})
    eager = {(row["phase"], row["reason"]) for row in runner.report()["eager"]}
    assert ("prefill", "hidden_states") in eager


def test_generate_returns_the_scores_of_the_prompt(opened):
    engine = opened("full")
    llm = LLM._from_parts(engine.runner, None)
    (output,) = llm.generate([prompt_of(6)], params(prompt_logprobs=2))
    assert output.prompt_logprobs[0] is None
    assert [next(iter(row)) for row in output.prompt_logprobs[1:]] == prompt_of(6)[1:]
    (output,) = llm.generate([prompt_of(6)], params())
    assert output.prompt_logprobs is None


@pytest.mark.parametrize("values", [{"prompt_logprobs": -1}, {"prompt_logprobs": 21}, {"pooling": "first"}])
def test_bad_values_are_refused(values):
    with pytest.raises(RequestError, match=next(iter(values))):
        params(**values)

"""Prefix caching in a real (tiny, random) model with graphs on the emulated device: on equals off.

Where a prompt starts behind cached tokens its chunks have other shapes, so logits are compared within 1e-4;
tokens are compared exactly, since the seeds here leave no near ties.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import BLOCK_SIZE, VOCAB_SIZE, open_tiny

from gapless.engine.core import EngineCore
from gapless.engine.outputs import RequestOutput
from gapless.engine.runner import ModelRunner
from gapless.llm import LLM
from gapless.sampling.params import SamplingParams

PAIRS = [("full", "full"), ("breakable", "full"), ("disabled", "disabled")]


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made: dict[tuple[Any, ...], ModelRunner] = {}

    def open_once(prefill: str = "breakable", decode: str = "full", **options: Any) -> ModelRunner:
        key = (prefill, decode, *options.items())
        if key not in made:
            folder = Path(tmp_path_factory.mktemp("tiny"))
            backends = {"cuda_graph_backend_prefill": prefill, "cuda_graph_backend_decode": decode}
            made[key] = open_tiny(folder, **backends, **options).runner
        made[key].max_steps_ahead = 0
        return made[key]

    yield open_once
    for runner in made.values():
        runner.shutdown()


def prompt_of(num_tokens: int, *, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]


def params(**values: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "detokenize": False, **values}
    )


def run(
    core: EngineCore,
    requests: list[tuple[list[int], SamplingParams]],
    *,
    abort_at: dict[int, str] | None = None,
) -> dict[str, RequestOutput]:
    """All at once; at step ``n`` the request ``abort_at[n]`` is aborted."""
    for index, (prompt, asked) in enumerate(requests):
        core.add_request(str(index), prompt, asked)
    outputs: dict[str, RequestOutput] = {}
    step = 0
    while core.has_unfinished():
        if abort_at and step in abort_at:
            core.abort_request(abort_at[step])
        step += 1
        outputs.update({output.request_id: output for output in core.step()})
    allocator = core.scheduler.allocator
    assert (allocator.num_used, allocator.num_held) == (0, 0)
    assert allocator.num_free == allocator.num_usable
    return outputs


def tokens_of(outputs: dict[str, RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[choice.token_ids for choice in outputs[key].outputs] for key in sorted(outputs, key=int)]


def stems(count: int, *, seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    """Requests whose prompts begin alike and end differently, with every kind of sampling."""
    rng = random.Random(seed)
    beginnings = [prompt_of(length, seed=seed + length) for length in (16, 33, 70)]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.7, "top_k": 9, "seed": 8},
        {"repetition_penalty": 1.3},
        {"n": 2, "temperature": 0.9, "seed": 9},
    ]
    return [
        (
            rng.choice(beginnings) + prompt_of(rng.choice((0, 1, 5, 20)), seed=100 + i),
            params(max_tokens=rng.randint(1, 12), **rng.choice(kinds)),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_tokens_are_those_without_a_cache(runners: Any, prefill: str, decode: str, ahead: int) -> None:
    """Prompts of up to 90 tokens in chunks of at most 32, four requests at a time."""
    runner, requests = runners(prefill, decode), stems(14)
    expected = tokens_of(run(EngineCore(runner), requests))
    runner.max_steps_ahead = ahead
    core = EngineCore(runner, enable_prefix_caching=True)
    assert tokens_of(run(core, requests)) == expected
    assert tokens_of(run(core, requests)) == expected, "with everything cached"
    report = core.report()["prefix_cache"]
    assert report["hits"] > 0.5 * report["queries"]


@pytest.mark.parametrize("ahead", [0, 1])
def test_preemption_in_a_small_cache_changes_no_token(runners: Any, ahead: int) -> None:
    requests = stems(12, seed=3)
    expected = tokens_of(run(EngineCore(runners()), requests))
    runner = runners(kv_cache_tokens=10 * BLOCK_SIZE)
    runner.max_steps_ahead = ahead
    core = EngineCore(runner, enable_prefix_caching=True)
    assert tokens_of(run(core, requests)) == expected
    assert core.scheduler.num_preemptions > 0
    assert core.report()["prefix_cache"]["hits"] > 0


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("first", range(1, 6))
def test_aborts_in_flight_leave_nothing_wrong_behind(runners: Any, ahead: int, first: int) -> None:
    """A prompt is aborted somewhere between its chunks; the next ones begin with what it left."""
    requests = [([*prompt_of(90), i], params()) for i in range(4)]
    expected = tokens_of(run(EngineCore(runners()), requests))
    runner = runners()
    runner.max_steps_ahead = ahead
    core = EngineCore(runner, enable_prefix_caching=True)
    outputs = run(core, requests, abort_at={first: "0", first + 2: "2"})
    for got, want in zip(tokens_of(outputs), expected, strict=True):
        assert got[0] == want[0][: len(got[0])]
    assert tokens_of(outputs)[1] == expected[1]
    assert tokens_of(run(core, requests)) == expected


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 33, 48, 90])
def test_hits_are_exact_and_logits_equal_within_noise(runners: Any, num_tokens: int) -> None:
    runner, prompt = runners(), prompt_of(num_tokens)
    core = EngineCore(runner, enable_prefix_caching=True)
    logits, cached = [], []
    for _ in range(2):
        output = run(core, [(prompt, params(max_tokens=1))])["0"]
        logits.append(runner.graphs.logits[0].clone())
        cached.append(output.num_cached_tokens)
    num_found = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert cached == [0, num_found]
    assert torch.allclose(logits[0], logits[1], rtol=0.0, atol=1e-4)
    report = core.report()["prefix_cache"]
    assert (report["queries"], report["hits"]) == (2 * num_tokens, num_found)


@pytest.mark.parametrize("ahead", [0, 1])
def test_choices_compute_their_prompt_once(runners: Any, ahead: int) -> None:
    runner = runners()
    requests = [(prompt_of(70), params(n=4, temperature=1.0, seed=5))]
    expected = tokens_of(run(EngineCore(runner), requests))
    assert len(set(expected[0])) == 4
    runner.max_steps_ahead = ahead
    core = EngineCore(runner, enable_prefix_caching=True)
    assert tokens_of(run(core, requests)) == expected
    report = core.report()["prefix_cache"]
    assert (report["queries"], report["hits"]) == (4 * 70, 3 * 64)


def test_a_conversation_finds_its_own_answers(runners: Any) -> None:
    core = EngineCore(runners(), enable_prefix_caching=True)
    prompt, plain = prompt_of(20), []
    for _ in range(3):
        (plain,) = tokens_of(run(EngineCore(runners()), [(prompt, params(max_tokens=20))]))
        core.reset_prefix_cache()  # the engine above has written to the same blocks
        run(core, [(prompt[:-1], params(max_tokens=1))])
        output = run(core, [(prompt, params(max_tokens=20))])["0"]
        assert output.outputs[0].token_ids == plain[0]
        prompt = [*prompt, *plain[0], 5]
        output = run(core, [(prompt, params(max_tokens=1))])["0"]
        assert output.num_cached_tokens == (len(prompt) - 2) // BLOCK_SIZE * BLOCK_SIZE
    assert len(prompt) > 80


def test_scores_of_prompts_and_embeddings_are_complete_on_a_warm_cache(runners: Any) -> None:
    runner, prompt = runners(), prompt_of(60)
    core = EngineCore(runner, enable_prefix_caching=True)
    run(core, [(prompt, params())])
    output = run(core, [(prompt, params(prompt_logprobs=1))])["0"]
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs is not None
    assert [row is None for row in output.prompt_logprobs] == [True] + [False] * 59
    core.add_request("e", prompt, params(pooling="last", max_tokens=1))
    deltas = []
    while core.has_unfinished():
        deltas += core.step_deltas()
    assert deltas[-1].num_cached_tokens == 0
    assert len(deltas[-1].embedding or ()) == 32


@pytest.mark.parametrize(("prefill", "decode"), PAIRS[:2])
def test_after_a_reset_padded_eager_does_equal_work(runners: Any, prefill: str, decode: str) -> None:
    runner = runners(prefill, decode)
    llm = LLM._from_parts(runner, None, enable_prefix_caching=True)
    prompts = [[*prompt_of(40), i] for i in range(6)]
    with_graphs = llm.generate(prompts, params())
    logits = runner.graphs.logits.clone()
    hits = llm.report()["prefix_cache"]["hits"]
    assert hits > 0
    llm.reset_report()
    llm.reset_prefix_cache()
    with llm.padded_eager():
        eager = llm.generate(prompts, params())
    assert [o.outputs for o in eager] == [o.outputs for o in with_graphs]
    assert torch.equal(runner.graphs.logits, logits), "bit for bit"
    assert llm.report()["prefix_cache"]["hits"] == hits


def test_it_is_on_by_default_and_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_model import write_config

    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "enforce_eager": True}
    source, file = write_config(tmp_path / "model"), tmp_path / "options.toml"
    file.write_text("enable-prefix-caching = false\n")

    def is_on(**given: Any) -> bool:
        with LLM(source, **options, kv_cache_tokens=256, **given) as llm:
            llm.generate([prompt_of(20)], params(max_tokens=1))
            (output,) = llm.generate([prompt_of(20)], params(max_tokens=1))
            assert (llm.report()["prefix_cache"] is not None) == bool(output.num_cached_tokens)
            return output.num_cached_tokens == 16

    assert not is_on(config=file)
    monkeypatch.setenv("GAPLESS_ENABLE_PREFIX_CACHING", "0")
    assert is_on(enable_prefix_caching=True)
    assert not is_on()
    monkeypatch.delenv("GAPLESS_ENABLE_PREFIX_CACHING")
    assert is_on()

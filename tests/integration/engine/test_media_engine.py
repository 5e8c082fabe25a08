"""Images in the steps of an engine, with graphs of every kind: rows reach their tokens and nothing else.

The encoder is a fake whose rows follow from the name of an item, the decoder a tiny one with random weights.
Logits are compared as log-probabilities of the best tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from media_engine import BLOCK_SIZE, NamedEncoder, media_prompt, open_media_engine

from gapless.engine.build import OpenedEngine
from gapless.engine.core import EngineCore
from gapless.engine.outputs import RequestOutput
from gapless.engine.verify import verify_engine
from gapless.multimodal.items import MediaPrompt
from gapless.sampling.params import SamplingParams

STRATEGIES = ("full", "breakable", "tc_piecewise", "disabled")
NAN = float("nan")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Engines by their options, each made once; every test gets them as if nothing had run."""
    made: dict[tuple[Any, ...], tuple[OpenedEngine, NamedEncoder]] = {}

    def open_once(**options: Any) -> tuple[OpenedEngine, NamedEncoder]:
        options = {"cuda_graph_backend_prefill": "full", "cuda_graph_backend_decode": "full", **options}
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = open_media_engine(tmp_path_factory.mktemp("vl"), **options)
        opened, encoder = made[key]
        opened.runner.max_steps_ahead = 0
        opened.runner.media.release_all()
        opened.runner.media.forget()
        opened.runner.reset_report()
        encoder.calls.clear()
        encoder.fails.clear()
        return opened, encoder

    yield open_once
    for opened, _ in made.values():  # a full shutdown collects garbage, which takes a second each
        opened.runner.graphs.store.release()


def greedy(**values: Any) -> SamplingParams:
    return SamplingParams(
        **{
            "temperature": 0.0, "max_tokens": 5, "ignore_eos": True, "detokenize": False, "logprobs": 3,
            **values,
        }
    )  # fmt: skip


MIXED: dict[str, MediaPrompt | list[int]] = {
    "one image": media_prompt([1, 2, 3], (b"aaaa", 3, 4), [4, 5]),
    "several sizes": media_prompt((b"bbbb", 1, 1), [7], (b"cccc", 5, 7), [8, 9], (b"aaaa", 3, 4), [1]),
    "text": [3, 1, 4, 1, 5, 9, 2, 6],
    "image first": media_prompt((b"dddd", 4, 4), [6]),
    "long": media_prompt([5] * 20, (b"eeee", 6, 8), [2] * 12, (b"bbbb", 1, 1)),
}


def run(
    core: EngineCore, prompts: dict[str, Any], params: SamplingParams | None = None
) -> dict[str, RequestOutput]:
    for name, prompt in prompts.items():
        core.add_request(name, prompt, params or greedy())
    outputs: dict[str, RequestOutput] = {}
    while core.has_unfinished():
        outputs.update({output.request_id: output for output in core.step()})
    allocator = core.scheduler.allocator
    assert (allocator.num_used, allocator.num_held) == (0, 0)
    if core.runner.media is not None:
        assert core.runner.media.cache.num_pinned == 0
    return outputs


def answers(outputs: dict[str, RequestOutput]) -> dict[str, Any]:
    """Tokens and log-probabilities, to be compared bit for bit."""
    assert {c.error for o in outputs.values() for c in o.outputs} == {None}
    return {
        name: [(choice.token_ids, choice.logprobs) for choice in output.outputs]
        for name, output in outputs.items()
    }


def tokens(outputs: dict[str, RequestOutput]) -> dict[str, Any]:
    return {name: [choice.token_ids for choice in output.outputs] for name, output in outputs.items()}


@pytest.fixture(scope="module")
def expected(engines: Any) -> dict[str, Any]:
    """Of each family: every prompt alone, without graphs, chunks and caches."""
    found = {}
    for family in ("qwen3_vl", "qwen2_5_vl"):
        opened, _ = engines(
            family=family,
            chunked_prefill_size=128,
            enforce_eager=True,
            cuda_graph_bs_prefill=None,
            cuda_graph_bs_decode=None,
            cuda_graph_backend_prefill=None,
            cuda_graph_backend_decode=None,
        )
        found[family] = {
            name: tokens(run(EngineCore(opened.runner), {name: prompt}))[name]
            for name, prompt in MIXED.items()
        }
        assert len({str(answer) for answer in found[family].values()}) == len(MIXED), "prompts are alike"
    return found


@pytest.mark.parametrize(
    ("prefill", "family"),
    [*((strategy, "qwen3_vl") for strategy in STRATEGIES), ("breakable", "qwen2_5_vl")],
)
def test_a_mixed_batch_equals_padded_eager_bit_for_bit_and_every_prompt_alone(
    engines: Any, expected: dict[str, Any], prefill: str, family: str
) -> None:
    opened, encoder = engines(cuda_graph_backend_prefill=prefill, family=family)
    outputs = run(EngineCore(opened.runner), MIXED)
    assert tokens(outputs) == expected[family]
    eager = {row["phase"] for row in opened.runner.report()["eager"]} - {"sample"}  # log-probabilities
    assert eager == ({"prefill"} if prefill == "disabled" else set())
    assert len(encoder.calls) < 5, "items of several requests are encoded together"
    opened.runner.media.forget()
    with opened.runner.padded_eager():
        assert answers(run(EngineCore(opened.runner), MIXED)) == answers(outputs)


@pytest.mark.parametrize("decode", ["breakable", "tc_piecewise"])
def test_decode_graphs_of_every_kind_continue_behind_an_image(
    engines: Any, expected: dict[str, Any], decode: str
) -> None:
    """Their positions go on behind the image's plane, not behind its tokens."""
    opened, _ = engines(cuda_graph_backend_prefill="breakable", cuda_graph_backend_decode=decode)
    assert tokens(run(EngineCore(opened.runner), MIXED)) == expected["qwen3_vl"]
    decodes = opened.runner.graphs.decode
    assert "rope_positions" in decodes.inputs.views({"tokens": 1, "reqs": 1, "rows": 1}).shapes
    assert "is_media" not in decodes.inputs.views({"tokens": 1, "reqs": 1, "rows": 1}).shapes


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_decode_steps_may_use_the_graphs_of_prefill(
    engines: Any, expected: dict[str, Any], mode: str
) -> None:
    opened, _ = engines(
        cuda_graph_backend_prefill=None,
        cuda_graph_backend_decode=None,
        compilation_config=json.dumps({"cudagraph_mode": mode}),
    )
    assert opened.runner.plan.is_one_set
    assert tokens(run(EngineCore(opened.runner), MIXED)) == expected["qwen3_vl"]


@pytest.mark.parametrize("chunk", [13])
def test_chunk_borders_inside_images_change_nothing(
    engines: Any, expected: dict[str, Any], chunk: int
) -> None:
    opened, encoder = engines(cuda_graph_backend_prefill="breakable", chunked_prefill_size=chunk)
    assert tokens(run(EngineCore(opened.runner), MIXED)) == expected["qwen3_vl"]
    encoded = [name for call in encoder.calls for name in call]
    assert sorted(encoded) == sorted(set(encoded)), "an item is encoded once for all of its chunks"


@pytest.mark.parametrize("prefill", STRATEGIES)
def test_stale_memory_in_the_buffers_reaches_nothing(
    engines: Any, expected: dict[str, Any], prefill: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, _ = engines(cuda_graph_backend_prefill=prefill)
    media, buffers = opened.runner.media, opened.runner.graphs.media
    stage = media.stage

    def poison_then_stage(*args: Any) -> Any:
        buffers.embeds_TE.fill_(NAN)
        buffers.deepstack_TLE.fill_(NAN)
        return stage(*args)

    monkeypatch.setattr(media, "stage", poison_then_stage)
    assert tokens(run(EngineCore(opened.runner), MIXED)) == expected["qwen3_vl"]


@pytest.mark.parametrize("ahead", [0, 1])
def test_prefix_cache_on_equals_off(engines: Any, expected: dict[str, Any], ahead: int) -> None:
    opened, encoder = engines(cuda_graph_backend_prefill="breakable")
    opened.runner.max_steps_ahead = ahead
    core = EngineCore(opened.runner, enable_prefix_caching=True)
    for _ in range(2):
        assert tokens(run(core, MIXED)) == expected["qwen3_vl"]
    assert core.report()["prefix_cache"]["hits"] >= 3 * BLOCK_SIZE
    assert len([name for call in encoder.calls for name in call]) == 5


def test_equal_tokens_with_another_image_share_nothing_behind_it(engines: Any) -> None:
    opened, _ = engines()
    one, other = (media_prompt([1] * 3, (name, 6, 8), [2] * 8) for name in (b"aaaa", b"bbbb"))
    assert one.token_ids == other.token_ids
    alone = {n: answers(run(EngineCore(opened.runner), {n: p})) for n, p in (("x", one), ("y", other))}
    core = EngineCore(opened.runner, enable_prefix_caching=True)
    assert answers(run(core, {"x": one})) == alone["x"]
    assert answers(run(core, {"y": other})) == alone["y"]
    assert core.report()["prefix_cache"]["hits"] == 0
    again = run(core, {"y": other})
    assert tokens(again)["y"] == [choice[0] for choice in alone["y"]["y"]]
    assert core.report()["prefix_cache"]["hits"] == 48, "the same image is found, up to the last token"


def test_cached_rows_need_no_encoder(engines: Any) -> None:
    """What the KV cache has of an image is not encoded again, even where its embedding is gone."""
    opened, encoder = engines()
    core = EngineCore(opened.runner, enable_prefix_caching=True)
    prompt = media_prompt([1] * 3, (b"aaaa", 4, 4), [2] * 28)
    first = run(core, {"x": prompt})
    opened.runner.media.forget()
    assert tokens(run(core, {"x": prompt})) == tokens(first)
    assert encoder.calls == [[b"aaaa"]]


@pytest.mark.parametrize("ahead", [0, 1])
def test_preemption_in_the_middle_of_images_changes_no_token(engines: Any, ahead: int) -> None:
    opened, _ = engines(kv_cache_tokens=11 * BLOCK_SIZE)
    opened.runner.max_steps_ahead = ahead
    prompts = {str(i): media_prompt([i + 1] * 3, (bytes([i]) * 4, 5, 7), [2]) for i in range(6)}
    params = greedy(max_tokens=25)
    alone: dict[str, RequestOutput] = {}
    for name, prompt in prompts.items():
        alone |= run(EngineCore(opened.runner), {name: prompt}, params)
    core = EngineCore(opened.runner)
    assert tokens(run(core, prompts, params)) == tokens(alone)
    assert core.scheduler.num_preemptions > 0


def test_one_image_in_several_requests_is_encoded_once(engines: Any) -> None:
    opened, encoder = engines()
    prompt = media_prompt([1], (b"aaaa", 2, 3), [2])
    outputs = run(EngineCore(opened.runner), {str(i): prompt for i in range(6)}, greedy(n=2))
    assert encoder.calls == [[b"aaaa"]]
    assert len({tuple(c.token_ids) for o in outputs.values() for c in o.outputs}) == 1
    assert opened.runner.report()["media"]["embedding_cache"]["encoded"] == 1


def test_without_a_cache_every_request_has_its_own_image_encoded(engines: Any) -> None:
    opened, encoder = engines(mm_embedding_cache_tokens=0)
    prompts = {name: media_prompt([1], (b"aaaa", 2, 3), [2]) for name in ("x", "y")}
    outputs = run(EngineCore(opened.runner), prompts)
    assert sorted(name for call in encoder.calls for name in call) == [b"aaaa"] * 2
    assert len({tuple(c.token_ids) for o in outputs.values() for c in o.outputs}) == 1
    assert opened.runner.report()["media"]["embedding_cache"]["items"] == 0


def test_cached_embeddings_never_change(engines: Any) -> None:
    opened, encoder = engines()
    core = EngineCore(opened.runner)
    run(core, MIXED)
    cache = opened.runner.media.cache
    shown = [prompt for prompt in MIXED.values() if isinstance(prompt, MediaPrompt)]
    items = {item.content_hash: item for prompt in shown for item in prompt.items}
    run(core, {"other": media_prompt((b"zzzz", 6, 8), [1]), "text": [1] * 30})
    for name, item in items.items():
        kept, made = cache.get(name), encoder.rows_of(item)
        assert torch.equal(kept.embeds_NE, made.embeds_NE)
        assert torch.equal(kept.deepstack_LNE, made.deepstack_LNE)


@pytest.mark.parametrize("capacity", [0, 40])
def test_a_small_embedding_cache_evicts_between_steps_and_changes_nothing(
    engines: Any, expected: dict[str, Any], capacity: int
) -> None:
    opened, encoder = engines(mm_embedding_cache_tokens=capacity, cuda_graph_backend_prefill="breakable")
    assert tokens(run(EngineCore(opened.runner), MIXED)) == expected["qwen3_vl"]
    report = opened.runner.report()["media"]["embedding_cache"]
    assert report["bytes"] <= report["capacity_bytes"] == capacity * 3 * 64 * 4
    assert report["evicted"] > 0
    assert len([name for call in encoder.calls for name in call]) == report["encoded"] >= 5


def test_an_abort_in_the_middle_of_an_image_frees_it(engines: Any) -> None:
    opened, _ = engines(mm_embedding_cache_tokens=0, cuda_graph_backend_prefill="breakable")
    core, cache = EngineCore(opened.runner), opened.runner.media.cache
    core.add_request("x", media_prompt([1] * 3, (b"aaaa", 6, 8), [2]), greedy())
    core.step()
    assert (cache.num_pinned, len(cache)) == (1, 1)
    core.abort_request("x")
    assert (cache.num_pinned, len(cache)) == (0, 0)
    assert [o.outputs[0].finish_reason for o in core.step()] == ["abort"]


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_item_that_cannot_be_encoded_fails_the_requests_that_show_it(
    engines: Any, expected: dict[str, Any], ahead: int
) -> None:
    opened, encoder = engines()
    opened.runner.max_steps_ahead = ahead
    encoder.fails = {b"cccc"}
    core = EngineCore(opened.runner, enable_prefix_caching=True)
    outputs = run(core, MIXED)
    assert outputs["several sizes"].outputs[0].finish_reason == "error"
    error = outputs["several sizes"].outputs[0].error
    assert error == "the image at prompt token 5 cannot be encoded: ValueError: no image: b'cccc'"
    good = {name: answer for name, answer in tokens(outputs).items() if name != "several sizes"}
    assert good == {name: expected["qwen3_vl"][name] for name in good}
    encoder.fails = set()
    assert tokens(run(core, MIXED)) == expected["qwen3_vl"], "nothing of the failed request was kept"


def test_a_failure_in_a_later_chunk_leaves_nothing_behind(engines: Any) -> None:
    opened, encoder = engines()
    prompt = media_prompt((b"aaaa", 4, 7), [1] * 20, (b"bbbb", 4, 4), [2])
    good = tokens(run(EngineCore(opened.runner), {"x": prompt}))
    opened.runner.media.forget()
    core = EngineCore(opened.runner, enable_prefix_caching=True)
    encoder.fails = {b"bbbb"}
    assert run(core, {"x": prompt})["x"].outputs[0].finish_reason == "error"
    assert core.scheduler.allocator.num_published == 0
    encoder.fails = set()
    assert tokens(run(core, {"x": prompt})) == good


def test_an_encoder_with_too_few_rows_fails_the_request(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, encoder = engines()
    short = encoder.rows_of(media_prompt((b"aaaa", 2, 2)).items[0])
    monkeypatch.setattr(encoder, "rows_of", lambda item: short)
    outputs = run(EngineCore(opened.runner), {"x": media_prompt([1], (b"bbbb", 2, 3), [2])})
    assert "the encoder made 4 rows for 6 placeholders" in (outputs["x"].outputs[0].error or "")


@pytest.mark.parametrize("prefill", ["full", "disabled"])
def test_a_prompt_whose_last_chunk_is_one_placeholder_runs_as_prefill(engines: Any, prefill: str) -> None:
    """Such a step looks like a decode step, and decode graphs have no rows for media."""
    opened, _ = engines(cuda_graph_backend_prefill=prefill)
    long = media_prompt([1] * 24, (b"aaaa", 2, 4))
    prompt = MediaPrompt(
        token_ids=long.token_ids[:-1],
        items=long.items,
        rope_positions_3T=long.rope_positions_3T[:, :-1],
        rope_delta=long.rope_delta + 1,
    )
    assert len(prompt.token_ids) == 33  # 32 tokens in a step
    other, _ = engines(chunked_prefill_size=128)
    expected = tokens(run(EngineCore(other.runner), {"x": prompt}))
    assert tokens(run(EngineCore(opened.runner), {"x": prompt})) == expected
    reasons = {row["reason"] for row in opened.runner.report()["eager"]}
    assert "media_rows" in reasons


def test_penalties_prompt_scores_and_choices_take_placeholders_for_ordinary_tokens(engines: Any) -> None:
    opened, _ = engines()
    prompt = MIXED["long"]
    assert isinstance(prompt, MediaPrompt)
    params = greedy(prompt_logprobs=2, repetition_penalty=1.2, presence_penalty=0.3, n=2)
    output = run(EngineCore(opened.runner, enable_prefix_caching=True), {"x": prompt}, params)["x"]
    assert [c.error for c in output.outputs] == [None, None]
    assert output.prompt_token_ids == prompt.token_ids
    scores = output.prompt_logprobs
    assert scores is not None
    assert len(scores) == len(prompt.token_ids)
    assert all(token in row for token, row in zip(prompt.token_ids[1:], scores[1:], strict=True) if row)
    with opened.runner.padded_eager():
        again = run(EngineCore(opened.runner), {"x": prompt}, params)["x"]
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in output.outputs]
    assert again.prompt_logprobs == scores


@pytest.mark.parametrize("prefill", ["full", "breakable"])
def test_an_engine_with_an_encoder_verifies(engines: Any, prefill: str) -> None:
    opened, _ = engines(cuda_graph_backend_prefill=prefill)
    report = verify_engine(opened, only_few_sizes=True)
    assert report.is_ok, str(report)


def test_verification_finds_rows_that_are_not_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def multiplied(model: Any, hidden: Any, positions: Any, is_media: Any, features: Any) -> Any:
        return model.layers(hidden, positions, (features * is_media[:, None, None]).transpose(0, 1))

    monkeypatch.setattr("gapless.engine.graph_set.layers_with_media", multiplied)
    opened, _ = open_media_engine(tmp_path, cuda_graph_backend_prefill="full")
    assert not verify_engine(opened, only_few_sizes=True).is_ok


def test_a_step_that_nobody_prepared_says_what_it_lacks(engines: Any) -> None:
    opened, encoder = engines()
    encoder.fails = {b"aaaa"}
    core = EngineCore(opened.runner)
    core.add_request("x", media_prompt([1], (b"aaaa", 2, 2), [2]), greedy())
    batch = core.scheduler.schedule()
    with pytest.raises(Exception, match="the image at prompt token 2 cannot be encoded"):
        opened.runner.launch(batch)
    core.abort_all()
    core.scheduler.complete(batch)
    core.step()


def test_shutdown_releases_the_encoder_and_keeps_the_report(tmp_path: Path) -> None:
    opened, encoder = open_media_engine(tmp_path, cuda_graph_backend_prefill="disabled")
    run(EngineCore(opened.runner), {"x": MIXED["one image"]})
    report = opened.runner.report()["media"]
    opened.runner.shutdown()
    assert encoder.is_released
    assert opened.runner.report()["media"] == report
    assert report["embedding_cache"]["encoded"] == 1

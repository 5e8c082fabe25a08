"""A tiny model with vision behind HTTP, asked with the official ``openai`` package.

Answers are those of the same weights in this process; a random model says little, so log-probabilities are
compared, which an image changes.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from media_files import data_url, png, video
from tiny_served_model import NAME, served

from gapless import LLM, SamplingParams
from loaded_scripts import load_script
from vl_checkpoints import IMAGE_ID, write_vl_folder

GRAPHS = (
    *("--cuda-graph-bs-prefill", "64", "--cuda-graph-bs-decode", "1,4", "--max-running-requests", "4"),
    *("--cuda-graph-backend-prefill", "breakable", "--enable-vit-cuda-graph"),
    *("--vit-cuda-graph-budgets", "64,128"),
)
CLIP = video(range(0, 200, 10), size=(32, 24))
QUESTION = "What?"
KWARGS = {"images_kwargs": {"max_pixels": 2048}}
"""Of the processor: 32 tokens of 8 by 8 pixels."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_vl_folder(tmp_path_factory.mktemp("vl"), "qwen3_vl", has_weights=False)


@pytest.fixture(scope="module")
def url(folder) -> Iterator[str]:
    (folder / "media").mkdir()
    (folder / "media" / "a.png").write_bytes(png(40, 32))
    options = (
        "--allowed-local-media-path",
        str(folder / "media"),
        "--limit-mm-per-prompt",
        "image=3",
        "--mm-processor-kwargs",
        json.dumps(KWARGS),
    )
    with served(folder, *GRAPHS, *options, "--max-image-pixels", "1000000", has_graphs=True) as address:
        yield address


@pytest.fixture(scope="module")
def api(url) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def offline(folder) -> Iterator[LLM]:
    options = {"load_format": "dummy", "enforce_eager": True, "kv_cache_tokens": 1024}
    with LLM(str(folder), mm_processor_kwargs=KWARGS, **options) as llm:
        yield llm


def image(width: int = 40, height: int = 32, *, seed: int = 0) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(png(width, height, seed=seed))}}


def messages(*parts: Any) -> list[Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


def ask(api: openai.OpenAI, *parts: Any, **options: Any) -> Any:
    options = {"max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 3, **options}
    return api.chat.completions.create(model=NAME, messages=messages(*parts), **options)


def logprobs(choice: Any) -> list[dict[str, float]]:
    """Per token the best three, by their bytes."""
    return [{str(top.bytes): top.logprob for top in token.top_logprobs} for token in choice.logprobs.content]


def check_equals_library(answer: Any, llm: LLM, *parts: Any) -> None:
    """Text, prompt tokens and the best three log-probabilities are those of the same weights here."""
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=3)
    (output,) = llm.chat(messages(*parts), params)
    (ours,), (theirs,) = output.outputs, answer.choices
    assert theirs.message.content == ours.text
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
    for row, of_llm in zip(logprobs(theirs), ours.logprobs, strict=True):
        best = sorted(entry.logprob for entry in of_llm.values())[-3:]
        assert sorted(row.values())[-3:] == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize(
    "parts",
    [
        (image(40, 32), QUESTION),
        (image(40, 32, seed=1), "and", image(24, 16, seed=2), QUESTION),
        ({"type": "video_url", "video_url": {"url": data_url(CLIP, "video/mp4")}}, QUESTION),
        (image(64, 64), QUESTION),
        (QUESTION,),
    ],
    ids=["image", "two images", "video", "scaled image", "text"],
)
def test_an_answer_is_that_of_the_library(api, offline, parts):
    check_equals_library(ask(api, *parts), offline, *parts)


def test_the_settings_of_the_processor_act(url):
    body = {"model": NAME, "messages": messages(image(64, 64))}
    assert httpx.post(f"{url}/tokenize", json=body).json()["tokens"].count(IMAGE_ID) == 25


def test_the_order_of_images_matters(api):
    there = ask(api, image(40, 32, seed=1), image(24, 16, seed=2), QUESTION)
    back = ask(api, image(24, 16, seed=2), image(40, 32, seed=1), QUESTION)
    assert there.usage.prompt_tokens == back.usage.prompt_tokens
    assert logprobs(there.choices[0]) != logprobs(back.choices[0])


@pytest.mark.parametrize("parts", [(image(), QUESTION), (image(seed=3), image(16, 16, seed=4)), ("Hello",)])
def test_a_streamed_answer_is_the_whole_one(api, parts):
    whole = ask(api, *parts)
    stream = list(ask(api, *parts, stream=True, stream_options={"include_usage": True}))
    chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
    assert "".join(c.delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert [row for c in chunks if c.logprobs for row in logprobs(c)] == logprobs(whole.choices[0])
    assert stream[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_file_is_the_same_image(api):
    path = f"file://{Path(__file__)}"
    with pytest.raises(openai.BadRequestError, match="not below the folder"):
        ask(api, {"type": "image_url", "image_url": {"url": path}})


def test_the_allowed_folder_is_read(api, folder):
    shown = {"type": "image_url", "image_url": {"url": f"file://{folder}/media/a.png"}}
    assert logprobs(ask(api, shown, QUESTION).choices[0]) == logprobs(ask(api, image(), QUESTION).choices[0])


def test_another_image_in_the_same_place_gives_another_answer(api):
    """Placeholders are equal tokens, so a cache that looked at tokens alone would mix them up."""
    one, other = (ask(api, image(40, 32, seed=seed), QUESTION) for seed in (11, 12))
    assert logprobs(one.choices[0]) != logprobs(other.choices[0])
    again = ask(api, image(40, 32, seed=11), QUESTION)
    for row, first in zip(logprobs(again.choices[0]), logprobs(one.choices[0]), strict=True):
        assert row == pytest.approx(first, abs=1e-4)
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_requests_at_the_same_time_do_not_mix(api):
    cases = [(image(16 + 8 * (i % 3), 24, seed=20 + i), f"{i}?") for i in range(6)] + [("plain",)]
    alone = [ask(api, *case) for case in cases]
    with ThreadPoolExecutor(len(cases)) as pool:
        together = list(pool.map(lambda case: ask(api, *case), cases))
    for one, other in zip(alone, together, strict=True):
        assert one.choices[0].message.content == other.choices[0].message.content
        for row, expected_row in zip(logprobs(one.choices[0]), logprobs(other.choices[0]), strict=True):
            assert sorted(row.values()) == pytest.approx(sorted(expected_row.values()), abs=1e-4)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([image()] * 4, "messages[0].content[3]: a request may have at most 3 images"),
        (
            [{"type": "image_url", "image_url": {"url": data_url(b"GIF89a")}}],
            "messages[0].content[0]: these bytes are no image that can be read",
        ),
        ([image(1001, 1000)], "1001 x 1000 pixels, the limit is 1000000 in all"),
        (
            [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}],
            "messages[0].content[0]: nothing is fetched from the web; send the image as a data URL, or "
            "start the server with --allowed-media-domains",
        ),
        (
            [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}],
            "'input_audio' are not",
        ),
    ],
)
def test_what_is_wrong_is_a_400_and_the_next_request_is_served(api, parts, message):
    with pytest.raises(openai.BadRequestError, match=re.escape(message)):
        ask(api, *parts)
    assert ask(api, image()).choices[0].finish_reason in ("stop", "length")


def test_a_caller_that_goes_away_leaves_nothing_behind(url, api):
    body = {"model": NAME, "messages": messages(image(seed=30)), "max_tokens": 400, "ignore_eos": True}
    gone = threading.Event()

    def leave() -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}) as answer:
                next(answer.iter_lines())
        finally:
            gone.set()

    threading.Thread(target=leave).start()
    assert gone.wait(20)
    assert ask(api, image(seed=30), max_tokens=2).usage.completion_tokens <= 2


def test_tokenize_counts_what_the_chat_counts(url, api):
    body = {"model": NAME, "messages": messages(image(), QUESTION)}
    found = httpx.post(f"{url}/tokenize", json=body).json()
    assert found["tokens"].count(IMAGE_ID) == 20
    assert found["count"] == ask(api, image(), QUESTION).usage.prompt_tokens


def test_what_was_seen_is_in_the_metrics(url, api):
    for seed in (40, 40, 41):
        ask(api, image(seed=seed))
    text = metrics_after(url, r"gapless:media_encoded_total\{[^}]*\} (\d+)")
    assert re.search(r'gapless:media_items_total\{kind="image"\} [1-9]', text)
    assert re.search(r'gapless:graph_replays_total\{phase="encoder",size="128",strategy="full"\} [1-9]', text)
    assert re.search(r"gapless:embedding_cache_bytes\{[^}]*\} [1-9]", text)
    assert "gapless:media_prepare_seconds_bucket" in text
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["input_modalities"] == ["text", "image", "video"]


def metrics_after(url: str, pattern: str) -> str:
    """Engine numbers are a heartbeat old."""
    for _ in range(100):
        text = httpx.get(f"{url}/metrics").text
        found = re.search(pattern, text)
        if found is not None and float(found[1]) > 0:
            return text
        threading.Event().wait(0.05)
    raise AssertionError(text)


def test_the_example_runs(url, tmp_path):
    file = Path(__file__).parents[2] / "examples" / "openai_vision.py"
    example = load_script(file)
    (tmp_path / "a.png").write_bytes(png(40, 32))
    (tmp_path / "b.mp4").write_bytes(CLIP)
    found = example.main([tmp_path / "a.png", tmp_path / "b.mp4"], url=url, max_tokens=4)
    assert found["prompt_tokens"] > 20

"""A real model behind HTTP: streamed answers are the whole ones to the byte, whatever was asked for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
EMOJI = "Repeat: 🙂🙃日本語テキスト🎉. Repeat: 🙂🙃日本語テキスト🎉. Repeat: 🙂🙃"


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("real") / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "gapless.launch_server", "--model-path=smollm2", "--port=0",
                "--cuda-graph-bs-decode", "1", "4", "--cuda-graph-bs-prefill=64", "--kv-cache-tokens=2048",
                "--max-running-requests=4", "--max-model-len=192", "--access-log=off", "--api-key=secret",
            ],
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while (found := re.search(r"serving at (\S+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield found[1]
    finally:
        process.terminate()
        process.wait(20)


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    response = httpx.post(f"{url}{path}", json=body, headers={"Authorization": "Bearer secret"}, timeout=60)
    assert response.status_code == 200, response.text
    return response


def whole(url: str, path: str, body: dict[str, Any]) -> tuple[dict[int, Any], dict[str, int]]:
    answer = post(url, path, body).json()
    choices = {}
    for choice in answer["choices"]:
        text = choice["text"] if path == TEXT else choice["message"]["content"] or ""
        choices[choice["index"]] = [
            text, choice["finish_reason"], choice.get("stop_reason"), lists_of(choice["logprobs"])
        ]  # fmt: skip
    return choices, answer["usage"]


def streamed(url: str, path: str, body: dict[str, Any]) -> tuple[dict[int, Any], dict[str, int]]:
    response = post(url, path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    choices: dict[int, Any] = {}
    usage = None
    for chunk in map(json.loads, lines):
        usage = chunk["usage"]
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], ["", None, None, {}])
            choice[0] += part["text"] if path == TEXT else part["delta"].get("content") or ""
            if part["finish_reason"] is not None:
                choice[1:3] = part["finish_reason"], part.get("stop_reason")
            for name, values in lists_of(part["logprobs"]).items():
                choice[3][name] = choice[3].get(name, []) + values
    return choices, usage


def lists_of(logprobs: dict[str, Any] | None) -> dict[str, list[Any]]:
    return {name: value for name, value in (logprobs or {}).items() if value}


def chat(text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [{"role": "user", "content": text}], **fields}


def text(prompt: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"prompt": prompt, **fields}


CASES = {
    "greedy": text("Once upon a time", max_tokens=24, temperature=0),
    "characters over several tokens": text(EMOJI, max_tokens=20, temperature=0, logprobs=2),
    "cut within a character": text(EMOJI, max_tokens=7, temperature=0, logprobs=1),
    "three seeded choices": text(EMOJI, max_tokens=12, temperature=1, seed=5, n=3, logprobs=1),
    "everything that samples": text(
        "1 2 3", max_tokens=16, seed=1, n=2, top_p=0.9, top_k=30, min_p=0.01, temperature=0.9,
        presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.1,
    ),
    "echo of two prompts": text(["Once upon", "A, B"], max_tokens=8, temperature=0, echo=True, logprobs=2),
    "echo alone": text(EMOJI, max_tokens=0, echo=True, logprobs=1),
    "a stop string within a token": text("Once upon a time", max_tokens=40, temperature=0, stop=["it"]),
    "a stop string over tokens": text("Once upon a time", max_tokens=40, temperature=0, stop=["ty of N"]),
    "a stop string that stays": text(
        "Once upon a time", max_tokens=40, temperature=0, stop=["ty of N"], include_stop_str_in_output=True
    ),
    "special tokens": text("<|im_start|><|im_end|>", max_tokens=6, temperature=0, ignore_eos=True, echo=True),
    "a chat": chat("Say hi with emoji 🙂", max_tokens=12, temperature=0, logprobs=True, top_logprobs=3),
    "chats": chat("The Japanese word for cat?", max_tokens=12, temperature=1.2, seed=9, n=3),
    "special tokens shown": chat("x", max_tokens=8, temperature=0, skip_special_tokens=False),
}  # fmt: skip


IN_SOAK = {
    *("greedy", "everything that samples", "echo of two prompts", "a stop string within a token"),
    *("a stop string that stays", "special tokens", "chats", "special tokens shown"),
}
PARAMETERS = [
    pytest.param(*case, id=name, marks=[pytest.mark.soak] if name in IN_SOAK else [])
    for name, case in CASES.items()
]


@pytest.mark.parametrize(("path", "body"), PARAMETERS)
def test_a_streamed_answer_is_the_whole_one(url, path, body):
    expected, expected_usage = whole(url, path, body)
    found, usage = streamed(url, path, body)
    assert found == expected
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == expected_usage[name]


def test_the_bytes_of_a_chats_tokens_are_those_of_its_text(url):
    choices, _ = whole(url, *chat("Say hi with emoji 🙂", max_tokens=24, temperature=0, logprobs=True))
    content, _, _, logprobs = choices[0]
    assert not content.isascii(), "tokens that hold parts of characters are what this is about"
    data = b"".join(bytes(token["bytes"]) for token in logprobs["content"])
    assert data.decode("utf-8", "replace").startswith(content)


def test_a_prompt_at_the_limit_is_taken_and_one_beyond_is_not(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
    limit = httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer secret"}).json()
    limit = limit["data"][0]["max_model_len"]
    answer = client.completions.create(model="smollm2", prompt=[5] * (limit - 1), max_tokens=1)
    assert (answer.usage.prompt_tokens, answer.choices[0].finish_reason) == (limit - 1, "length")
    for prompt, max_tokens in (([5] * limit, 1), ([5] * (limit - 1), 2)):
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model="smollm2", prompt=prompt, max_tokens=max_tokens)
        assert error.value.code == "context_length_exceeded"


def test_the_clients_streaming_helper_sees_the_same_text(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
    _, body = chat("Name three colours.", max_tokens=40, temperature=0, stop=[",", "."])
    expected = client.chat.completions.create(model="smollm2", **body).choices[0].message.content
    with client.chat.completions.stream(model="smollm2", **body) as stream:
        parts = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(parts) == final.choices[0].message.content == expected


def test_identical_request_ids_and_aborts_in_between_do_not_mix_answers(url):
    """The engine's ids are its own, whatever callers call their requests."""
    path, body = text("Once upon a time", max_tokens=8, temperature=0)
    headers = {"Authorization": "Bearer secret", "X-Request-Id": "the-same"}
    expected = post(url, path, body).json()["choices"][0]["text"]
    with httpx.stream("POST", f"{url}{path}", json={**body, "stream": True}, headers=headers) as stream:
        next(stream.iter_lines())
    answers = [httpx.post(f"{url}{path}", json=body, headers=headers, timeout=60) for _ in range(3)]
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [expected] * 3
    assert {answer.headers["x-request-id"] for answer in answers} == {"the-same"}
    assert len({answer.json()["id"] for answer in answers}) == 3

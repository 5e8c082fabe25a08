"""Structured output through ``gapless serve``: a tiny random model whose every answer fits what was asked."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

pytest.importorskip("xgrammar")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def url(tiny_url: str) -> str:
    return tiny_url


def chat(url: str, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 700, "seed": 1}
    return httpx.post(f"{url}/v1/chat/completions", json={**body, **fields}, timeout=120)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def assert_fits(text: str) -> None:
    value = json.loads(text)
    assert value.keys() == {"name", "ok"}
    assert len(value["name"]) <= 5
    assert isinstance(value["ok"], bool)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_a_schema_binds_the_answer(url: str, temperature: float) -> None:
    assert_fits(text_of(chat(url, response_format=schema_format(SCHEMA), temperature=temperature)))


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, r"x\dy"),
    ],
    ids=str,
)
def test_other_forms(url: str, wanted: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, text_of(chat(url, structured_outputs=wanted)))


def test_streams_say_the_same_beside_each_other_and_free_text(url: str) -> None:
    """Eight at once, a different seed each, every other one free."""

    def stream(seed: int) -> str:
        fields = {"response_format": schema_format(SCHEMA)} if seed % 2 else {"max_tokens": 30}
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 700}
        lines = httpx.post(
            f"{url}/v1/chat/completions", json={**body, "seed": seed, "stream": True, **fields}, timeout=120
        ).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(stream, range(8)))
    for seed, text in enumerate(texts):
        if seed % 2:
            assert_fits(text)
            assert text == text_of(chat(url, response_format=schema_format(SCHEMA), seed=seed))


def test_a_forced_call_has_arguments_that_fit(url: str) -> None:
    choice = {"type": "function", "function": {"name": "look"}}
    response = chat(url, tools=[TOOL], tool_choice=choice)
    assert response.status_code == 200, response.text
    (call,) = response.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    assert_fits(call["function"]["arguments"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": schema_format({"type": "strnig"})}, "strnig"),
        ({"response_format": schema_format({"not": {}})}, "'not' is not supported"),
        ({"structured_outputs": {"regex": "(a"}}, "Regex parsing error"),
        ({"structured_outputs": {"grammar": "root ::= b"}}, "not defined"),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_wrong_grammar_is_a_400_with_its_reason(
    url: str, fields: dict[str, Any], words: str, is_stream: bool
) -> None:
    response = chat(url, stream=is_stream, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


def test_an_answer_that_is_cut_says_so(url: str) -> None:
    response = chat(url, response_format=schema_format(SCHEMA), max_tokens=3)
    assert response.json()["choices"][0]["finish_reason"] == "length"


def test_steps_that_wait_for_a_token_are_reported(url: str) -> None:
    text_of(chat(url, structured_outputs={"regex": "abc"}))
    assert "host_dependent_sampling" in httpx.get(f"{url}/server_info").text

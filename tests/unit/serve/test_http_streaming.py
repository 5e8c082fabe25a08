"""A streamed answer, put together, is the whole answer, byte for byte; and how a stream is framed."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import time
from typing import Any

import pytest
from http_fakes import Connection, FakeClient, answer, chat_body, events_of, make_app, post, spell, text_body
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.serve import chat_stream, text_answers

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TEXTS = st.text(max_size=40) | st.sampled_from(
    ["🙂🙃", "한국어 문장", "e\u0301", "\u2028\n\n", "data: [DONE]\n\n", "\x00"]
)
SIZES = st.lists(st.integers(1, 6), max_size=20)

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def assemble_chat(events: list[dict[str, Any]], *, has_logprobs: bool = False) -> list[dict[str, Any]]:
    """The choices of a whole answer, from a stream's chunks."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in events:
        for part in chunk["choices"]:
            new = {"message": {"content": None, "refusal": None}, "finish_reason": None}
            new["logprobs"] = {"content": [], "refusal": None} if has_logprobs else None
            choice = choices.setdefault(part["index"], {"index": part["index"], **copy.deepcopy(new)})
            assert choice["finish_reason"] is None, "nothing follows the end of a choice"
            delta, message = part["delta"], choice["message"]
            if "role" in delta:
                assert "role" not in message
                message["role"] = delta["role"]
            if delta.get("content"):
                message["content"] = (message["content"] or "") + delta["content"]
            for call in delta.get("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                if "id" in call:
                    calls.append({"type": call["type"], "function": {"name": "", "arguments": ""}})
                function = calls[call["index"]]["function"]
                function["name"] += call["function"].get("name", "")
                function["arguments"] += call["function"].get("arguments", "")
            if part["logprobs"] is not None:
                choice["logprobs"]["content"] += part["logprobs"]["content"]
            choice["finish_reason"] = part["finish_reason"]
            if "stop_reason" in part:
                choice["stop_reason"] = part["stop_reason"]
    for choice in choices.values():
        if choice["message"]["content"] is None and "tool_calls" not in choice["message"]:
            choice["message"]["content"] = ""
    return [choices[index] for index in sorted(choices)]


def assemble_text(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    choices: dict[int, dict[str, Any]] = {}
    for chunk in events:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {**part, "text": "", "logprobs": None})
            choice["text"] += part["text"]
            if part["logprobs"] is not None:
                if choice["logprobs"] is None:
                    choice["logprobs"] = part["logprobs"]
                else:
                    for name, values in part["logprobs"].items():
                        choice["logprobs"][name] += values
            choice["finish_reason"] = part["finish_reason"]
            if "stop_reason" in part:
                choice["stop_reason"] = part["stop_reason"]
    return [choices[index] for index in sorted(choices)]


def without_ids(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for choice in choices:
        for call in choice["message"].get("tool_calls", []):
            assert call.pop("id")
    return choices


@given(text=TEXTS, sizes=SIZES, n=st.integers(1, 3), k=st.sampled_from([None, 0, 3]))
@settings(max_examples=40, deadline=None)
def test_a_streamed_chat_equals_the_whole_one(text, sizes, n, k):
    client = FakeClient(answer(text, sizes=sizes, stop_reason="x"))
    app = make_app(client)
    fields = {"n": n} | ({} if k is None else {"logprobs": True, "top_logprobs": k})
    whole = post(app, CHAT, chat_body(**fields)).json()
    events = events_of(
        post(app, CHAT, chat_body(**fields, stream=True, stream_options={"include_usage": True}))
    )
    assert assemble_chat(events, has_logprobs=k is not None) == whole["choices"]
    assert whole["choices"][0]["message"]["content"] == text
    assert events[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events[:-1])


@given(
    text=TEXTS,
    sizes=SIZES,
    n=st.integers(1, 2),
    k=st.sampled_from([None, 0, 3]),
    echo=st.booleans(),
    prompt=st.sampled_from(["Once", ["a", "bc"], [1, 2], [[65], [66, 67]]]),
)
@settings(max_examples=40, deadline=None)
def test_a_streamed_completion_equals_the_whole_one(text, sizes, n, k, echo, prompt):
    app = make_app(FakeClient(answer(text, sizes=sizes)))
    fields = {"n": n, "logprobs": k, "echo": echo, "prompt": prompt}
    whole = post(app, TEXT, text_body(**fields)).json()
    events = events_of(
        post(app, TEXT, text_body(**fields, stream=True, stream_options={"include_usage": True}))
    )
    assert assemble_text(events) == whole["choices"]
    assert whole["choices"][-1]["text"].endswith(text)
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(whole["choices"])))
    assert events[-1]["usage"] == whole["usage"]


@given(
    parts=st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"ä": "🙂"}}', "text", "\n", "{", "é"]
        ),
        max_size=8,
    ),
    sizes=SIZES,
    k=st.sampled_from([None, 2]),
    choice=st.sampled_from(["auto", "required", "none", {"type": "function", "function": {"name": "f"}}]),
    parallel=st.booleans(),
    reason=st.sampled_from(["stop", "length"]),
)
@settings(max_examples=60, deadline=None)
def test_streamed_tool_calls_equal_the_whole_ones(parts, sizes, k, choice, parallel, reason):
    app = make_app(FakeClient(answer("".join(parts), sizes=sizes, finish_reason=reason)))
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel}
    fields |= {} if k is None else {"logprobs": True, "top_logprobs": k}
    whole = post(app, CHAT, chat_body(**fields)).json()
    events = events_of(post(app, CHAT, chat_body(**fields, stream=True)))
    assert assemble_chat(events, has_logprobs=k is not None) == without_ids(whole["choices"])


@given(
    text=TEXTS,
    sizes=SIZES,
    n=st.integers(1, 2),
    usage=st.booleans(),
    model=st.sampled_from(['"text":""', "é"]),
)
@settings(max_examples=40, deadline=None)
def test_events_of_plain_text_are_the_bytes_that_encoding_them_whole_gives(text, sizes, n, usage, model):
    app = make_app(FakeClient(answer(text, sizes=sizes)), served_model_names=(model,))
    options = {"model": model, "n": n, "stream": True, "stream_options": {"include_usage": usage}}
    for path, body, module in ((CHAT, chat_body, chat_stream), (TEXT, text_body, text_answers)):
        quick = post(app, path, body(**options)).content
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module._Choice, "is_plain", lambda self, delta: False)
            slow = post(app, path, body(**options)).content
        changing = rb'"id":"[^"]*","created":\d+'
        assert re.sub(changing, b"", quick) == re.sub(changing, b"", slow)


def test_a_chat_stream_begins_with_the_role_and_ends_each_choice_with_an_empty_delta():
    events = events_of(post(make_app(FakeClient(answer("ab"))), CHAT, chat_body(stream=True)))
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {},
    ]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, "stop"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert events[0]["id"].startswith("chatcmpl-")
    assert not any("usage" in event for event in events)


def test_what_comes_in_one_list_leaves_in_one_write():
    sends = []

    def script(request):
        yield spell(request, "a" * 50)[:25]
        yield spell(request, "a" * 50)[25:]

    app = make_app(FakeClient(script))

    async def counting(scope, receive, send):
        async def counted(message):
            sends.append(message)
            await send(message)

        await app(scope, receive, counted)

    events = events_of(post(counting, TEXT, text_body(stream=True)))
    assert len(events) == 51
    assert [message["type"] for message in sends] == ["http.response.start"] + ["http.response.body"] * 3


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_prompts_and_choices_stay_apart_under_interleaving(path):
    def script(request):
        for index in range(3):
            name = f"{len(request.prompt_token_ids)}-{index}"
            deltas = spell(request, name * 5, index=index)
            yield deltas[:4]
            yield deltas[4:]

    app = make_app(FakeClient(script))
    if path == CHAT:
        whole = post(app, path, chat_body(n=3)).json()["choices"]
        length = len(app_prompt(app, path))
        assert [c["message"]["content"] for c in whole] == [f"{length}-{i}" * 5 for i in range(3)]
    else:
        body = text_body(prompt=[[1] * 7, [1] * 8], n=3)
        expected = [f"{length}-{i}" * 5 for length in (7, 8) for i in range(3)]
        assert [c["text"] for c in post(app, path, body).json()["choices"]] == expected
        events = events_of(post(app, path, {**body, "stream": True}))
        assert [c["text"] for c in assemble_text(events)] == expected


def app_prompt(app: Any, path: str) -> list[int]:
    return post(app, "/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json()["tokens"]


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body), (TEXT, text_body)])
def test_an_error_in_mid_stream_is_the_last_event(path, body):
    def script(request):
        yield spell(request, "abc")[:2]
        raise RuntimeError("secret detail")

    response = post(make_app(FakeClient(script)), path, body(stream=True))
    frames = response.content.decode().strip().split("\n\n")
    assert response.status_code == 200
    error = json.loads(frames[-1].removeprefix("data: "))["error"]
    assert error == {
        "message": "internal error",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert "[DONE]" not in response.text
    assert "secret" not in response.text


@pytest.mark.parametrize(
    ("reason", "status", "code"), [("error", 500, "engine_error"), ("abort", 503, "server_draining")]
)
@pytest.mark.parametrize("streams", [False, True])
def test_a_choice_ended_by_the_engine_is_an_error(reason, status, code, streams):
    def script(request):
        yield spell(request, "ab")[:1]
        yield spell(request, "", finish_reason=reason)

    response = post(make_app(FakeClient(script)), TEXT, text_body(stream=streams))
    if streams:
        assert (
            json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]["code"]
            == code
        )
    else:
        assert response.status_code == status
        assert response.json()["error"]["code"] == code


def test_a_stream_that_fails_before_its_first_token_has_a_real_status():
    response = post(make_app(FakeClient(lambda request: [RuntimeError("x")])), TEXT, text_body(stream=True))
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert post(make_app(FakeClient(lambda r: [])), TEXT, text_body(stream=True)).status_code == 500


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat_body(stream=True)),
        (TEXT, text_body(stream=True)),
        (CHAT, chat_body(stream=True, tools=TOOLS)),
    ],
)
def test_a_streamed_token_costs_less_than_its_budget(path, body):
    """60 microseconds for HTTP and detokenising together; processor time, best of five."""
    num_tokens = 500

    def script(request):
        for delta in spell(request, "a" * num_tokens):
            yield [delta]

    async def scenario():
        app = make_app(FakeClient(script))
        costs = []
        for _ in range(5):
            start = time.process_time()
            await Connection(app, path, json.dumps(body).encode()).task
            costs.append((time.process_time() - start) / num_tokens)
        return min(costs)

    assert asyncio.run(scenario()) < 60e-6

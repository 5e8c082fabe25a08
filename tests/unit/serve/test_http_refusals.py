"""What is accepted without effect, what is refused by name, and bodies that mean harm: always a clear 4xx."""

from __future__ import annotations

import asyncio
import json
import time
from typing import get_args

import pytest
from http_fakes import MODEL, ByteTokenizer, FakeClient, answer, call, chat_body, make_app, post, text_body

from gapless.serve.limits import MAX_DEPTH
from gapless.serve.protocol.chat import ChatRequest
from gapless.serve.protocol.common import IGNORED, NEUTRAL
from gapless.serve.protocol.completions import CompletionRequest
from gapless.serve.settings import ToolCallParser
from gapless.serve.tools import PARSERS

CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
BODIES = {CHAT: chat_body(), TEXT: text_body(), EMBED: {"input": "x"}, "/tokenize": {"prompt": "x"}}
BODIES["/detokenize"] = {"tokens": [1]}
REQUESTS = {CHAT: ChatRequest, TEXT: CompletionRequest}


def refused(response, status=400, param=None, code=None):
    """Checks the body's shape and returns the message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error
    return error["message"]


@pytest.mark.parametrize("name", sorted(IGNORED))
@pytest.mark.parametrize("value", [None, "text", True, {"a": [1]}])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_fields_that_cannot_change_the_answer_are_taken(path, name, value):
    client = FakeClient()
    assert post(make_app(client), path, {**BODIES[path], name: value}).status_code == 200


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (path, name, value)
        for path in (CHAT, TEXT)
        for name in REQUESTS[path].neutral
        for value in (None, *NEUTRAL[name])
    ],
)
def test_unsupported_fields_are_taken_at_their_default(path, name, value):
    assert post(make_app(), path, {**BODIES[path], name: value}).status_code == 200


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path in (CHAT, TEXT) for name in REQUESTS[path].neutral]
)
@pytest.mark.parametrize("value", ["other", 7, ["x"]])
def test_unsupported_fields_are_refused_by_name(path, name, value):
    assert name in refused(post(make_app(), path, {**BODIES[path], name: value}), param=name)


@pytest.mark.parametrize("name", sorted(REQUESTS[CHAT].model_fields))
def test_null_is_the_same_as_leaving_a_chat_field_out(name):
    response = post(make_app(), CHAT, {**BODIES[CHAT], name: None})
    if name == "messages":
        refused(response, param="messages", code="missing_required_parameter")
    else:
        assert response.status_code == 200


@pytest.mark.parametrize("name", sorted(REQUESTS[TEXT].model_fields))
def test_null_is_the_same_as_leaving_a_completion_field_out(name):
    response = post(make_app(), TEXT, {**BODIES[TEXT], name: None})
    if name == "prompt":
        refused(response, param="prompt", code="missing_required_parameter")
    else:
        assert response.status_code == 200


@pytest.mark.parametrize("path", sorted(BODIES))
@pytest.mark.parametrize("name", ["temprature", "x", "", "ü", "a" * 300, "__class__"])
def test_unknown_fields_are_refused_by_name(path, name):
    message = refused(post(make_app(), path, {**BODIES[path], name: 1}), code="unknown_parameter")
    assert name[:50] in message


BAD_VALUES = [
    ("temperature", -1),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", 1e308),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", 2**31),
    ("min_p", 1.1),
    ("seed", 2**63),
    ("seed", "7"),
    ("seed", 10**4000),
    ("n", 0),
    ("n", 129),
    ("n", "2"),
    ("n", 10**30),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("max_tokens", -1),
    ("max_tokens", 10**20),
    ("max_tokens", 4096),
    ("max_tokens", 1.0),
    ("min_tokens", -1),
    ("stop", ""),
    ("stop", [""]),
    ("stop", 5),
    ("stop", [5]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", "x"),
    ("stop_token_ids", [2**31]),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("response_format", "json"),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
    ("structured_outputs", {}),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}),
    ("structured_outputs", {"choice": []}),
    ("structured_outputs", {"json": "no"}),
    ("structured_outputs", {"json": "[]"}),
    ("regex", 1),
    ("model", 5),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("name", "value"), BAD_VALUES, ids=lambda v: str(v)[:30])
def test_bad_values_are_refused_with_the_fields_name(path, name, value):
    assert name in refused(post(make_app(), path, {**BODIES[path], name: value}))


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": "Hi"},
        {"messages": ["Hi"]},
        {"messages": [{}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "king", "content": "x"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": "x", "tool_calls": []}]},
        {"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]},
        {"messages": [{"role": "user", "content": "x", "mood": "good"}]},
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "["}}
                    ],
                }
            ]
        },
        {"messages": [{"role": "user", "content": "template-fails"}]},
        {"messages": [{"role": "user", "content": "x" * 5000}]},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_bad_messages_are_refused(fields):
    response = post(make_app(), CHAT, chat_body(**fields))
    refused(response)
    assert response.json()["error"]["param"].startswith("messages")


@pytest.mark.parametrize(
    ("content", "path", "words"),
    [
        (
            [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}],
            "[1]",
            "'image_url'",
        ),
        ([{"type": "input_audio", "input_audio": {}}], "[0]", "'input_audio'"),
        ([{"type": "text"}], "[0]", "needs the field 'text'"),
        ([{"type": "text", "text": "x", "size": 1}], "[0].size", "unknown or unsupported"),
        ([{"type": "text", "text": 5}], "[0].text", "valid string"),
        (["x"], "[0]", "valid dictionary"),
        (5, "", "valid string"),
    ],
    ids=str,
)
def test_the_part_of_a_message_that_is_wrong_is_named(content, path, words):
    response = post(make_app(), CHAT, chat_body(messages=[{"role": "user", "content": content}]))
    assert words in refused(response)
    assert response.json()["error"]["param"] == "messages[0].content" + path


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"top_logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"chat_template_kwargs": {"messages": []}}, "messages"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
        ({"chat_template_kwargs": {"self": 1}}, "template"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"tool_choice": "required"}, "tools"),
        ({"tool_choice": "auto"}, "tools"),
        ({"tool_choice": "sometimes", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "'g'"),
        ({"tools": [TOOL, TOOL]}, "'f'"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "name"),
        ({"tools": [{"type": "retrieval"}]}, "type"),
        ({"tools": [TOOL], "tool_choice": "required", "regex": "x"}, "tool_choice"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"regex": "x", "response_format": {"type": "json_object"}}, "regex"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_contradictions_in_a_chat_are_refused(fields, part):
    response = post(make_app(), CHAT, chat_body(**fields))
    assert part in refused(response)
    param = response.json()["error"]["param"]
    if "response_format" not in fields:  # beside it nothing is more at fault than the other
        assert param is not None
        assert param.split("[")[0].split(".")[0] in fields


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_options_of_a_stream_without_a_stream_are_named(path):
    body = {**BODIES[path], "stream_options": {"include_usage": True}}
    refused(post(make_app(), path, body), param="stream_options")


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [[]],
        [1, "a"],
        ["a", 1],
        [True],
        [1.5],
        {},
        5,
        [-1],
        [257],
        [10**30],
        [["a"]],
        "x" * 4097,
        ["a"] * 1025,
    ],
    ids=lambda prompt: str(prompt)[:20],
)
@pytest.mark.parametrize("path", [TEXT, EMBED])
def test_bad_prompts_are_refused(path, prompt):
    name = "prompt" if path == TEXT else "input"
    tokenizer = NoBos()
    refused(post(make_app(tokenizer=tokenizer), path, {name: prompt}))


class NoBos(ByteTokenizer):
    def encode(self, text, *, add_special_tokens=True):
        return super().encode(text, add_special_tokens=False)


def test_max_tokens_of_zero_needs_echo():
    assert "max_tokens" in refused(post(make_app(), TEXT, text_body(max_tokens=0)))
    assert post(make_app(), TEXT, text_body(max_tokens=0, echo=True)).status_code == 200


def test_a_server_may_take_fewer_choices():
    assert "at most 2" in refused(post(make_app(max_n=2), TEXT, text_body(n=3)), param="n")
    refused(post(make_app(), TEXT, text_body(prompt=["a"] * 100, n=100)), param="n")


@pytest.mark.parametrize("path", sorted(BODIES))
def test_an_unknown_model_is_404(path):
    message = refused(
        post(make_app(), path, {**BODIES[path], "model": "gpt"}), 404, "model", "model_not_found"
    )
    assert "gpt" in message


@pytest.mark.parametrize("path", sorted(BODIES))
def test_a_model_left_out_is_the_one_that_is_served(path):
    body = {name: value for name, value in BODIES[path].items() if name != "model"}
    assert post(make_app(served_model_names=("a", "b")), path, body).status_code == 200


def test_dimensions_are_refused_unless_they_are_the_models_own():
    assert post(make_app(), EMBED, {"input": "x", "dimensions": 3}).status_code == 200
    assert "3" in refused(post(make_app(), EMBED, {"input": "x", "dimensions": 2}), param="dimensions")


def test_tools_without_a_known_format_need_a_forced_call():
    class Plain(ByteTokenizer):
        chat_template = "{{ messages }}"

    app = make_app(tokenizer=Plain())
    refused(post(app, CHAT, chat_body(tools=[TOOL])), param="tools")
    refused(post(make_app(tool_call_parser="none"), CHAT, chat_body(tools=[TOOL])), param="tools")
    assert post(app, CHAT, chat_body(tools=[TOOL], tool_choice="required")).status_code == 200
    assert post(app, CHAT, chat_body(tools=[TOOL], tool_choice="none")).status_code == 200


@pytest.mark.parametrize("name", sorted({"auto", *PARSERS}))
def test_the_servers_parser_may_be_named(name):
    client = FakeClient(answer("[TOOL_CALLS]f{}"))
    reply = post(make_app(client, tool_call_parser=name), CHAT, chat_body(tools=[TOOL])).json()
    assert (reply["choices"][0]["finish_reason"] == "tool_calls") == (name == "mistral")
    keeps = client.requests[0].params.get("skip_special_tokens") is False
    assert keeps == (name == "mistral")


def test_settings_know_every_parser():
    assert set(get_args(ToolCallParser)) == {"auto", "none", *PARSERS}


def test_a_model_without_a_tokenizer_takes_token_ids_only():
    client = FakeClient()
    app = make_app(client, tokenizer=None)
    assert post(app, TEXT, text_body(prompt=[1, 2])).status_code == 200
    assert client.requests[0].params == {"detokenize": False}
    for path, body in ((CHAT, chat_body()), (TEXT, text_body()), ("/tokenize", {"prompt": "x"})):
        assert "tokenizer" in refused(post(app, path, body))
    refused(post(app, TEXT, text_body(prompt=[1], stop="x")))


RAW = {
    "empty": b"",
    "not JSON": b"{model",
    "trailing": b"{} {}",
    "single quotes": b"{'a': 1}",
    "comment": b"{} // x",
    "invalid UTF-8": b'{"prompt": "\xff"}',
    "half of UTF-8": b'{"prompt": "\xc3"}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "Infinity": b'{"prompt": "x", "temperature": Infinity}',
    "-Infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "overflow": b'{"prompt": "x", "temperature": 1e999}',
    "many digits": b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    "duplicate": b'{"prompt": "x", "prompt": "y"}',
    "duplicate within": b'{"prompt": "x", "metadata": {"a": 1, "a": 2}}',
    "surrogate": b'{"prompt": "\\ud800"}',
    "surrogate in a name": b'{"prompt": "x", "\\udfff": 1}',
    "control character": b'{"prompt": "\x01"}',
    "deep lists": b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}",
    "deeper lists": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "unclosed": b"[" * 200_000,
    "list": b"[]",
    "number": b"5",
    "null": b"null",
    "string": b'"prompt"',
}


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
@pytest.mark.parametrize("path", sorted(BODIES))
def test_malformed_bodies_are_refused_quickly(path, raw):
    start = time.perf_counter()
    refused(call(make_app(), "POST", path, content=raw, headers={"content-type": "application/json"}))
    assert time.perf_counter() - start < 5


def test_nesting_up_to_the_limit_is_taken():
    deep = "x"
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert post(make_app(), TEXT, text_body(metadata=deep)).status_code == 200
    assert "nested" in refused(post(make_app(), TEXT, text_body(metadata=[deep])))


def test_a_surrogate_pair_in_two_halves_is_one_character():
    client = FakeClient()
    raw = b'{"prompt": "\\ud83d\\ude42"}'
    headers = {"content-type": "application/json"}
    assert call(make_app(client), "POST", TEXT, content=raw, headers=headers).status_code == 200
    assert bytes(client.requests[0].prompt_token_ids[1:]).decode() == "🙂"


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ('Application/JSON; charset="UTF-8"', 200),
        ("application/vnd.api+json", 200),
        ("application/json; charset=latin-1", 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("json", 415),
    ],
)
def test_content_types(content_type, status):
    raw = json.dumps(text_body()).encode()
    response = call(make_app(), "POST", TEXT, content=raw, headers={"content-type": content_type})
    assert response.status_code == status
    if status == 415:
        refused(response, 415, code="unsupported_media_type")


def test_a_compressed_body_is_refused():
    refused(call(make_app(), "POST", TEXT, content=b"x", headers={"content-encoding": "gzip"}), 415)


@pytest.mark.parametrize("declared", [True, False])
def test_oversized_bodies_are_413(declared):
    raw = json.dumps(text_body(user="x" * 2000)).encode()

    async def parts():
        for start in range(0, len(raw), 100):
            yield raw[start : start + 100]

    content = raw if declared else parts()
    app = make_app(max_body_bytes=1024)
    message = refused(call(app, "POST", TEXT, content=content), 413, code="body_too_large")
    assert "1024" in message


def test_a_body_that_never_ends_is_given_up(monkeypatch):
    monkeypatch.setattr("gapless.serve.limits.BODY_TIMEOUT_S", 0.05)

    async def parts():
        yield b'{"prompt": '
        await asyncio.sleep(5)
        yield b'"x"}'

    refused(call(make_app(), "POST", TEXT, content=parts()), 408, code="body_timeout")


@pytest.mark.parametrize("length", ["-1", "abc", "1e3", "9" * 30, "٣"])
def test_strange_content_lengths_are_refused(length):
    response = call(make_app(), "POST", TEXT, content=b"{}", headers=[(b"content-length", length.encode())])
    assert response.status_code in (400, 413)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", sorted(BODIES))
def test_other_methods_are_405(method, path):
    response = call(make_app(), method, path)
    refused(response, 405, code="method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/completions/", "/v1/engines", "/docs", "/../etc/passwd", "/%00"]
)
def test_unknown_paths_are_404(path):
    refused(call(make_app(), "GET", path), 404, code="not_found")


def test_what_a_caller_sent_is_echoed_only_in_part():
    response = post(make_app(), TEXT, text_body(model="m" * 100_000))
    assert len(response.content) < 2000
    response = post(make_app(), TEXT, text_body(prompt={"x" * 100_000: 1}))
    assert len(response.content) < 2000


@pytest.mark.parametrize("model", [MODEL, None])
def test_nothing_refused_reaches_the_engine(model):
    client = FakeClient()
    for name, value in BAD_VALUES:
        post(make_app(client), TEXT, {**text_body(model=model), name: value})
    assert client.requests == []

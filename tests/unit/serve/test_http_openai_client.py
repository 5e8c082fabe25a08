"""The official client, over every field that it and vLLM's users send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from http_fakes import MODEL, FakeClient, answer, make_app

from gapless.errors import RequestError
from gapless.serve.client import EngineBusyError, EngineDeadError, EngineDrainingError

openai = pytest.importorskip("openai")
try:
    import httpx2 as httpx
except ImportError:
    import httpx  # type: ignore[no-redef]

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            "strict": True,
        },
    }
]
CALL_TEXT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def ask(
    client: FakeClient, scenario: Callable[[Any], Awaitable[Any]], key: str = "k", **settings: Any
) -> Any:
    async def go() -> Any:
        transport = httpx.ASGITransport(make_app(client, **settings))
        async with openai.AsyncOpenAI(
            api_key=key,
            base_url="http://server/v1",
            max_retries=0,
            http_client=httpx.AsyncClient(transport=transport),
        ) as api:
            return await asyncio.wait_for(scenario(api), 10)

    return asyncio.run(go())


def chat(client: FakeClient, **fields: Any) -> Any:
    fields = {"model": MODEL, "messages": MESSAGES, **fields}
    return ask(client, lambda api: api.chat.completions.create(**fields))


def complete(client: FakeClient, **fields: Any) -> Any:
    fields = {"model": MODEL, "prompt": "Once", **fields}
    return ask(client, lambda api: api.completions.create(**fields))


def test_a_chat():
    client = FakeClient(answer("Hello, wörld!", num_cached_tokens=16))
    reply = chat(client)
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert reply.model == MODEL
    assert reply.choices[0].message.content == "Hello, wörld!"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens == 14
    assert reply.usage.prompt_tokens == len(client.requests[0].prompt_token_ids)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 14
    assert reply.usage.prompt_tokens_details.cached_tokens == 16
    assert client.requests[0].params == {"max_tokens": None}


def test_a_chat_streamed():
    async def scenario(api):
        stream = await api.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        return [chunk async for chunk in stream]

    chunks = ask(FakeClient(answer("grüße")), scenario)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "grüße"
    assert chunks[-1].usage.completion_tokens == 7
    assert chunks[-1].choices == []
    assert chunks[-2].choices[0].finish_reason == "stop"


PARAMS = [
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 1.0, "top_p": 1, "n": 1}, {}),
    ({"top_p": 0.5}, {"top_p": 0.5}),
    ({"n": 3}, {"n": 3}),
    ({"seed": -7}, {"seed": -7}),
    (
        {"presence_penalty": -1.5, "frequency_penalty": 2},
        {"presence_penalty": -1.5, "frequency_penalty": 2.0},
    ),
    ({"stop": "###"}, {"stop": ["###"]}),
    ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
    ({"extra_body": {"top_k": 5}}, {"top_k": 5}),
    ({"extra_body": {"min_p": 0.1}}, {"min_p": 0.1}),
    ({"extra_body": {"repetition_penalty": 1.2}}, {"repetition_penalty": 1.2}),
    ({"extra_body": {"min_tokens": 3}}, {"min_tokens": 3}),
    ({"extra_body": {"stop_token_ids": [1, 2]}}, {"stop_token_ids": [1, 2]}),
    ({"extra_body": {"ignore_eos": True}}, {"ignore_eos": True}),
    ({"extra_body": {"skip_special_tokens": False}}, {"skip_special_tokens": False}),
    ({"extra_body": {"include_stop_str_in_output": True}}, {"include_stop_str_in_output": True}),
]


@pytest.mark.parametrize(("fields", "params"), PARAMS)
def test_sampling_fields_reach_the_engine(fields, params):
    client = FakeClient()
    chat(client, max_tokens=50, **fields)
    complete(client, max_tokens=50, **fields)
    assert [request.params for request in client.requests] == [{"max_tokens": 50, **params}] * 2


def test_a_salt_reaches_the_engine_as_a_digest_and_the_same_one_each_time():
    client = FakeClient()
    for salt in ("a", "a", "b", "ü" * 9999):
        chat(client, extra_body={"cache_salt": salt})
    complete(client, extra_body={"cache_salt": "a"})
    ask(client, lambda api: api.embeddings.create(model=MODEL, input="x", extra_body={"cache_salt": "a"}))
    extras = [request.cache_extra for request in client.requests]
    assert {len(extra) for extra in extras} == {32}
    assert [extras.index(extra) for extra in extras] == [0, 0, 2, 3, 0, 0]
    chat(client)
    assert client.requests[-1].cache_extra == b""


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_token_limit(name):
    client = FakeClient()
    chat(client, **{name: 7})
    assert client.requests[0].params == {"max_tokens": 7}


def test_a_completion_has_sixteen_tokens_unless_told_otherwise():
    client = FakeClient()
    complete(client)
    assert client.requests[0].params == {}


def test_logprobs_of_a_chat():
    reply = chat(FakeClient(answer("añ")), logprobs=True, top_logprobs=3)
    content = reply.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["a", "Ã", "±"]
    assert content[0].logprob == -1.25
    assert content[0].bytes == [97]
    assert [top.logprob for top in content[0].top_logprobs] == [-0.5, -1.25, -1.5]


def test_logprobs_of_a_completion():
    reply = complete(FakeClient(answer("ab")), logprobs=2)
    logprobs = reply.choices[0].logprobs
    assert logprobs.tokens == ["a", "b"]
    assert logprobs.text_offset == [0, 1]
    assert logprobs.token_logprobs == [-1.25, -1.25]
    assert logprobs.top_logprobs[0] == {"t1": -0.5, "a": -1.25}


def test_echo_with_the_prompts_logprobs():
    client = FakeClient(answer("!"))
    choice = complete(client, prompt=[72, 105], echo=True, logprobs=1, max_tokens=1).choices[0]
    assert client.requests[0].prompt_logprobs == 1
    assert choice.text == "Hi!"
    assert choice.logprobs.tokens == ["H", "i", "!"]
    assert choice.logprobs.token_logprobs == [None, -1.25, -1.25]
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.text_offset == [0, 1, 2]


def test_echo_alone_drops_the_token_that_had_to_be_drawn():
    client = FakeClient(answer("!"))
    reply = complete(client, prompt="Hi", echo=True, logprobs=0, max_tokens=0)
    assert client.requests[0].params == {"max_tokens": 1, "logprobs": 0}
    assert reply.choices[0].text == "Hi"
    assert reply.choices[0].logprobs.tokens == ["<bos>", "H", "i"]
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        ("ab", [[256, 97, 98]]),
        (["a", "b"], [[256, 97], [256, 98]]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_of_every_form(prompt, token_ids):
    client = FakeClient(answer("x"))
    reply = complete(client, prompt=prompt)
    assert [request.prompt_token_ids for request in client.requests] == token_ids
    assert len(reply.choices) == len(token_ids)
    assert reply.usage.prompt_tokens == sum(map(len, token_ids))
    assert len({request.request_id for request in client.requests}) == len(token_ids)


@pytest.mark.parametrize("choice", ["auto", None])
def test_a_tool_call(choice):
    client = FakeClient(answer(CALL_TEXT))
    fields = {} if choice is None else {"tool_choice": choice}
    reply = chat(client, tools=TOOLS, **fields)
    message = reply.choices[0].message
    assert message.content is None
    assert message.tool_calls[0].function.name == "weather"
    assert message.tool_calls[0].function.arguments == '{"city": "Köln"}'
    assert message.tool_calls[0].type == "function"
    assert reply.choices[0].finish_reason == "tool_calls"
    assert client.requests[0].grammar is None
    assert "weather" in bytes(client.requests[0].prompt_token_ids).decode()


def test_tool_choice_none_hides_the_tools():
    client = FakeClient(answer(CALL_TEXT))
    reply = chat(client, tools=TOOLS, tool_choice="none")
    assert reply.choices[0].message.content == CALL_TEXT
    assert reply.choices[0].finish_reason == "stop"
    assert "weather" not in bytes(client.requests[0].prompt_token_ids).decode()


def test_a_required_call_is_bound_by_a_grammar():
    client = FakeClient(answer('[{"name": "weather", "parameters": {"city": "x"}}]'))
    reply = chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert reply.choices[0].message.tool_calls[0].function.arguments == '{"city": "x"}'
    assert reply.choices[0].finish_reason == "tool_calls"
    schema = json.loads(client.requests[0].grammar.text)
    assert schema["maxItems"] == 1
    assert schema["items"]["anyOf"][0]["properties"]["name"] == {"const": "weather"}


def test_a_named_call_is_bound_to_the_functions_parameters():
    client = FakeClient(answer('{"city": "x"}'))
    reply = chat(client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}})
    call = reply.choices[0].message.tool_calls[0].function
    assert (call.name, call.arguments) == ("weather", '{"city": "x"}')
    assert reply.choices[0].finish_reason == "stop"
    assert json.loads(client.requests[0].grammar.text) == TOOLS[0]["function"]["parameters"]


def test_a_history_with_calls_reaches_the_template_as_objects():
    history = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "x"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "12 degrees"}]},
    ]
    client = FakeClient()
    chat(client, messages=history, tools=TOOLS)
    lines = bytes(client.requests[0].prompt_token_ids).decode().splitlines()
    assert json.loads(lines[2])["tool_calls"][0]["function"]["arguments"] == {"city": "x"}
    assert json.loads(lines[3]) == {"role": "tool", "content": "12 degrees", "tool_call_id": "c1"}


def test_an_answer_can_be_sent_back_as_it_is():
    message = chat(FakeClient(answer(CALL_TEXT)), tools=TOOLS).choices[0].message
    chat(FakeClient(), messages=[*MESSAGES, message, {"role": "user", "content": "go on"}])


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "json_schema",
            json.dumps(SCHEMA),
        ),
        ({"extra_body": {"regex": "[0-9]+"}}, "regex", "[0-9]+"),
        ({"extra_body": {"structured_outputs": {"regex": "a|b"}}}, "regex", "a|b"),
        ({"extra_body": {"structured_outputs": {"json": SCHEMA}}}, "json_schema", json.dumps(SCHEMA)),
        ({"extra_body": {"structured_outputs": {"json": "{}"}}}, "json_schema", "{}"),
        ({"extra_body": {"structured_outputs": {"json_object": True}}}, "json_object", ""),
        (
            {"extra_body": {"structured_outputs": {"choice": ["yes", 'n"o']}}},
            "ebnf",
            'root ::= "yes" | "n\\"o"',
        ),
        ({"extra_body": {"structured_outputs": {"grammar": "root ::= 'x'"}}}, "ebnf", "root ::= 'x'"),
        ({"response_format": {"type": "text"}}, None, None),
    ],
)
def test_formats_become_grammars(fields, kind, text):
    client = FakeClient(answer("{}"))
    chat(client, **fields)
    grammar = client.requests[0].grammar
    assert (grammar and grammar.kind, grammar and grammar.text) == (kind, text)


def test_parse_with_a_pydantic_model():
    from pydantic import BaseModel

    class Answer(BaseModel):
        a: int

    client = FakeClient(answer('{"a": 5}'))
    reply = ask(
        client,
        lambda api: api.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Answer),
    )
    assert reply.choices[0].message.parsed.a == 5
    assert client.requests[0].grammar.kind == "json_schema"


def test_template_variables_and_continuation():
    client = FakeClient()
    chat(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert "enable_thinking=False" in bytes(client.requests[0].prompt_token_ids).decode()
    chat(client, extra_body={"continue_final_message": True, "add_generation_prompt": False})
    text = bytes(client.requests[1].prompt_token_ids).decode()
    assert "continue_final_message=True" in text
    assert not text.endswith("assistant:")


@pytest.mark.parametrize("form", ["float", "base64", None])
@pytest.mark.parametrize("given", ["ab", ["a", "b"], [1, 2], [[1], [2]]])
def test_embeddings(form, given):
    client = FakeClient()
    fields = {} if form is None else {"encoding_format": form}
    reply = ask(client, lambda api: api.embeddings.create(model=MODEL, input=given, **fields))
    expected = 1 if given in ("ab", [1, 2]) else 2
    assert [item.index for item in reply.data] == list(range(expected))
    if form != "base64":
        assert all(item.embedding == client.vector for item in reply.data)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens


def test_models():
    names = ("first", "org/second")
    listed = ask(FakeClient(), lambda api: api.models.list(), served_model_names=names)
    assert [model.id for model in listed.data] == list(names)
    assert listed.data[0].object == "model"
    one = ask(FakeClient(), lambda api: api.models.retrieve("org/second"), served_model_names=names)
    assert one.id == "org/second"
    with pytest.raises(openai.NotFoundError):
        ask(FakeClient(), lambda api: api.models.retrieve("third"), served_model_names=names)


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (RequestError("regex=[: no such pattern"), openai.BadRequestError, 400),
        (EngineBusyError("full", retry_after_s=2.5), openai.RateLimitError, 429),
        (EngineDrainingError("bye"), openai.InternalServerError, 503),
        (EngineDeadError("killed"), openai.InternalServerError, 500),
        (RuntimeError("boom"), openai.InternalServerError, 500),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_refusals_and_faults_are_the_clients_own_errors(error, kind, status, streams):
    with pytest.raises(kind) as caught:
        chat(FakeClient(lambda request: [error]), stream=streams)
    assert caught.value.status_code == status
    assert "boom" not in str(caught.value)
    if status == 429:
        assert caught.value.response.headers["retry-after"] == "3"
    if status == 400:
        assert caught.value.param == "regex"


def test_keys():
    assert chat_with_key("right").id
    with pytest.raises(openai.AuthenticationError) as caught:
        chat_with_key("wrong")
    assert caught.value.code == "invalid_api_key"


def chat_with_key(key: str) -> Any:
    return ask(
        FakeClient(),
        lambda api: api.chat.completions.create(model=MODEL, messages=MESSAGES),
        key=key,
        api_keys=("other", "right"),
    )

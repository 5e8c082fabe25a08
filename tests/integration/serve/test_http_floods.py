"""Bodies made to cost much: refused or served within a moment, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest
from http_fakes import FakeClient, answer, chat_body, make_app, post, text_body

from gapless.serve.limits import MAX_BODIES
from gapless.serve.protocol.common import MAX_FIELDS
from gapless.serve.sampling import MAX_STOP_CHARS, MAX_STOP_TOKEN_IDS, MAX_STOPS

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MANY = 100_000
USER = {"role": "user", "content": "x"}


def repeated_name() -> bytes:
    names = ",".join(f'"n{i}": 1' for i in range(MANY))
    return b'{"messages": [], %s, "last": 1, "last": 2}' % names.encode()


FLOODS = {
    "a name repeated at the end of many": repeated_name(),
    "wrong messages": json.dumps(chat_body(messages=[1] * MANY)),
    "wrong parts": json.dumps(chat_body(messages=[{"role": "user", "content": [1] * MANY}])),
    "wrong calls": json.dumps(chat_body(messages=[{"role": "assistant", "tool_calls": [1] * MANY}])),
    "wrong tools": json.dumps(chat_body(tools=[1] * MANY)),
    "wrong stop tokens": json.dumps(chat_body(stop_token_ids=["a"] * MANY)),
    "unknown fields": json.dumps(chat_body(**{f"u{i}": 1 for i in range(MANY)})),
    "unknown fields of a message": json.dumps(
        chat_body(messages=[{**USER, **{f"u{i}": 1 for i in range(MANY)}}])
    ),
    "stop strings": json.dumps(chat_body(stop=[str(i) for i in range(MANY)])),
    "stop tokens": json.dumps(chat_body(stop_token_ids=list(range(MANY)))),
}


@pytest.mark.parametrize("raw", FLOODS.values(), ids=FLOODS)
def test_a_flood_is_refused_in_a_line_and_within_a_second_or_two(raw):
    client = FakeClient()
    start = time.perf_counter()
    response = httpx_post(make_app(client), raw)
    assert time.perf_counter() - start < 3
    assert response.status_code == 400
    assert len(response.content) < 600
    assert client.requests == []


def httpx_post(app, raw) -> httpx.Response:
    async def scenario():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.post(CHAT, content=raw, headers={"content-type": "application/json"})

    return asyncio.run(scenario())


def test_ten_thousand_tools_with_names_of_their_own_are_compared_quickly():
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(10_000)]
    start = time.perf_counter()
    response = post(make_app(), CHAT, chat_body(tools=tools, tool_choice="none"))
    assert response.status_code == 200, response.text
    assert time.perf_counter() - start < 3


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"stop": ["x"] * MAX_STOPS}, 200),
        ({"stop": ["x"] * (MAX_STOPS + 1)}, 400),
        ({"stop": "x" * MAX_STOP_CHARS}, 200),
        ({"stop": ["a", "x" * (MAX_STOP_CHARS + 1)]}, 400),
        ({"stop_token_ids": [1] * MAX_STOP_TOKEN_IDS}, 200),
        ({"stop_token_ids": [1] * (MAX_STOP_TOKEN_IDS + 1)}, 400),
    ],
    ids=["stops", "more stops", "long", "longer", "tokens", "more tokens"],
)
def test_stops_are_taken_up_to_their_limit(fields, status):
    for path, body in ((CHAT, chat_body(**fields)), (TEXT, text_body(**fields))):
        response = post(make_app(), path, body)
        assert response.status_code == status
        if status == 400:
            assert response.json()["error"]["param"] == next(iter(fields))


def test_an_object_has_fewer_fields_than_the_limit_in_every_request():
    from gapless.serve.protocol.chat import ChatRequest

    assert (
        len(ChatRequest.model_fields) + len(ChatRequest.ignored) + len(ChatRequest.neutral) < MAX_FIELDS / 2
    )


def test_others_are_served_while_a_large_body_is_parsed():
    app = make_app(FakeClient(answer("x")))
    large = json.dumps(chat_body(messages=[USER] * 100_000))

    async def scenario():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://x", timeout=60
        ) as client:
            slow = asyncio.create_task(client.post(CHAT, content=large))
            num_served, longest = 0, 0.0
            while not slow.done():
                await asyncio.sleep(0.001)
                start = time.perf_counter()
                assert (await client.get("/version")).status_code == 200
                longest = max(longest, time.perf_counter() - start)
                num_served += 1
            return num_served, longest, (await slow).status_code

    num_served, longest, status = asyncio.run(scenario())
    assert status in (200, 400)  # the prompt is longer than the model's context
    assert num_served > 5
    assert longest < 1


def test_bodies_that_never_end_hold_a_bounded_amount_of_memory_together():
    app = make_app(max_body_bytes=4096)
    gate = asyncio.Event()

    async def body():
        yield b'{"prompt": "' + b"x" * 4000
        await gate.wait()
        yield b'"}'

    async def scenario():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            requests = [asyncio.create_task(client.post(TEXT, content=body())) for _ in range(MAX_BODIES + 6)]
            await asyncio.sleep(0.2)
            early = [task.result() for task in requests if task.done()]
            gate.set()
            statuses = [(await task).status_code for task in requests]
            assert (await client.post(TEXT, json=text_body())).status_code == 200, "all of it is given back"
            return early, statuses

    early, statuses = asyncio.run(scenario())
    assert [response.status_code for response in early] == [429] * len(early)
    assert all(response.headers["retry-after"] for response in early)
    assert 5 <= len(early) <= 7
    assert statuses.count(429) == len(early)

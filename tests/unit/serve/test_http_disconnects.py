"""A closed connection ends its request at every stage, frees what it held, and is noted as 499."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from http_fakes import WAIT, Connection, FakeClient, chat_body, make_app, spell, text_body

CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
BODIES: dict[str, Any] = {CHAT: chat_body(), TEXT: text_body()}


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 10))  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def slow(request):
    """A few tokens, then nothing more for ever."""
    yield spell(request, "abc")[:2]
    yield WAIT


def never(request):
    yield WAIT


async def check_ended(connection: Connection, client: FakeClient, *, num_requests: int = 1) -> None:
    await asyncio.wait_for(asyncio.shield(connection.task), 5)
    assert client.running == set()
    assert len(client.requests) == num_requests
    own = {"wait_for", "scenario"}
    left = [t for t in asyncio.all_tasks() if t.get_coro().__name__ not in own]  # type: ignore[union-attr]
    assert left == [], "a task was left behind"


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("script", [never, slow])
def test_closing_while_the_engine_works_aborts(path, streams, script):
    async def scenario():
        client = FakeClient(script)
        connection = Connection(
            make_app(client), path, json.dumps({**BODIES[path], "stream": streams}).encode()
        )
        await until(lambda: bool(client.running))
        if streams and script is slow:
            await until(lambda: len(connection.bodies) > 0)
        connection.gone.set()
        await check_ended(connection, client)
        assert client.aborted == [client.requests[0].request_id]
        has_begun = streams and script is slow
        assert bool(connection.sent) == has_begun
        assert not any(b"DONE" in body for body in connection.bodies)

    run(scenario)


@pytest.mark.parametrize("streams", [False, True])
def test_closing_aborts_every_prompt_of_a_request(streams):
    async def scenario():
        client = FakeClient(slow)
        body = json.dumps(text_body(prompt=["a", "b", "c"], stream=streams)).encode()
        connection = Connection(make_app(client), TEXT, body)
        await until(lambda: len(client.running) == 3)
        connection.gone.set()
        await check_ended(connection, client, num_requests=3)
        assert sorted(client.aborted) == sorted(r.request_id for r in client.requests)

    run(scenario)


def test_one_prompts_fault_ends_the_others():
    def script(request):
        if request.prompt_token_ids[-1] == ord("b"):
            yield 0.01
            raise RuntimeError("x")
        yield WAIT

    async def scenario():
        client = FakeClient(script)
        connection = Connection(make_app(client), TEXT, json.dumps(text_body(prompt=["a", "b"])).encode())
        await check_ended(connection, client, num_requests=2)
        assert connection.sent[0]["status"] == 500
        assert len(client.aborted) == 2

    run(scenario)


def test_closing_while_embeddings_are_made_ends_them():
    async def scenario():
        client = FakeClient()
        client.embed_script = [WAIT]
        connection = Connection(make_app(client), EMBED, json.dumps({"input": ["a", "b"]}).encode())
        await until(lambda: len(client.running) == 2)
        connection.gone.set()
        await check_ended(connection, client, num_requests=2)
        assert connection.sent == []

    run(scenario)


def test_closing_before_the_body_is_complete_reaches_no_engine():
    async def scenario():
        client = FakeClient()
        connection = Connection(make_app(client), CHAT, b"")
        connection._body = []
        connection.gone.set()
        await check_ended(connection, client, num_requests=0)
        assert connection.sent == []

    run(scenario)


def test_a_failing_write_aborts():
    async def scenario():
        client = FakeClient(slow)
        connection = Connection(make_app(client), CHAT, json.dumps(chat_body(stream=True)).encode())
        connection.fails_to_send = True
        await check_ended(connection, client)
        assert len(client.aborted) == 1

    run(scenario)


def test_a_stalled_reader_holds_back_its_own_source_only():
    produced = {"slow": 0, "fast": 0}

    def script(request):
        name = "slow" if request.params.get("seed") == 1 else "fast"
        for _ in range(50):
            produced[name] += 1
            yield spell(request, "a")[:1]
        yield spell(request, "")

    async def scenario():
        client = FakeClient(script)
        app = make_app(client)
        slow_one = Connection(app, TEXT, json.dumps(text_body(stream=True, seed=1)).encode())
        gate = asyncio.Event()

        async def stall(message):
            slow_one.sent.append(message)
            if len(slow_one.sent) > 3:
                await gate.wait()

        slow_one.task.cancel()
        slow_one.task = asyncio.ensure_future(app(slow_one._scope, slow_one._receive, stall))
        fast_one = Connection(app, TEXT, json.dumps(text_body(stream=True)).encode())
        await fast_one.task
        assert fast_one.bodies[-1].endswith(b"[DONE]\n\n")
        assert produced["fast"] == 50
        assert produced["slow"] < 10
        gate.set()
        await slow_one.task
        assert produced["slow"] == 50
        assert slow_one.bodies[-1].endswith(b"[DONE]\n\n")

    run(scenario)


def test_a_request_that_ends_normally_aborts_nothing():
    async def scenario():
        client = FakeClient()
        for streams in (False, True):
            connection = Connection(make_app(client), CHAT, json.dumps(chat_body(stream=streams)).encode())
            await connection.task
        assert client.aborted == []

    run(scenario)


def test_cancelling_the_server_ends_its_requests():
    async def scenario():
        client = FakeClient(slow)
        connection = Connection(make_app(client), CHAT, json.dumps(chat_body(stream=True)).encode())
        await until(lambda: bool(connection.bodies))
        connection.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connection.task
        assert client.running == set()
        assert len(client.aborted) == 1

    run(scenario)


def test_closed_connections_are_counted_as_499():
    async def scenario():
        client = FakeClient(never)
        app = make_app(client)
        connection = Connection(app, CHAT, json.dumps(chat_body()).encode())
        await until(lambda: bool(client.running))
        connection.gone.set()
        await connection.task
        import httpx

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as http:
            text = (await http.get("/metrics")).text
        assert 'gapless:http_responses_total{route="/v1/chat/completions",status="499"} 1.0' in text

    run(scenario)


@pytest.mark.parametrize("seed", range(20))
def test_many_requests_closed_at_random_moments_leave_nothing(seed):
    import random

    draw = random.Random(seed)

    def script(request):
        for delta in spell(request, "abcdefgh"):
            yield draw.choice([0.0, 0.001])
            yield [delta]

    async def scenario():
        client = FakeClient(script)
        app = make_app(client)
        connections = []
        for _ in range(20):
            path = draw.choice([CHAT, TEXT])
            body = {**BODIES[path], "stream": draw.random() < 0.7}
            connections.append(Connection(app, path, json.dumps(body).encode()))
        for connection in draw.sample(connections, 15):
            await asyncio.sleep(draw.choice([0, 0, 0.001, 0.003]))
            connection.gone.set()
        for connection in connections:
            await connection.task
        assert client.running == set()
        for connection in connections:
            assert connection.is_complete or connection.gone.is_set()
        assert sum(connection.is_complete for connection in connections) >= 5

    run(scenario)

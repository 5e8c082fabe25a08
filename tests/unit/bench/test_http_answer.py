"""An answer is the same however its bytes are cut, and what is no answer is said to be none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.bench import http_stream
from gapless.bench.http_answer import Answer, HttpFailure
from gapless.bench.http_stream import Endpoint, Exchange, HttpClient

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CASES = {
    "chunks": (CHUNKED + b"3\r\nabc\r\nA;x=y\r\n\r\n\r\n012345\r\n0\r\n\r\n", b"abc\r\n\r\n012345", True),
    "trailers": (CHUNKED + b"1\r\na\r\n0\r\nX: y\r\nZ: w\r\n\r\n", b"a", True),
    "length": (b"HTTP/1.1 404 No\r\nContent-Length: 4\r\n\r\nbody", b"body", True),
    "hints": (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + CHUNKED + b"1\r\na\r\n0\r\n\r\n", b"a", True),
    "no body": (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"", True),
    "until the end": (b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\nab\r\n\r\n", b"ab\r\n\r\n", False),
    "closing": (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\na", b"a", False),
}


@pytest.mark.parametrize("name", CASES)
@given(cuts=st.lists(st.integers(0, 120), max_size=12))
def test_an_answer_cut_anywhere_is_the_same(name, cuts):
    data, body, keeps = CASES[name]
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    answer = Answer()
    parts = [part for a, b in pairwise(places) for part in answer.feed(data[a:b])]
    assert b"".join(parts) == body
    assert answer.end()
    assert answer.status == (404 if name == "length" else 200)
    assert answer.keeps_connection == keeps


@pytest.mark.parametrize("name", [name for name in CASES if name != "until the end"])
def test_a_connection_that_is_closed_early_is_no_end(name):
    answer = Answer()
    answer.feed(CASES[name][0][:-1])
    assert not answer.end()


@pytest.mark.parametrize(
    "data",
    [
        *(b"SSH-2.0\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", CHUNKED + b"xyz\r\n", b"x" * (1 << 21)),
        *(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", CHUNKED + b"1" * (1 << 21)),
        *(CHUNKED + size + b"\r\n" for size in (b"-6", b"+1", b"0x1", b"1_0", b"", b"1" * 20)),
    ],
)
def test_what_is_not_http_is_refused(data):
    with pytest.raises(HttpFailure, match="not HTTP"):
        Answer().feed(data)


def test_a_compressed_answer_is_refused():
    with pytest.raises(HttpFailure, match="gzip"):
        Answer().feed(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n")


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_without_a_body_has_ended_with_its_head(status):
    answer = Answer()
    assert answer.feed(b"HTTP/1.1 %d X\r\n\r\n" % status) == []
    assert answer.is_done


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("name", [b"data:", b"data: "])
def test_events_are_the_same_however_lines_end_and_bytes_are_cut(end, name):
    body = b"".join(line + end for line in (b": hello", b"", name + b'{"a":1}', b"", name + b"[DONE]", b""))
    data = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    for cut in range(len(data)):
        exchange = Exchange("POST /", is_stream=True)
        exchange.feed(data[:cut], 1.0)
        exchange.feed(data[cut:], 2.0)
        assert [event for _, event in exchange.events] == [b'{"a":1}', b"[DONE]"]
        assert exchange.answer.is_done
        assert exchange.body == b""


async def answer_empty(reader, writer):
    with contextlib.suppress(asyncio.IncompleteReadError):
        while await reader.readuntil(b"{}"):
            writer.write(CHUNKED + b"a\r\ndata: {}\n\n\r\n0\r\n\r\n")
    writer.close()


def times_of_many(monkeypatch, *, num_requests: int, connect_s: float) -> tuple[float, float]:
    """Seconds until all are answered, and the longest that one took by its own clock."""
    connect = HttpClient._connection

    async def slow_connect(self):
        await asyncio.sleep(connect_s)
        return await connect(self)

    monkeypatch.setattr(HttpClient, "_connection", slow_connect)

    async def scenario():
        server = await asyncio.start_server(answer_empty, "127.0.0.1", 0)
        client = HttpClient(Endpoint.parse(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"))

        async def one() -> float:
            async with client.exchange("POST", "/", b"{}") as exchange:
                await exchange.whole()
                return time.perf_counter() - exchange.sent_s

        begun_s = time.perf_counter()
        times = await asyncio.wait_for(asyncio.gather(*(one() for _ in range(num_requests))), 10)
        all_s = time.perf_counter() - begun_s
        await client.close()
        server.close()
        return all_s, max(times)

    return asyncio.run(scenario())


def test_what_a_request_waits_for_its_turn_is_part_of_its_time(monkeypatch):
    monkeypatch.setattr(http_stream, "_NEAR_S", 10.0)
    all_s, longest_s = times_of_many(monkeypatch, num_requests=20, connect_s=0.01)
    assert all_s >= 0.2
    assert longest_s >= 0.2 - 0.01


def test_no_request_waits_for_others_connections_to_a_server_far_away(monkeypatch):
    all_s, _ = times_of_many(monkeypatch, num_requests=40, connect_s=0.1)
    assert all_s < 2.0, "40 connections one after the other take 4 s"


def test_a_request_has_left_before_the_next_ones_connection_is_opened(monkeypatch):
    noted: list[str] = []
    connect, send = HttpClient._connection, http_stream._Connection.send

    async def noting_connect(self):
        noted.append("connects")
        return await connect(self)

    def noting_send(self, data, exchange):
        send(self, data, exchange)
        noted.append("sent")

    monkeypatch.setattr(http_stream, "_NEAR_S", 10.0)
    monkeypatch.setattr(HttpClient, "_connection", noting_connect)
    monkeypatch.setattr(http_stream._Connection, "send", noting_send)

    async def scenario():
        server = await asyncio.start_server(answer_empty, "127.0.0.1", 0)
        client = HttpClient(Endpoint.parse(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"))

        async def one() -> list[bytes]:
            return [json.loads(data) async for data in client.events("/v1/completions", {})]

        answers = await asyncio.wait_for(asyncio.gather(*(one() for _ in range(50))), 10)
        await client.close()
        server.close()
        return answers

    assert asyncio.run(scenario()) == [[{}]] * 50
    assert noted == ["connects", "sent"] * 50

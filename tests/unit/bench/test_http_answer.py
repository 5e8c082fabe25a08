"""An answer is the same however its bytes are cut, and what is no answer is said to be none."""

from __future__ import annotations

import asyncio
import contextlib
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.bench import http_stream
from gapless.bench.http_answer import Answer, HttpFailure
from gapless.bench.http_stream import Endpoint, HttpClient

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CASES = {
    "chunks": (CHUNKED + b"3\r\nabc\r\nA;x=y\r\n\r\n\r\n012345\r\n0\r\n\r\n", b"abc\r\n\r\n012345", True),
    "trailers": (CHUNKED + b"1\r\na\r\n0\r\nX: y\r\nZ: w\r\n\r\n", b"a", True),
    "length": (b"HTTP/1.1 404 No\r\nContent-Length: 4\r\n\r\nbody", b"body", True),
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
    ],
)
def test_what_is_not_http_is_refused(data):
    with pytest.raises(HttpFailure, match="not HTTP"):
        Answer().feed(data)


def test_a_request_has_left_before_the_next_ones_connection_is_opened(monkeypatch):
    noted: list[str] = []
    connect, send = HttpClient._connection, http_stream._Connection.send

    async def noting_connect(self):
        noted.append("connects")
        return await connect(self)

    def noting_send(self, data, exchange):
        send(self, data, exchange)
        noted.append("sent")

    monkeypatch.setattr(HttpClient, "_connection", noting_connect)
    monkeypatch.setattr(http_stream._Connection, "send", noting_send)

    async def serve(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"{}"):
                writer.write(CHUNKED + b"a\r\ndata: {}\n\n\r\n0\r\n\r\n")
        writer.close()

    async def scenario():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = HttpClient(Endpoint.parse(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"))

        async def one() -> list[bytes]:
            return [json.loads(data) async for data in client.events("/v1/completions", {})]

        answers = await asyncio.wait_for(asyncio.gather(*(one() for _ in range(50))), 10)
        await client.close()
        server.close()
        return answers

    assert asyncio.run(scenario()) == [[{}]] * 50
    assert noted == ["connects", "sent"] * 50

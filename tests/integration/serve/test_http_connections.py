"""Real sockets, and people who mean harm: heads without end, connections that say nothing, no HTTP at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest
from http_fakes import MODEL, WAIT, FakeClient, answer, make_app, text_body

from gapless.serve import connection, server
from gapless.serve.settings import ServerSettings

BODY = json.dumps(text_body()).encode()


@contextlib.asynccontextmanager
async def serving(client: FakeClient | None = None) -> AsyncIterator[int]:
    """An HTTP server as ``run_server`` makes it; its port."""
    settings = ServerSettings(port=0, access_log="off")
    with server._bound_socket(settings) as listener:
        http = server._make_server(make_app(client), settings)
        task = asyncio.create_task(http.serve(sockets=[listener]))
        try:
            await server._until_open(http, task)
            yield listener.getsockname()[1]
        finally:
            http.should_exit = http.force_exit = True
            await task


def head(*headers: bytes, method: bytes = b"POST", path: bytes = b"/v1/completions") -> bytes:
    return b"".join(line + b"\r\n" for line in (method + b" " + path + b" HTTP/1.1", b"Host: x", *headers))


def whole(body: bytes = BODY, *headers: bytes) -> bytes:
    return head(b"Content-Length: %d" % len(body), *headers) + b"\r\n" + body


async def exchange(port: int, data: bytes, *, ends: bool = True) -> bytes:
    """What comes back until the server closes, or, without ``ends``, until it says nothing more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with contextlib.suppress(OSError):  # it may close before all has been sent
            writer.write(data)
            await writer.drain()
        if ends:
            return await asyncio.wait_for(reader.read(), 10)
        received = b""
        with contextlib.suppress(TimeoutError):
            while part := await asyncio.wait_for(reader.read(1 << 16), 0.3):
                received += part
        return received
    finally:
        writer.close()


def with_server(scenario, client: FakeClient | None = None):
    async def run():
        async with serving(client) as port:
            return await scenario(port)

    return asyncio.run(run())


def status_of(received: bytes) -> int:
    return int(received.split(b" ", 2)[1])


@pytest.mark.parametrize(
    "data",
    [
        head(b"X: " + b"y" * 200_000) + b"\r\n",
        head(*[b"X-%d: y" % i for i in range(20_000)]) + b"\r\n",
        head() + b"X: " + b"y" * 200_000,
        head(b"Cookie: " + b"y" * 60_000, b"Cookie: " + b"y" * 60_000) + b"\r\n",
    ],
    ids=["long", "many", "unended", "two"],
)
def test_a_head_beyond_the_limit_is_431(data):
    received = with_server(lambda port: exchange(port, data))
    assert status_of(received) == 431
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "head_too_large"


def test_a_head_that_goes_on_and_on_is_cut_off_early():
    async def scenario(port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head())
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 20_000_000:
                writer.write(b"X-%d: %s\r\n" % (sent, b"z" * 10_000))
                await writer.drain()
                await asyncio.sleep(0)
                sent += 10_000
        writer.close()
        return sent

    assert with_server(scenario) < 10_000_000, "what the kernel buffers, no more"


def test_a_head_below_the_limit_is_taken():
    data = whole(BODY, b"X: " + b"y" * 60_000)
    assert status_of(with_server(lambda port: exchange(port, data, ends=False))) == 200


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"P",
        head(),
        head(b"Content-Length: 10")[:-1],
        b"\r\n\r\n",
        whole() + b"POST ",
        whole() + head(),
    ],
    ids=["nothing", "a letter", "a head", "half a line", "blank", "again", "again a head"],
)
def test_a_connection_that_begins_a_request_and_stops_is_closed(beginning, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)

    async def scenario(port):
        start = asyncio.get_running_loop().time()
        received = await exchange(port, beginning)
        return received, asyncio.get_running_loop().time() - start

    received, seconds = with_server(scenario)
    assert received.count(b"HTTP/1.1 200") == beginning.count(BODY)
    assert 0.2 < seconds < 5


def test_headers_that_come_byte_by_byte_are_given_up(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)

    async def scenario(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = 0
        with contextlib.suppress(OSError):
            for byte in head(b"X: " + b"y" * 1000):
                writer.write(bytes([byte]))
                await writer.drain()
                sent += 1
                await asyncio.sleep(0.02)
                if reader.at_eof():
                    break
        writer.close()
        return sent

    assert with_server(scenario) < 200


def test_a_body_that_goes_on_after_its_answer_is_given_up(monkeypatch):
    """An unknown endpoint answers before the body is there."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)

    async def scenario(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(b"Content-Length: 100000", path=b"/unknown") + b"\r\n")
        received = await reader.read(1 << 16)
        sent = 0
        with contextlib.suppress(OSError):
            while not reader.at_eof() and sent < 200:
                writer.write(b"x")
                await writer.drain()
                sent += 1
                await asyncio.sleep(0.02)
        writer.close()
        return received, sent

    received, sent = with_server(scenario)
    assert status_of(received) == 404
    assert sent < 200


def test_a_running_request_is_not_hurried(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    client = FakeClient(lambda request: [0.5, *answer("slow")(request)])
    received = with_server(lambda port: exchange(port, whole(BODY, b"Connection: close")), client)
    assert status_of(received) == 200
    assert b"slow" in received


def test_an_idle_connection_may_wait_for_its_next_request(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)

    async def scenario(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(whole())
            assert status_of(await asyncio.wait_for(reader.read(1 << 16), 5)) == 200
            await asyncio.sleep(0.3)
        writer.close()

    with_server(scenario)


CHUNKED = b"5\r\n" + BODY[:5] + b"\r\n%x\r\n" % (len(BODY) - 5) + BODY[5:] + b"\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (head(b"Transfer-Encoding: chunked") + b"\r\n" + CHUNKED, 200),
        (head(b"Transfer-Encoding: chunked", b"Content-Length: 5") + b"\r\n" + CHUNKED, 400),
        (head(b"Transfer-Encoding: gzip, chunked") + b"\r\n" + CHUNKED, 415),
        (head(b"Transfer-Encoding: xchunked") + b"\r\n" + CHUNKED, 400),
        (head(b"Transfer-Encoding: chunked") + b"\r\nzz\r\n", 400),
        (whole(BODY, b"Content-Length: 5"), 400),
        (whole(BODY, b"Content-Length: %d" % len(BODY)), 400),
        (head(b"Content-Length: -5") + b"\r\n", 400),
        (head(b"X : y") + b"\r\n", 400),
        (head(b"X: a\x00b") + b"\r\n", 400),
        (head(b"X: a", b" folded") + b"\r\n", 400),
        (head(path=b"/v1/completions\xff") + b"\r\n", 400),
        (head(path=b"/" + b"a" * 100_000) + b"\r\n", 400),
        (head(method=b"G@T") + b"\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"CONNECT example.org:80 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (whole(BODY, b"Expect: 100-continue"), 100),
        (head(b"Upgrade: websocket", b"Connection: Upgrade", method=b"GET", path=b"/health") + b"\r\n", 200),
        (whole(BODY).replace(b"HTTP/1.1", b"HTTP/1.0"), 200),
    ],
    ids=[
        *("chunked", "both lengths", "gzip chunked", "xchunked", "bad chunk", "two lengths", "equal lengths"),
        *("negative", "space", "NUL", "folded", "bytes in path", "long path", "bad method", "TLS", "HTTP/2"),
        *("CONNECT", "expect", "upgrade", "HTTP/1.0"),
    ],
)
def test_what_is_sent_has_one_meaning_or_none(data, status, caplog):
    async def scenario(port):
        received = await exchange(port, data, ends=False)
        assert len(caplog.records) <= 1, "a line at most"
        assert "Traceback" not in caplog.text
        return received

    received = with_server(scenario)
    assert status_of(received) == status, received[:300]
    if status >= 400:
        assert set(json.loads(received.partition(b"\r\n\r\n")[2])) == {"error"}


@pytest.mark.parametrize("form", ["with the head", "later", "chunked", "in pieces"])
def test_a_body_with_a_wish_for_http_2_arrives(form):
    """As Java's client sends it; what follows on the connection is read as usual."""
    wish = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAAB")
    data = whole(BODY, *wish)
    if form == "chunked":
        data = head(b"Transfer-Encoding: chunked", *wish) + b"\r\n" + CHUNKED
    body_at = data.index(b"\r\n\r\n") + 4
    places = {"later": [body_at], "in pieces": range(7, len(data), 11)}.get(form, [])

    async def scenario(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for begin, end in zip([0, *places], [*places, len(data)], strict=True):
            writer.write(data[begin:end])
            await asyncio.sleep(0.003)
        statuses = [status_of(await asyncio.wait_for(reader.read(1 << 16), 5))]
        writer.write(whole())
        statuses.append(status_of(await asyncio.wait_for(reader.read(1 << 16), 5)))
        writer.close()
        return statuses

    assert with_server(scenario) == [200, 200]


def test_a_thousand_wishes_for_another_protocol_are_answered_one_by_one():
    wish = head(b"Connection: Upgrade", b"Upgrade: h2c", method=b"GET", path=b"/version") + b"\r\n"
    received = with_server(lambda port: exchange(port, wish * 1000, ends=False))
    assert received.count(b"HTTP/1.1 200 OK") == 1000


@pytest.mark.parametrize("streams", [False, True])
def test_pipelined_requests_are_answered_in_order(streams):
    bodies = [
        json.dumps(text_body(prompt=f"number {i}", echo=True, stream=streams)).encode() for i in range(20)
    ]
    received = with_server(lambda port: exchange(port, b"".join(map(whole, bodies)), ends=False))
    assert received.count(b"HTTP/1.1 200 OK") == 20
    places = [received.index(b'"number %d' % i) for i in range(20)]
    assert places == sorted(places)


def test_a_pipelined_fault_does_not_end_up_within_the_answer_before_it():
    client = FakeClient(lambda request: [0.3, *answer("first")(request)])
    received = with_server(lambda port: exchange(port, whole() + b"\x00\x01garbage\r\n\r\n"), client)
    assert received.count(b"HTTP/1.1") <= 1


def test_closing_half_of_a_connection_still_gets_the_answer_or_an_abort():
    client = FakeClient(lambda request: [0.2, *answer("late")(request)])

    async def scenario(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(whole())
        writer.write_eof()
        received = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        return received

    received = with_server(scenario, client)
    assert not client.running
    assert received == b"" or b"late" in received


def test_peers_that_take_nothing_are_given_up_by_the_socket():
    async def scenario():
        with server._bound_socket(ServerSettings(port=0)) as listener:
            listener.listen()
            with socket.create_connection(listener.getsockname()) as near:
                far, _ = listener.accept()
                with far:
                    near.close()
                    limit = far.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                    return limit, far.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    assert asyncio.run(scenario()) == (server.READER_STALL_S * 1000, 1)


def test_a_reader_that_never_reads_is_cut_off_and_its_request_aborted(monkeypatch):
    """Its window is full and stays so; the limit here is a second."""
    monkeypatch.setattr(server, "READER_STALL_S", 1)
    long = "x" * 4_000_000

    def script(request):
        yield from answer(long, sizes=[len(long)])(request)[:1]
        yield WAIT

    client = FakeClient(script)

    async def scenario(port):
        with socket.socket() as near:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            near.connect(("127.0.0.1", port))
            near.sendall(whole(json.dumps({"model": MODEL, "prompt": "x", "stream": True}).encode()))
            for _ in range(150):
                await asyncio.sleep(0.1)
                if client.aborted:
                    return True
        return False

    assert with_server(scenario, client)

"""Many requests that come at the same moment reach the engine one by one, each as soon as it is read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

from http_fakes import FakeClient, make_app, text_body

from gapless.serve import context, server
from gapless.serve.settings import ServerSettings

NUM_REQUESTS = 100


class NotingClient(FakeClient):
    """Notes in which order requests are handed to the engine, by the first token of their prompt."""

    def __init__(self, noted: list[tuple[str, int]]) -> None:
        super().__init__()
        self._noted = noted

    async def generate(self, request):
        self._noted.append(("engine", request.prompt_token_ids[0]))
        async for deltas in super().generate(request):
            yield deltas


def request(number: int) -> bytes:
    body = json.dumps(text_body(prompt=[number, *range(100)], stream=True)).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


def run_burst(monkeypatch, *, slow_first: bool = False) -> list[tuple[str, int]]:
    """All requests lie in the server's sockets before it looks at the first of them."""
    noted: list[tuple[str, int]] = []
    parse = context.parse_json

    def noting_parse(body: bytes):
        value = parse(body)
        noted.append(("parsed", value["prompt"][0]))
        return value

    monkeypatch.setattr(context, "parse_json", noting_parse)

    async def scenario() -> None:
        settings = ServerSettings(port=0, access_log="off")
        with server._bound_socket(settings) as listener, contextlib.ExitStack() as open_sockets:
            listener.listen(2048)
            http = server._make_server(make_app(NotingClient(noted)), settings)
            peers = []
            for number in range(NUM_REQUESTS):
                peer = open_sockets.enter_context(socket.create_connection(listener.getsockname()))
                data = request(number)
                peer.sendall(data[:-5] if slow_first and number == 0 else data)
                peer.setblocking(False)
                peers.append(peer)
            serving = asyncio.create_task(http.serve(sockets=[listener]))
            loop = asyncio.get_running_loop()
            for number, peer in sorted(enumerate(peers), key=lambda pair: pair[0] == 0):
                if slow_first and number == 0:
                    await loop.sock_sendall(peer, request(0)[-5:])
                received = b""
                while part := await asyncio.wait_for(loop.sock_recv(peer, 1 << 16), 10):
                    received += part
                assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            http.should_exit = http.force_exit = True
            await serving

    asyncio.run(scenario())
    assert len(noted) == 2 * NUM_REQUESTS
    return noted


def test_a_request_that_is_read_reaches_the_engine_before_the_next_is_read(monkeypatch):
    noted = run_burst(monkeypatch)
    for position in range(0, len(noted), 2):
        number = noted[position][1]
        assert noted[position : position + 2] == [("parsed", number), ("engine", number)]


def test_a_body_that_comes_slowly_holds_up_nobody(monkeypatch):
    noted = run_burst(monkeypatch, slow_first=True)
    assert noted[-2:] == [("parsed", 0), ("engine", 0)]

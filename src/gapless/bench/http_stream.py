"""A small HTTP/1.1 client for load: streamed answers to JSON requests, over connections that are kept.

A benchmark's client must cost less than the server it measures: bytes are split into events where they
arrive, each with the time of its arrival, and no task wakes up for them unless it asks to. It speaks what
OpenAI-compatible servers speak (chunked or closed-at-end bodies, ``data:`` events) and refuses everything
else loudly. Invariants: requests leave one after the other, each before the next one's connection is opened,
unless the server is far away; what a request waits for here counts as its time; a connection returns to the
pool only after its answer was read to the end. Read ``http_answer.py`` for how an answer is read,
``serve_load.py`` for what is measured.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from gapless.bench.http_answer import Answer, HttpFailure
from gapless.errors import ConfigError

__all__ = ["Endpoint", "Exchange", "HttpClient", "HttpFailure"]

_LIMIT_BYTES = 1 << 20
"""Longest event."""
_NEAR_S = 0.005
"""If the first connection takes longer to open, the server is so far away that none waits for another's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where a server is. ``base_path`` is a prefix of every path, without a slash at its end."""

    host: str
    port: int
    is_tls: bool
    base_path: str

    @classmethod
    def parse(cls, url: str, *, option: str = "--base-url") -> Endpoint:
        """Raises ``ConfigError`` for what is no http or https address."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(f"{option}={url}: the port must be a number up to 65535") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{option}={url}: must be like http://127.0.0.1:8000")
        is_tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(host=parts.hostname, port=port or (443 if is_tls else 80), is_tls=is_tls, base_path=path)

    @property
    def nobody_listens(self) -> str:
        """What to say when the connection is refused."""
        return f"{self.authority}: no server listens there (yet); gapless serve starts one"

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Exchange:
    """One request and what has arrived of its answer."""

    def __init__(self, what: str, *, is_stream: bool) -> None:
        self.sent_s = 0.0
        """When it was asked for, before it waited for its turn and a connection, on the clock of
        ``perf_counter``."""
        self.events: list[tuple[float, bytes]] = []
        """The data of each event and when it arrived."""
        self.body = b""
        """What is no event: an error's body, JSON, the beginning of the next event."""
        self.answer = Answer()
        self._what, self._is_stream = what, is_stream
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._wakes_for_events = False

    async def whole(self) -> None:
        """Until the answer has ended. Raises ``HttpFailure``, also for another status than 200."""
        while not self.answer.is_done:
            await self._wait()
        self._check()

    async def next_events(self) -> list[bytes]:
        """What has come since the last call; empty at the end. Raises as ``whole``."""
        self._wakes_for_events = True
        while not self.events and not self.answer.is_done:
            await self._wait()
        self._check()
        events, self.events = self.events, []
        return [data for _, data in events]

    def feed(self, data: bytes, now: float) -> None:
        try:
            parts = self.answer.feed(data)
            self.body += b"".join(parts)
            if self._is_stream and self.answer.status == 200:
                # Some end their lines with both characters; within JSON the first is written otherwise.
                *whole, self.body = self.body.replace(b"\r", b"").split(b"\n\n")
                self.events += [(now, frame[5:].strip()) for frame in whole if frame.startswith(b"data:")]
                if len(self.body) > _LIMIT_BYTES:
                    raise HttpFailure("the server sends an event that does not end")
        except HttpFailure as failure:
            self.fail(failure)
            return
        if self.answer.is_done or (self._wakes_for_events and self.events):
            self._wake()

    def end(self, error: Exception | None) -> None:
        """The connection has been closed."""
        if not self.answer.end() and self._failure is None:
            why = error or HttpFailure(f"{self._what}: the connection was closed within the answer")
            self._failure = why
        self._wake()

    def fail(self, failure: Exception) -> None:
        self._failure = failure
        self._wake()

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check(self) -> None:
        if not self.answer.is_done:
            return
        if self.answer.status != 200:
            message = _message_of(self.body.decode(errors="replace"))
            raise HttpFailure(f"{self._what}: {self.answer.status}, {message}")


class _Connection(asyncio.Protocol):
    """One exchange at a time."""

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self.exchange is None:
            self.close()  # nobody has asked
        else:
            self.exchange.feed(data, time.perf_counter())

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self.exchange is not None:
            self.exchange.end(error)

    def send(self, data: bytes, exchange: Exchange) -> None:
        self.exchange = exchange
        self._transport.write(data)

    def close(self) -> None:
        self.is_open = False
        self._transport.close()


class HttpClient:
    """Requests to one endpoint, as many at once as are asked for."""

    def __init__(self, endpoint: Endpoint, *, api_key: str | None = None) -> None:
        self._endpoint = endpoint
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._tls = ssl.create_default_context() if endpoint.is_tls else None
        self._idle: list[_Connection] = []
        self._turn = asyncio.Lock()
        self._is_far: bool | None = None

    async def get_json(self, path: str) -> Any:
        async with self.exchange("GET", path, None) as exchange:
            await exchange.whole()
            return json.loads(exchange.body)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """The data of each event as it comes. Raises ``HttpFailure``, ``OSError``."""
        async with self.exchange("POST", path, json.dumps(body).encode()) as exchange:
            while events := await exchange.next_events():
                for data in events:
                    yield data
            check_end(exchange)

    @asynccontextmanager
    async def exchange(self, method: str, path: str, body: bytes | None) -> AsyncIterator[Exchange]:
        """A request that has been sent; the answer to a POST is a stream of events. The connection is kept if
        its answer has ended with the block."""
        exchange = Exchange(f"{method} {path}", is_stream=method == "POST")
        data = self._head(method, path, body) + (body or b"")
        exchange.sent_s = time.perf_counter()
        connection = await self._send(data, exchange)
        try:
            yield exchange
        finally:
            connection.exchange = None
            if exchange.answer.keeps_connection and connection.is_open:
                self._idle.append(connection)
            else:
                connection.close()

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _head(self, method: str, path: str, body: bytes | None) -> bytes:
        headers = {"Host": self._endpoint.authority, "Accept": "*/*", **self._headers}
        if body is not None:
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        lines = [f"{method} {self._endpoint.base_path}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def _send(self, data: bytes, exchange: Exchange) -> _Connection:
        """Its connection."""
        async with self._turn:  # first come, first sent
            if not self._is_far:
                begun_s = time.perf_counter()
                connection = await self._connection()
                connection.send(data, exchange)
                if self._is_far is None:
                    self._is_far = time.perf_counter() - begun_s > _NEAR_S
                return connection
        connection = await self._connection()
        connection.send(data, exchange)
        return connection

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        _, connection = await asyncio.get_running_loop().create_connection(
            _Connection, self._endpoint.host, self._endpoint.port, ssl=self._tls
        )
        return connection


def check_end(exchange: Exchange) -> None:
    """Raises ``HttpFailure`` if a stream of events has ended within one."""
    if exchange.body.strip():
        raise HttpFailure(f"the answer ends within an event: {exchange.body[:200]!r}")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Of a faster event loop where there is one."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _message_of(text: str) -> str:
    """What an OpenAI error body says, or the body's beginning."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300].strip() or "without a body"

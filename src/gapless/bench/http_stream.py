"""A small HTTP/1.1 client for load: streamed answers to JSON requests, over connections that are kept.

A benchmark's client must cost less than the server it measures; this one does nothing per event but split it
off and note the time. It speaks what OpenAI-compatible servers speak (chunked or closed-at-end bodies,
``data:`` events) and refuses everything else loudly. Invariant: a connection returns to the pool only after
its answer was read to the end. Read ``serve_load.py`` for what is measured with it.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from gapless.errors import ConfigError, GaplessError

_LIMIT_BYTES = 1 << 20
"""Longest line or event."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HttpFailure(GaplessError):
    """The server answered with an error, or with something that is no answer."""


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


class HttpClient:
    """Requests to one endpoint, as many at once as are asked for."""

    def __init__(self, endpoint: Endpoint, *, api_key: str | None = None) -> None:
        self._endpoint = endpoint
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._tls = ssl.create_default_context() if endpoint.is_tls else None
        self._idle: list[Connection] = []

    async def get_json(self, path: str) -> Any:
        return json.loads(b"".join([part async for part in self._request("GET", path, None)]))

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """The data of each event as it comes. Raises ``HttpFailure``, ``OSError``."""
        rest = b""
        async with aclosing(self._request("POST", path, json.dumps(body).encode())) as parts:
            async for part in parts:
                *whole, rest = (rest + part).split(b"\n\n")
                for frame in whole:
                    if frame.startswith(b"data: "):
                        yield frame[6:]
                if len(rest) > _LIMIT_BYTES:
                    raise HttpFailure("the server sends an event that does not end")
        if rest.strip():
            raise HttpFailure(f"the answer ends within an event: {rest[:200]!r}")

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def _request(self, method: str, path: str, body: bytes | None) -> AsyncGenerator[bytes, None]:
        """Parts of a successful answer's body."""
        head = self._head(method, path, body)
        reader, writer = await self._connection()
        is_reusable = False
        try:
            writer.write(head + (body or b""))
            await writer.drain()
            status, headers = await _read_head(reader)
            parts = _body_parts(reader, headers)
            if status != 200:
                text = b"".join([part async for part in parts]).decode(errors="replace")
                raise HttpFailure(f"{method} {path}: {status}, {_message_of(text)}")
            async for part in parts:
                yield part
            has_end = "transfer-encoding" in headers or "content-length" in headers
            is_reusable = has_end and headers.get("connection", "").lower() != "close"
        except asyncio.IncompleteReadError:
            raise HttpFailure(f"{method} {path}: the connection was closed within the answer") from None
        except asyncio.LimitOverrunError:
            raise HttpFailure(f"{method} {path}: what the server sends is not HTTP") from None
        finally:
            if is_reusable:
                self._idle.append((reader, writer))
            else:
                writer.close()

    def _head(self, method: str, path: str, body: bytes | None) -> bytes:
        headers = {"Host": self._endpoint.authority, "Accept": "*/*", **self._headers}
        if body is not None:
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        lines = [f"{method} {self._endpoint.base_path}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def _connection(self) -> Connection:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(
            self._endpoint.host, self._endpoint.port, ssl=self._tls, limit=_LIMIT_BYTES
        )


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip().split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise HttpFailure(f"what the server sends is not HTTP: {first[:80]!r}")
    pairs = (line.partition(":") for line in lines)
    return int(rest[:3]), {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _body_parts(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass  # trailers
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while part := await reader.read(1 << 16):
            yield part


def _message_of(text: str) -> str:
    """What an OpenAI error body says, or the body's beginning."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300].strip() or "without a body"

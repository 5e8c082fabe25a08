"""An HTTP/1.1 answer, read as its bytes come: head, then a body in chunks, of known length or to the end.

No waiting and no sockets in here: ``feed`` is called with whatever has arrived. Everything that is not what
servers of this kind say is an ``HttpFailure``. Read ``http_stream.py`` for the connections.
"""

from __future__ import annotations

import re
from typing import Literal

from gapless.errors import GaplessError

_MAX_BYTES = 1 << 20
"""Longest head or line."""
_SIZE = re.compile(rb"[0-9a-fA-F]{1,15}[ \t]*")
"""Of a chunk. ``int`` would take signs too, and a chunk of -6 bytes never ends."""


class HttpFailure(GaplessError):
    """The server answered with an error, or with something that is no answer."""


class Answer:
    """``status`` and ``headers`` (names in lower case) are known once ``has_head``."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._rest = b""
        self._stage: Literal["head", "chunks", "trailers", "length", "open", "done"] = "head"
        self._num_left = 0  # bytes, of a body of known length

    @property
    def has_head(self) -> bool:
        return self._stage != "head"

    @property
    def is_done(self) -> bool:
        return self._stage == "done"

    @property
    def keeps_connection(self) -> bool:
        """Whether another request may follow on its connection."""
        has_end = "transfer-encoding" in self.headers or "content-length" in self.headers
        return self.is_done and has_end and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> list[bytes]:
        """Parts of the body that ``data`` has completed."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        while self._stage == "head":  # there may be some of 1xx before the answer's own
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._keep(data)
                return []
            self._read_head(data[:end])
            data = data[end + 4 :]
        if self._stage == "chunks":
            return self._read_chunks(data)
        if self._stage == "trailers":
            self._read_trailers(data)
            return []
        if self._stage == "length":
            part = data[: self._num_left]
            self._num_left -= len(part)
            if self._num_left == 0:
                self._stage = "done"
            return [part] if part else []
        return [data] if data and self._stage == "open" else []

    def end(self) -> bool:
        """The connection was closed; whether that ends the answer well."""
        if self._stage == "open":
            self._stage = "done"
        return self.is_done

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise HttpFailure(f"what the server sends is not HTTP: {first[:80]!r}")
        self.status = int(rest[:3])
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        length = self.headers.get("content-length")
        encoding = self.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise HttpFailure(f"the server sends {encoding[:80]!r}, which nobody asked for")
        if self.status < 200:
            return
        if self.status in (204, 304):
            self._num_left, self._stage = 0, "done"
        elif "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._stage = "chunks"
        elif length is None:
            self._stage = "open"
        elif length.isascii() and length.isdigit():
            self._num_left = int(length)
            self._stage = "length" if self._num_left else "done"
        else:
            raise HttpFailure(f"what the server sends is not HTTP: a length of {length[:80]!r}")

    def _read_chunks(self, data: bytes) -> list[bytes]:
        parts: list[bytes] = []
        start = 0
        while (end := data.find(b"\r\n", start)) >= 0:
            line = data[start:end]
            digits = line.split(b";")[0]
            if not _SIZE.fullmatch(digits):
                raise HttpFailure(f"what the server sends is not HTTP: a chunk of {line[:80]!r}")
            size = int(digits, 16)
            if size == 0:
                self._stage = "trailers"
                self._read_trailers(data[end + 2 :])
                return parts
            stop = end + 2 + size
            if len(data) < stop + 2:
                self._rest = data[start:]
                return parts
            parts.append(data[end + 2 : stop])
            start = stop + 2
        self._keep(data[start:])
        return parts

    def _read_trailers(self, data: bytes) -> None:
        while (end := data.find(b"\r\n")) >= 0:
            if end == 0:
                self._stage = "done"
                return
            data = data[end + 2 :]
        self._keep(data)

    def _keep(self, data: bytes) -> None:
        if len(data) > _MAX_BYTES:
            raise HttpFailure("what the server sends is not HTTP: a line or head without an end")
        self._rest = data

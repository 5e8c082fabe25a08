"""Server-sent events: one write for everything that is new, an error event when the stream breaks.

The answer's head is sent only once the first event exists, so a request that fails early gets a real status.
Later the status is gone: then the error is the last event, and ``[DONE]`` is missing. Invariant: whichever
way a stream ends (done, error, closed connection, server shutdown) its source is closed, which aborts the
request.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gapless.serve.deltas import WhileConnected
from gapless.serve.errors import ClientGoneError, as_api_error, engine_fault

DONE = b"data: [DONE]\n\n"
Events = AsyncGenerator[bytes, None]
"""Framed events, several in one item where they belong together; each ends with a blank line."""

PLAIN_SEND = "gapless.send"
"""In a request's scope: how the server around the application is told of an answer's body. The layers in
between look at its head alone, and a streamed token would be passed through each of them."""
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""The second stops nginx from collecting events before it passes them on."""

_encode = msgspec.json.Encoder().encode
_log = logging.getLogger("gapless.serve")


def event(value: msgspec.Struct) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


class TextEvent:
    """Events that differ in one text only, which most of a stream's do: the rest is encoded once.

    ``sample``: such an event with an empty text as ``field``, which cannot be found inside a string: quotes
    there have a backslash before them."""

    def __init__(self, sample: msgspec.Struct, field: str) -> None:
        before, _, after = event(sample).partition(b'"%s":""' % field.encode())
        assert after, "the sample has no such field"
        self._before, self._after = b'%s"%s":' % (before, field.encode()), after

    def of(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after


class EventStream(Response):
    """The answer. The source is read no faster than the connection takes. Raises what the source raises
    before its first event, and ``ClientGoneError``."""

    media_type = "text/event-stream"

    def __init__(self, events: Events) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with WhileConnected(receive):
                begin = await anext(self._events, None)
                if begin is None:
                    raise engine_fault("it ended without a token")
                await self._write(begin, send, scope.get(PLAIN_SEND, send))
        finally:
            await self._events.aclose()

    async def _write(self, begin: bytes, send: Send, send_body: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await send_body({"type": "http.response.body", "body": begin, "more_body": True})
            async for data in self._events:
                await send_body({"type": "http.response.body", "body": data, "more_body": True})
            last = DONE
        except OSError as error:  # what servers raise when the other side has gone
            raise ClientGoneError("the connection was closed while its answer was streamed") from error
        except Exception as error:
            known = as_api_error(error)
            if known.code == "internal_error":
                _log.exception("a stream failed")
            last = b"data: " + known.body() + b"\n\n"
        await send_body({"type": "http.response.body", "body": last, "more_body": False})

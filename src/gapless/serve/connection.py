"""One client's connection: uvicorn's, with limits on what comes before a body.

uvicorn bounds neither the size of a request's head nor the time it may take, so one client could fill the
memory with headers, and a few thousand could hold every file descriptor by sending nothing. Here a head has
``MAX_HEAD_BYTES`` and ``HEAD_TIMEOUT_S``, a new connection as long to begin one, and a body that nobody wants
any more (its request has been answered) as long to end. Bodies are timed in ``limits.py``, readers that take
nothing by the socket (``server.py``). Invariant: a connection on which no request is being answered always
has a timer.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gapless.serve.errors import ApiError
from gapless.serve.intake import Intake

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers. Cookies and tokens of single sign-on have been seen with 32 KiB."""
HEAD_TIMEOUT_S = 30.0
_LINGER_S = 1.0


class Connection(HttpToolsProtocol):
    """Closed, after an answer where one can be read, once a limit is passed."""

    def __init__(self, *args: Any, intake: Intake, **kwargs: Any) -> None:
        """``intake``: that of the server, which all its connections share."""
        super().__init__(*args, **kwargs)
        self._intake = intake
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._is_in_head = self._is_head_too_large = self._is_refused = self._is_resuming = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.close()
            return
        is_between_requests = self._is_idle
        self._feed(data)
        if not self._is_idle or self._is_refused or self.transport.is_closing():
            return
        if is_between_requests:  # all of it belongs to a head, or to a body that nobody reads
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and self._is_in_head:
                self._refuse_head()
        self._start_timer()  # uvicorn has stopped its own at the first byte

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._ignore_upgrade()
            except httptools.HttpParserError:
                self.send_400_response("")
                return
            else:
                return

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        start = super()._start_asgi_task
        self._intake.add(lambda: start(cycle, app))

    def _ignore_upgrade(self) -> None:
        """Java's client asks for HTTP/2 with its first request, which may have a body. The parser has stopped
        after the head, as if another protocol followed: a fresh one reads on, told of the body's length."""
        framing = (b"content-length", b"transfer-encoding")
        lines = [b"%s: %s\r\n" % (name, value) for name, value in self.headers if name in framing]
        self.parser = httptools.HttpRequestParser(self)
        self._is_resuming = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(lines))
        self._is_resuming = False

    def on_url(self, url: bytes) -> None:
        if not self._is_resuming:
            super().on_url(url)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # else the parser only believes it
            super().on_message_complete()

    def on_message_begin(self) -> None:
        if self._is_resuming:
            return
        super().on_message_begin()
        self._head_bytes = 0
        self._is_in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_resuming:
            return
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._is_head_too_large = True
            raise ValueError("the head is too large")  # the parser stops, and so does uvicorn

    def on_headers_complete(self) -> None:
        if self._is_resuming:
            return
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_in_head:  # the next request began before this one was answered
            self._start_timer()

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP has an answer of the same shape as everything else that is wrong."""
        if self._is_head_too_large:
            self._refuse_head()
        else:
            self._refuse(ApiError("this is no HTTP request that can be understood", code="invalid_http"))

    @property
    def _is_idle(self) -> bool:
        """No request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_in_body(self) -> bool:
        """The request that is being answered has not arrived in full, and nothing has been answered."""
        return not self.pipeline and self.cycle.more_body and not self.cycle.response_started

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        if self._is_idle and not self.transport.is_closing():
            self.transport.close()

    def _refuse_head(self) -> None:
        self._refuse(
            ApiError(
                f"request line and headers have more than {MAX_HEAD_BYTES} bytes; send fewer or shorter ones",
                status=431,
                code="head_too_large",
            )
        )

    def _refuse(self, error: ApiError) -> None:
        body = error.body()
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        if not self._is_idle:
            if (
                not self._is_in_body
            ):  # it would end up within, or be taken for, the answer to an earlier request
                self.transport.close()
                return
            self.cycle.disconnected = True  # what it would say is not sent any more
            self.cycle.message_event.set()
        self.transport.write(head.encode() + body)
        if not self.transport.can_write_eof():  # TLS
            self.transport.close()
            return
        # Closing with unread bytes resets the connection, and the other side would not see its answer.
        self.transport.write_eof()
        self._is_refused = True
        self._head_bytes = 0
        self._stop_timer()
        self._timer = self.loop.call_later(_LINGER_S, self._on_timer)

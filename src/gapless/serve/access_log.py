"""The outermost layer: a request id for everybody, one log line per request, and the last word on faults.

A caller's ``X-Request-Id`` is kept if it is short and plain, so that one id leads through several servers;
else one is made. The line has no query, no header and no body: none of them can leak a key or a prompt.
Invariant: an exception that reaches this layer becomes a 500 without details and a traceback in the log;
nothing passes to the server below.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gapless.serve.auth import path_of
from gapless.serve.errors import CLIENT_CLOSED, ClientGoneError, as_api_error
from gapless.serve.metrics import RequestMetrics
from gapless.serve.settings import AccessLog

_access = logging.getLogger("gapless.access")
_log = logging.getLogger("gapless.serve")
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class RequestLog:
    """ASGI middleware. Must be added last, which makes it the first to see a request."""

    def __init__(
        self, app: ASGIApp, *, metrics: RequestMetrics, form: AccessLog, root_path: str = ""
    ) -> None:
        """``root_path``: a proxy's prefix, which may or may not still be on the path."""
        self._app, self._metrics, self._form, self._root_path = app, metrics, form, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._root_path:
            scope["root_path"] = self._root_path
        entry = _Entry(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                entry.first_byte_s = time.perf_counter() - entry.start
                headers = [*message.get("headers", ()), (b"x-request-id", entry.request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        self._metrics.num_open += 1
        try:
            await self._app(scope, receive, send_with_id)
        except ClientGoneError:
            entry.is_gone = True
        except Exception as error:
            known = as_api_error(error)
            _log.exception("request %s failed", entry.request_id)
            if entry.status is None:
                await known.response()(scope, receive, send_with_id)
        finally:
            self._metrics.num_open -= 1
            status = CLIENT_CLOSED if entry.is_gone or entry.status is None else entry.status
            self._metrics.responses[entry.route, status] += 1
            self._write(entry, status)

    def _write(self, entry: _Entry, status: int) -> None:
        if self._form == "off":
            return
        fields = entry.fields(status)
        if self._form == "json":
            _access.info("%s", json.dumps(fields))
        else:
            _access.info("%s", " ".join(f"{name}={json.dumps(value)}" for name, value in fields.items()))


class _Entry:
    """What is known about one request."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.start = time.perf_counter()
        self.status: int | None = None
        self.first_byte_s: float | None = None
        self.is_gone = False
        given = [value for name, value in scope["headers"] if name == b"x-request-id"]
        text = given[0].decode("latin-1") if len(given) == 1 else ""
        self.request_id = text if _PLAIN_ID.fullmatch(text) else uuid.uuid4().hex

    @property
    def route(self) -> str:
        """The route's pattern: paths that callers invent would make endless metrics."""
        return getattr(self.scope.get("route"), "path", "other")

    def fields(self, status: int) -> dict[str, Any]:
        client = self.scope.get("client")
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": self.request_id,
            "client": client[0] if client else None,
            "method": self.scope["method"],
            "path": path_of(self.scope)[:512],
            "status": status,
            "first_byte_s": None if self.first_byte_s is None else round(self.first_byte_s, 6),
            "duration_s": round(time.perf_counter() - self.start, 6),
        }

"""Every way a request can fail, as OpenAI says it: a status and ``{"error": {message, type, param, code}}``.

``ApiError`` is what the HTTP side itself raises; ``as_api_error`` turns what comes from below (a refused
request, a full queue, a dead engine) into one. Invariants: the message of an internal fault never reaches a
caller, and what a caller sent is echoed only cut to a line's length. Read ``access_log.py`` for the place
where faults that nobody expected end.
"""

from __future__ import annotations

import math
import re
import reprlib
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from gapless.errors import GaplessError, RequestError
from gapless.serve.client import (
    EngineBusyError,
    EngineDeadError,
    EngineDrainingError,
    EngineRestartingError,
    ReplicaLostError,
)
from gapless.serve.protocol.common import PARTS_BRANCH, TEXT_BRANCH

INVALID = "invalid_request_error"
SERVER = "server_error"
MAX_MESSAGE_CHARS = 1000

CLIENT_CLOSED = 499
"""Status in logs and metrics (nobody is left to see it) of a request whose connection went away."""

_RETRY_WHEN_DOWN_S = 5

_PART = reprlib.Repr()
"""Reads no more of a value than it shows: a body may be one list of millions."""
_PART.maxstring = _PART.maxother = _PART.maxlong = 90


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct):
    error: ErrorBody


class ApiError(GaplessError):
    """A request that ends with ``status``. ``param`` names the field at fault, ``code`` is for programs."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.type, self.param, self.code = status, type, param, code
        self.headers = headers or {}

    def body(self) -> bytes:
        """The reply's JSON."""
        message = str(self)
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[: MAX_MESSAGE_CHARS - 1] + "…"
        param = None if self.param is None else _sayable(self.param)
        return msgspec.json.encode(
            ErrorReply(
                error=ErrorBody(message=_sayable(message), type=self.type, param=param, code=self.code)
            )
        )

    def response(self) -> Response:
        return Response(self.body(), self.status, headers=self.headers, media_type="application/json")


def _sayable(text: str) -> str:
    """What a caller sent may hold what UTF-8 cannot say."""
    return text.encode("utf-8", "backslashreplace").decode()


class ClientGoneError(Exception):
    """The connection was closed: there is nobody to answer, so no handler may turn this into an answer."""


def as_api_error(error: Exception) -> ApiError:
    """What ``error`` means to the caller; an unknown kind is an internal fault that says nothing more."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(str(error), param=_param_of(str(error)), code="invalid_value")
    if isinstance(error, EngineBusyError):
        return ApiError(
            str(error),
            status=429,
            type="rate_limit_error",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(max(1, math.ceil(error.retry_after_s)))},
        )
    if isinstance(error, EngineDrainingError):
        return ApiError(
            str(error) or "the server is shutting down",
            status=503,
            type=SERVER,
            code="server_draining",
            headers={"Retry-After": str(_RETRY_WHEN_DOWN_S)},
        )
    if isinstance(error, EngineRestartingError):
        return ApiError(
            str(error),
            status=503,
            type=SERVER,
            code="engine_restarting",
            headers={"Retry-After": str(_RETRY_WHEN_DOWN_S)},
        )
    if isinstance(error, ReplicaLostError):
        return ApiError(
            "the replica that ran this request has died; send the request again",
            status=500,
            type=SERVER,
            code="replica_died",
        )
    if isinstance(error, EngineDeadError):
        return ApiError(
            "the engine has stopped; the server is going down", status=500, type=SERVER, code="engine_dead"
        )
    if isinstance(error, HTTPException):
        return _of_http(error)
    return ApiError("internal error", status=500, type=SERVER, code="internal_error")


def engine_fault(message: str | None) -> ApiError:
    """One request failed inside the engine; others go on."""
    text = f"the request failed in the engine: {message}" if message else "the request failed in the engine"
    return ApiError(text, status=500, type=SERVER, code="engine_error")


def ended_by_server() -> ApiError:
    """The engine ended a request that nobody gave up: it is shutting down."""
    return as_api_error(EngineDrainingError("the server is shutting down and has ended this request"))


def of_validation(error: ValidationError) -> ApiError:
    """The first thing wrong with a request, as one sentence that names the field."""
    first = error.errors(include_url=False)[0]
    param = _path_of(first["loc"])
    kind, given = first["type"], first.get("input")
    if kind == "extra_forbidden":
        return ApiError(
            f"unknown or unsupported field {param!r}; remove it", param=param, code="unknown_parameter"
        )
    if kind == "missing":
        return ApiError(f"field {param!r} is required", param=param, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        param = param or getattr(first["ctx"]["error"], "field", None)
        names_it = param is None or message.startswith(param)
        return ApiError(message if names_it else f"{param}: {message}", param=param, code="invalid_value")
    shown = _shorten(given)
    return ApiError(f"{param}={shown}: {message}" if param else message, param=param, code="invalid_type")


def _of_http(error: HTTPException) -> ApiError:
    status = error.status_code
    if status == 404:
        return ApiError("there is no such endpoint", status=404, code="not_found")
    if status == 405:
        return ApiError(
            "this endpoint does not take this method",
            status=405,
            code="method_not_allowed",
            headers=dict(error.headers or {}),
        )
    return ApiError(str(error.detail), status=status, type=INVALID if status < 500 else SERVER)


def _path_of(location: tuple[int | str, ...]) -> str | None:
    """``messages[0].role``; names of union branches, which pydantic adds, are left out."""
    path = ""
    for part in location:
        if part in (TEXT_BRANCH, PARTS_BRANCH):
            continue
        if isinstance(part, int):
            path += f"[{part}]"
        elif not re.fullmatch(r"[\w.\-]{1,64}", part):
            path += "." + _shorten(part)
        else:
            path += f".{part}" if path else part
    return path.lstrip(".") or None


def _param_of(message: str) -> str | None:
    """Our messages begin with the field and its value: ``temperature=-1: must be …``."""
    match = re.match(r"(\w+)=", message)
    return match[1] if match else None


def _shorten(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**60:
        return "a number of many digits"
    text = repr(value[:100]) if isinstance(value, str) else _PART.repr(value)
    return text if len(text) <= 80 else text[:79] + "…"

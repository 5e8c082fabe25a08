"""A request's body: read within limits, then parsed as strict JSON. Whatever is wrong with it is a 4xx here.

Stricter than Python's parser on purpose: a name that occurs twice, ``NaN`` and ``Infinity``, numbers beyond
what a double can hold, text that is not Unicode, and values nested deeper than any real request are refused,
because two programs could read each of them differently or because they cost more than they are worth.
Invariant: memory used before the refusal is bounded
by ``max_body_bytes`` for one request, by ``MAX_BODIES`` times that for all. Read ``protocol/`` next.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, NoReturn

import msgspec
from starlette.requests import ClientDisconnect, Request

from gapless.serve.errors import ApiError, ClientGoneError

MAX_DEPTH = 64
"""Objects and lists within each other. A JSON schema is the deepest thing anybody sends."""
BODY_TIMEOUT_S = 60.0
MAX_BODIES = 16
"""Of the largest size; of smaller ones accordingly more. Else a thousand clients that each send all but the
last byte would hold a thousand times the limit."""

_MAX_COUNTED = 1 << 14
"""Objects and lists: to count the names in more costs more than is saved by it."""
_UNKNOWN = object()
_END_OF_NAME = re.compile(rb'"[ \t\n\r]*:')
_CONTAINERS = frozenset({dict, list})
_decode = msgspec.json.Decoder().decode
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class BodyReader:
    """Reads bodies of at most ``max_body_bytes``, and holds no more than ``MAX_BODIES`` such at a time."""

    def __init__(self, *, max_body_bytes: int) -> None:
        self._max_bytes, self._max_held = max_body_bytes, MAX_BODIES * max_body_bytes
        self.num_held = 0
        """Bytes of bodies that are being read or parsed."""

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body; it is counted until the block ends. Raises ``ApiError`` (400, 408, 413, 415, 429) or
        ``ClientGoneError``."""
        _check_headers(request, self._max_bytes)
        body = bytearray()
        try:
            await self._fill(body, request)
            yield bytes(body)
        finally:
            self.num_held -= len(body)

    async def _fill(self, body: bytearray, request: Request) -> None:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for part in request.stream():
                    body += part
                    self.num_held += len(part)
                    if len(body) > self._max_bytes:
                        raise _too_large(f"more than {self._max_bytes}", self._max_bytes)
                    if self.num_held > self._max_held:
                        raise _too_much_at_once()
        except TimeoutError:
            raise ApiError(
                f"the body did not arrive within {BODY_TIMEOUT_S:.0f} seconds",
                status=408,
                code="body_timeout",
            ) from None
        except ClientDisconnect:
            raise ClientGoneError("the connection was closed while its body was read") from None


def parse_json(body: bytes) -> Any:
    """Raises ``ApiError`` (400) that says what is wrong and where."""
    num_containers = body.count(b"{") + body.count(b"[")  # or more: texts may have some
    value = _parsed_quickly(body) if num_containers <= _MAX_COUNTED else _UNKNOWN
    if value is _UNKNOWN:
        value = _parsed_slowly(body)
    if num_containers > MAX_DEPTH:
        _check_depth(value)
    if _SURROGATE.search(body):
        _check_unicode(value)
    return value


def _parsed_quickly(body: bytes) -> Any:
    """The value, or ``_UNKNOWN`` where something may be wrong: a decoder in C that keeps to the standard, but
    does not see names that occur twice. Those are what is missing when the names in the value are counted, as
    the text has at least as many places where a name ends. Of these no more are looked at than tell: a text
    may have millions."""
    try:
        value = _decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return _UNKNOWN
    ends = _END_OF_NAME.finditer(body)
    return value if next(islice(ends, _num_names(value), None), None) is None else _UNKNOWN


def _num_names(value: Any) -> int:
    """In all objects of ``value``."""
    num, left = 0, [value]
    while left:
        node = left.pop()
        if type(node) is dict:
            num += len(node)
            left += node.values()
        elif type(node) is list and not _CONTAINERS.isdisjoint(map(type, node)):
            left += node
    return num


def _parsed_slowly(body: bytes) -> Any:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}") from None
    try:
        return json.loads(
            text, object_pairs_hook=_without_repeats, parse_constant=_constant, parse_float=_finite
        )
    except json.JSONDecodeError as error:
        raise _bad(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise _bad(f"the body is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError:  # Python refuses integers of thousands of digits by a limit of its own
        raise _bad("the body has a number with too many digits") from None


def _check_headers(request: Request, max_body_bytes: int) -> None:
    content_type = request.headers.get("content-type")
    if content_type is not None and not _is_json(content_type):
        raise ApiError(
            f"content type {content_type[:80]!r}: must be application/json in UTF-8",
            status=415,
            code="unsupported_media_type",
        )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(
            f"content encoding {encoding[:80]!r}: send the body without compression",
            status=415,
            code="unsupported_media_type",
        )
    transfer = request.headers.get("transfer-encoding", "chunked")
    if transfer.strip().lower() != "chunked":
        raise ApiError(
            f"transfer encoding {transfer[:80]!r}: only chunked is understood",
            status=415,
            code="unsupported_media_type",
        )
    length = request.headers.get("content-length")
    if length is None:
        return
    if not (length.isascii() and length.isdigit()):
        raise _bad(f"content length {length[:80]!r}: must be a number")
    if len(length) > 18 or int(length) > max_body_bytes:
        raise _too_large(length[:20], max_body_bytes)


def _is_json(content_type: str) -> bool:
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    charsets = [p.partition("=")[2].strip('"') for p in parameters if p.startswith("charset=")]
    is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    return is_json and all(charset in ("utf-8", "utf8") for charset in charsets)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        # In one pass: an object may have a million names.
        repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise _bad(f"the name {repeated[:80]!r} occurs twice in one object", param=repeated[:80])
    return result


def _constant(literal: str) -> NoReturn:
    raise _bad(f"the body is not JSON: {literal} is no JSON number")


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise _bad(f"the number {literal[:40]} is too large")
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for node in level:
            inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
            children += [child for child in inner if isinstance(child, (dict, list))]
        if not children:
            return
        level = children
    raise _bad(f"the body is nested deeper than {MAX_DEPTH} levels")


def _check_unicode(value: Any) -> None:
    """Half of a surrogate pair parses, but is no text: nothing could encode it again."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _bad("a string in the body is not Unicode text: it has half of a surrogate pair") from None


def _bad(message: str, *, param: str | None = None) -> ApiError:
    return ApiError(message, param=param, code="invalid_json")


def _too_much_at_once() -> ApiError:
    return ApiError(
        "the server is reading too many large bodies at once; try again later",
        status=429,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": "1"},
    )


def _too_large(length: str, limit: int) -> ApiError:
    return ApiError(
        f"the body has {length} bytes, the limit is {limit}; shorten it or raise --max-body-bytes",
        status=413,
        code="body_too_large",
    )

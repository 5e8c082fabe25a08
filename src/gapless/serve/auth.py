"""Keys: who may call, decided before a body is read.

A request names its key as ``Authorization: Bearer KEY``. Every key is compared with every configured one in
constant time, over digests of equal length, so neither a key's length nor its beginning leaks through timing.
Open without a key are only the endpoints of probes and scrapers. Invariant: a key is never logged, echoed or
kept; what stays in memory here are digests.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from gapless.serve.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/metrics", "/version", "/dashboard", "/openapi.json"})
"""They show no prompt, no answer and no configuration."""


class KeyCheck:
    """ASGI middleware that answers 401 unless the request has one of ``keys``."""

    def __init__(self, app: ASGIApp, *, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and not self._is_allowed(scope):
            error = ApiError(
                "no valid API key: send it as 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if scope["method"] == "OPTIONS" or path_of(scope) in OPEN_PATHS:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:  # two headers could be read differently by a proxy and by us
            return False
        scheme, _, key = given[0].partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches) and scheme.lower() == b"bearer"


def path_of(scope: Scope) -> str:
    """The path within this application, whether or not a proxy left its prefix on."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

"""msgspec structs as HTTP answers."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

_encode = msgspec.json.Encoder().encode


def json_reply(value: Any, *, status: int = 200) -> Response:
    return Response(_encode(value), status, media_type="application/json")

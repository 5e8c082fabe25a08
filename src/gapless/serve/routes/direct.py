"""Routes whose endpoints take the request and give the answer themselves.

FastAPI's own handler solves dependencies, reads bodies and serialises what comes back; none of ours needs
that, and a burst of requests waits for it. They stay FastAPI's routes for everything else: how paths match,
the OpenAPI document, what happens to exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

from gapless.serve.routes.documented import takes

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


def endpoint(app: FastAPI, path: str, model: type[BaseModel], *, tag: str) -> Callable[[Endpoint], Endpoint]:
    """``POST path`` with a body that the decorated function reads as ``model``."""

    def add(function: Endpoint) -> Endpoint:
        app.router.add_api_route(
            path,
            function,
            methods=["POST"],
            openapi_extra=takes(model),
            tags=[tag],
            route_class_override=_DirectRoute,
        )
        return function

    return add


class _DirectRoute(APIRoute):
    def get_route_handler(self) -> Endpoint:
        return self.endpoint

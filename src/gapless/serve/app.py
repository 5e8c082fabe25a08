"""The HTTP application: every endpoint over one engine client.

From the outside in: request ids and the log, cross-origin rules, keys, then the endpoints, each of which
reads its body itself (``limits.py``). All layers are plain ASGI and look at an answer's head alone; a
streamed token goes past them. Whatever an endpoint raises becomes an OpenAI error body in ``errors.py``. Read
``routes/`` next.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gapless.errors import GaplessError
from gapless.multimodal.loading import MediaLoader
from gapless.sampling.generation_config import read_sampling_defaults
from gapless.serve.access_log import RequestLog
from gapless.serve.auth import KeyCheck
from gapless.serve.client import EngineClient
from gapless.serve.context import ServeContext, TextTokenizer, now
from gapless.serve.dashboard import dashboard_router
from gapless.serve.errors import ApiError, as_api_error
from gapless.serve.limits import BodyReader
from gapless.serve.media import MediaDesk
from gapless.serve.metrics import RequestMetrics
from gapless.serve.routes import chat, completions, embeddings, status, tokens
from gapless.serve.routes.documented import describe
from gapless.serve.settings import ServerSettings
from gapless.serve.sse import PLAIN_SEND
from gapless.serve.tools import parser_of_template
from gapless.serve.version import version

if TYPE_CHECKING:
    from gapless.multimodal.processor import Processor


def create_app(
    client: EngineClient,
    settings: ServerSettings,
    tokenizer: TextTokenizer | None,
    processor: Processor | None = None,
) -> FastAPI:
    """``client`` must be ready: its ``info`` says what is served. ``processor``: of a model with vision."""
    metrics = RequestMetrics()
    media = None
    if processor is not None and client.info.takes_media:
        loader = MediaLoader(limits=settings.media_limits, access=settings.media_access)
        media = MediaDesk(processor, loader, settings=settings, metrics=metrics)
    template = settings.chat_template or getattr(tokenizer, "chat_template", None)
    context = ServeContext(
        client=client,
        settings=settings,
        bodies=BodyReader(max_body_bytes=settings.max_body_bytes),
        tokenizer=tokenizer,
        metrics=metrics,
        model_names=settings.served_model_names or (client.info.model,),
        tool_format=_tool_format(settings, template),
        media=media,
        created=now(),
        sampling_defaults=read_sampling_defaults(settings.generation_config, model=client.info.model),
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        if media is not None:
            media.close()

    app = _Application(
        lifespan=lifespan,
        title="Gapless",
        version=version(),
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    for routes in (chat, completions, embeddings, tokens, status):
        routes.add_routes(app, context)
    app.include_router(dashboard_router(context))
    app.add_exception_handler(GaplessError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_bad_path)
    # The last one added is the outermost.
    app.add_middleware(KeyCheck, keys=settings.api_keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestLog, metrics=metrics, form=settings.access_log, root_path=settings.root_path)
    return app


class _Application(FastAPI):
    """Tells the endpoints how to write past all layers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[PLAIN_SEND] = send
        await super().__call__(scope, receive, send)


def _tool_format(settings: ServerSettings, template: str | None) -> str | None:
    if settings.tool_call_parser == "auto":
        return parser_of_template(template)
    return None if settings.tool_call_parser == "none" else settings.tool_call_parser


async def _answer_error(request: Request, error: Exception) -> Response:
    known = as_api_error(error)
    if known.code == "internal_error":
        raise error  # logged with its traceback in one place
    return known.response()


async def _answer_bad_path(request: Request, error: Exception) -> Response:
    return ApiError("the path or its query cannot be understood", code="invalid_value").response()

"""What is served and how it fares: models, health, metrics, configuration, version.

Health looks at the engine's loop, not at this process: 503 once the engine is gone or has shown no life for
``health_stale_s``. One endpoint acts: it empties the prefix cache, where the operator has asked for it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from gapless.serve.context import ServeContext, unknown_model
from gapless.serve.deltas import unless_gone
from gapless.serve.errors import SERVER, ApiError
from gapless.serve.exposition import CONTENT_TYPE, Exposition
from gapless.serve.responses import ModelCard, ModelList
from gapless.serve.routes.replies import json_reply
from gapless.serve.version import version


def add_routes(app: FastAPI, context: ServeContext) -> None:
    client = context.client
    exposition = Exposition(client, context.metrics, model_name=context.model_names[0])

    modalities = ["text"] if context.media is None else ["text", "image", "video"]

    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name,
            created=context.created,
            root=client.info.model,
            max_model_len=client.info.max_model_len,
            input_modalities=modalities,
        )

    @app.get("/v1/models", tags=["status"])
    async def list_models() -> Response:
        return json_reply(ModelList(data=[card(name) for name in context.model_names]))

    @app.get("/v1/models/{model_id:path}", tags=["status"])
    async def retrieve_model(model_id: str) -> Response:
        if model_id not in context.model_names:
            raise unknown_model(model_id)
        return json_reply(card(model_id))

    @app.head("/health", tags=["status"])
    @app.get("/health", tags=["status"])
    async def health() -> Response:
        age_s = client.step_age_s()
        if client.is_draining:
            raise _unhealthy("the server is shutting down")
        if age_s is None:
            raise _unhealthy("no engine is ready")
        if age_s > context.settings.health_stale_s:
            raise _unhealthy(f"the engine's loop has shown no life for {age_s:.0f} seconds")
        if not client.is_healthy:
            raise _unhealthy("the engine has stopped")
        reply: dict[str, Any] = {"status": "ok", "step_age_s": round(age_s, 3)}
        replicas = client.replicas()
        if len(replicas) > 1:  # degraded is no reason to stop sending requests here
            num_healthy = sum(replica.is_healthy for replica in replicas)
            reply["status"] = "ok" if num_healthy == len(replicas) else "degraded"
            reply |= {"replicas": len(replicas), "healthy_replicas": num_healthy}
        return json_reply(reply)

    @app.get("/metrics", tags=["status"])
    async def metrics() -> Response:
        return Response(exposition.render(), media_type=CONTENT_TYPE)

    @app.get("/version", tags=["status"])
    async def show_version() -> Response:
        return json_reply({"version": version()})

    @app.get("/server_info", tags=["status"])
    async def server_info(http: Request) -> Response:
        """The resolved configuration, the graph plan with its reasons, and the report of what ran."""
        info = client.info
        report = await unless_gone(http.receive, client.report())
        return json_reply(
            {
                "version": version(),
                "model": info.model,
                "served_model_names": context.model_names,
                "device": info.device,
                "max_model_len": info.max_model_len,
                "input_modalities": modalities,
                "startup_s": info.startup_s,
                "settings": context.settings.to_dict(),
                "config": info.config,
                "plan": info.plan,
                "stats": client.stats(),
                "replicas": [dataclasses.asdict(replica) for replica in client.replicas()],
                "report": report,
            }
        )

    if context.settings.enable_cache_reset:

        @app.post("/reset_prefix_cache", tags=["status"])
        async def reset_prefix_cache(http: Request) -> Response:
            """Forget all cached prefixes, those of running requests included."""
            await unless_gone(http.receive, client.reset_prefix_cache())
            return Response()


def _unhealthy(message: str) -> ApiError:
    return ApiError(message, status=503, type=SERVER, code="unhealthy")

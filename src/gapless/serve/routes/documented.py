"""The OpenAPI document: bodies are parsed by our own strict reader, so they are described by hand here.

``takes`` points a route at its request model; ``describe`` adds the models' schemas and the error shape once
all routes exist. Invariant: what a schema allows, the endpoint accepts or refuses with one of the listed
statuses; a test sends generated requests to hold it to that.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gapless.serve.protocol.chat import ChatRequest
from gapless.serve.protocol.completions import CompletionRequest
from gapless.serve.protocol.embeddings import EmbeddingRequest
from gapless.serve.protocol.tokens import DetokenizeRequest, TokenizeRequest
from gapless.serve.version import version

_MODELS = (ChatRequest, CompletionRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest)
_REF = "#/components/schemas/{model}"
_FAILURES = {
    "400": "the request is wrong; the message names the field",
    "401": "no valid key",
    "404": "no such model or endpoint",
    "413": "the body is too large",
    "415": "the body is not JSON",
    "429": "the queue is full; try again after Retry-After seconds",
    "500": "the engine failed",
    "503": "not ready, or shutting down",
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """For ``openapi_extra`` of a route whose body is ``model``."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI) -> dict[str, Any]:
    """The document; made once and kept."""
    if app.openapi_schema is None:
        document = get_openapi(title="Gapless", version=version(), routes=app.routes)
        _, definitions = models_json_schema([(model, "validation") for model in _MODELS], ref_template=_REF)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(definitions.get("$defs", {}), Error=_ERROR_SCHEMA)
        error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
                for status, text in _FAILURES.items():
                    operation["responses"].setdefault(status, {"description": text, "content": error})
        app.openapi_schema = document
    return app.openapi_schema

"""``POST /v1/embeddings``."""

from __future__ import annotations

import asyncio
import base64
from array import array

from fastapi import FastAPI, Request
from starlette.responses import Response

from gapless.serve.context import ServeContext, new_id, now
from gapless.serve.deltas import cancel, unless_gone
from gapless.serve.errors import ApiError
from gapless.serve.messages import EmbedRequest
from gapless.serve.prompts import cache_extra_of, encode_prompts
from gapless.serve.protocol.embeddings import EmbeddingRequest
from gapless.serve.responses import EmbeddingData, EmbeddingList, Usage
from gapless.serve.routes.direct import endpoint
from gapless.serve.routes.replies import json_reply


def add_routes(app: FastAPI, context: ServeContext) -> None:
    @endpoint(app, "/v1/embeddings", EmbeddingRequest, tag="embed")
    async def embeddings(http: Request) -> Response:
        request = await context.parse(http, EmbeddingRequest)
        prompts = await encode_prompts(
            context, request.input, name="input", add_special_tokens=request.add_special_tokens
        )
        limit = context.client.info.max_model_len
        longest = max(map(len, prompts))
        if longest > limit:
            raise ApiError(
                f"an input has {longest} tokens, but the maximum context length is {limit}; shorten it",
                param="input",
                code="context_length_exceeded",
            )
        reply_id = new_id("embd-")
        cache_extra = cache_extra_of(request.cache_salt)
        requests = [
            EmbedRequest(
                request_id=f"{reply_id}-{number}", prompt_token_ids=token_ids, cache_extra=cache_extra
            )
            for number, token_ids in enumerate(prompts)
        ]
        vectors = await unless_gone(http.receive, _embed_all(context, requests))
        size = len(vectors[0])
        if request.dimensions is not None and request.dimensions != size:
            raise ApiError(
                f"dimensions={request.dimensions}: this model's vectors have {size}, and cutting them would "
                "change what they mean; leave it out",
                param="dimensions",
                code="unsupported_value",
            )
        num_tokens = sum(map(len, prompts))
        return json_reply(
            EmbeddingList(
                id=reply_id,
                created=now(),
                model=context.model_names[0] if request.model is None else request.model,
                data=[
                    EmbeddingData(
                        index=index, embedding=_packed(v) if request.encoding_format == "base64" else v
                    )
                    for index, v in enumerate(vectors)
                ],
                usage=Usage(prompt_tokens=num_tokens, total_tokens=num_tokens),
            )
        )


async def _embed_all(context: ServeContext, requests: list[EmbedRequest]) -> list[list[float]]:
    """All at once, so that they share steps; the first failure ends the others."""
    tasks = [asyncio.ensure_future(context.client.embed(request)) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel(*tasks)


def _packed(vector: list[float]) -> str:
    """float32, little-endian, as OpenAI's clients unpack it."""
    values = array("f", vector)
    if not _IS_LITTLE_ENDIAN:
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


_IS_LITTLE_ENDIAN = array("H", [1]).tobytes() == b"\x01\x00"

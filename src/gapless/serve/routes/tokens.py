"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request
from starlette.responses import Response

from gapless.serve.context import ServeContext, TextTokenizer
from gapless.serve.prompts import check_ids, encode_chat, encode_text, need_tokenizer
from gapless.serve.protocol.tokens import DetokenizeRequest, TokenizeRequest
from gapless.serve.responses import Detokenized, Tokens
from gapless.serve.routes.direct import endpoint
from gapless.serve.routes.replies import json_reply


def add_routes(app: FastAPI, context: ServeContext) -> None:
    @endpoint(app, "/tokenize", TokenizeRequest, tag="tokens")
    async def tokenize(http: Request) -> Response:
        request = await context.parse(http, TokenizeRequest)
        tokenizer = need_tokenizer(context)
        if request.messages is not None:
            prompt = await encode_chat(
                context,
                request.messages,
                tools=request.tools,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                variables=request.chat_template_kwargs,
                add_special_tokens=bool(request.add_special_tokens),
                receive=http.receive,
            )
            token_ids = prompt.token_ids
        else:
            adds = request.add_special_tokens is not False
            token_ids = await encode_text(context, request.prompt or "", add_special_tokens=adds)
        strings = None
        if request.return_token_strs:
            # A body of megabytes has millions of tokens, so not here, where everybody would wait.
            strings = await asyncio.to_thread(_each_as_text, tokenizer, token_ids)
        limit = context.client.info.max_model_len
        return json_reply(
            Tokens(count=len(token_ids), max_model_len=limit, tokens=token_ids, token_strs=strings)
        )

    @endpoint(app, "/detokenize", DetokenizeRequest, tag="tokens")
    async def detokenize(http: Request) -> Response:
        request = await context.parse(http, DetokenizeRequest)
        tokenizer = need_tokenizer(context)
        if request.tokens:
            check_ids(context, request.tokens, name="tokens")
        text = await asyncio.to_thread(tokenizer.decode, request.tokens, skip_special_tokens=False)
        return json_reply(Detokenized(prompt=text))


def _each_as_text(tokenizer: TextTokenizer, token_ids: list[int]) -> list[str]:
    return [tokenizer.decode([token], skip_special_tokens=False) for token in token_ids]

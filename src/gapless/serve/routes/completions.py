"""``POST /v1/completions``."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from gapless.serve.answers import UsageCounter, collect_whole
from gapless.serve.context import ServeContext, new_id, now
from gapless.serve.deltas import deltas_of, unless_gone
from gapless.serve.errors import ApiError
from gapless.serve.messages import GenerateRequest
from gapless.serve.metrics import RequestClock
from gapless.serve.prompts import cache_extra_of, check_length, encode_prompts
from gapless.serve.protocol.completions import CompletionRequest
from gapless.serve.routes.direct import endpoint
from gapless.serve.routes.replies import json_reply
from gapless.serve.sampling import completion_params, grammar_of
from gapless.serve.sse import EventStream
from gapless.serve.text_answers import Echo, TextFormat, text_events
from gapless.serve.text_offsets import AnswerOffsets, prompt_offsets

MAX_CHOICES = 4096
"""Prompts times ``n`` of one request: more would fill any queue by itself."""


def add_routes(app: FastAPI, context: ServeContext) -> None:
    @endpoint(app, "/v1/completions", CompletionRequest, tag="generate")
    async def completions(http: Request) -> Response:
        clock = RequestClock(context.metrics)
        request = await context.parse(http, CompletionRequest)
        params = completion_params(
            request,
            defaults=context.sampling_defaults,
            max_n=context.settings.max_n,
            has_tokenizer=context.tokenizer is not None,
        )
        n = params.get("n", 1)
        if len(request.prompt) * n > MAX_CHOICES:
            raise ApiError(
                f"{len(request.prompt)} prompts with n={n}: one request may have {MAX_CHOICES} choices",
                param="n",
                code="invalid_value",
            )
        prompts = await encode_prompts(
            context, request.prompt, name="prompt", add_special_tokens=request.add_special_tokens
        )
        for token_ids in prompts:
            check_length(context, len(token_ids), params, name="prompt")
        format = TextFormat(
            id=new_id("cmpl-"),
            created=now(),
            model=context.model_names[0] if request.model is None else request.model,
            n=n,
            num_top=request.logprobs,
            echoes=_echoes(context, request, prompts) if request.echo else (),
            offsets_after=lambda position, start: AnswerOffsets(
                context.tokenizer,
                prompts[position],
                skip_special_tokens=params.get("skip_special_tokens", True),
                start=start,
            ),
            drops_text=request.max_tokens == 0,
        )
        grammar = grammar_of(request)
        cache_extra = cache_extra_of(request.cache_salt)
        requests = [
            GenerateRequest(
                request_id=f"{format.id}-{number}",
                prompt_token_ids=token_ids,
                params=params,
                prompt_logprobs=request.logprobs if request.echo else None,
                grammar=grammar,
                cache_extra=cache_extra,
            )
            for number, token_ids in enumerate(prompts)
        ]
        clock.num_prompt_tokens = lengths = [len(token_ids) for token_ids in prompts]
        if request.stream:
            events = text_events(
                format,
                deltas_of(context.client, requests, clock=clock),
                usage=UsageCounter(lengths),
                includes_usage=request.includes_usage,
                num_prompts=len(prompts),
            )
            return EventStream(events)
        collected = await unless_gone(http.receive, collect_whole(context.client, requests, clock=clock, n=n))
        return json_reply(format.completion(collected))


def _echoes(context: ServeContext, request: CompletionRequest, prompts: list[list[int]]) -> list[Echo]:
    """Text prompts come back as they were sent; token ids as their text."""
    decode = context.tokenizer.decode if context.tokenizer is not None else None
    echoes = []
    for prompt, token_ids in zip(request.prompt, prompts, strict=True):
        first = decode(token_ids[:1], skip_special_tokens=False) if decode else f"token_id:{token_ids[0]}"
        text = prompt if isinstance(prompt, str) else decode(prompt) if decode else ""
        offsets: list[int] = []
        if request.logprobs is not None:
            offsets = prompt_offsets(
                context.tokenizer, token_ids, text, is_given_as_text=isinstance(prompt, str)
            )
        echoes.append(Echo(text=text, first_token=first, offsets=offsets))
    return echoes

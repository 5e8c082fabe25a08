"""``POST /v1/chat/completions``."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from gapless.serve.answers import UsageCounter, collect_whole
from gapless.serve.chat_format import ChatFormat, parser_for
from gapless.serve.chat_stream import chat_events
from gapless.serve.context import ServeContext, new_id, now
from gapless.serve.deltas import deltas_of, unless_gone
from gapless.serve.messages import GenerateRequest
from gapless.serve.metrics import RequestClock
from gapless.serve.prompts import cache_extra_of, check_ids, check_length, encode_chat
from gapless.serve.protocol.chat import ChatRequest, NamedTool
from gapless.serve.routes.direct import endpoint
from gapless.serve.routes.replies import json_reply
from gapless.serve.sampling import chat_params, forced_call_grammar, grammar_of
from gapless.serve.sse import EventStream
from gapless.serve.token_bytes import token_bytes_of
from gapless.serve.tools import NEEDS_SPECIAL_TOKENS


def add_routes(app: FastAPI, context: ServeContext) -> None:
    token_bytes = token_bytes_of(context.tokenizer)

    @endpoint(app, "/v1/chat/completions", ChatRequest, tag="generate")
    async def chat_completions(http: Request) -> Response:
        clock = RequestClock(context.metrics)
        request = await context.parse(http, ChatRequest)
        make_parser = parser_for(request, tool_format=context.tool_format)
        is_forced = request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)
        params = chat_params(
            request,
            defaults=context.sampling_defaults,
            max_n=context.settings.max_n,
            keeps_special_tokens=(
                make_parser is not None and not is_forced and context.tool_format in NEEDS_SPECIAL_TOKENS
            ),
        )
        adds_prompt = request.add_generation_prompt
        prompt = await encode_chat(
            context,
            request.messages,
            tools=request.tools if make_parser is not None else None,
            add_generation_prompt=not request.continue_final_message if adds_prompt is None else adds_prompt,
            continue_final_message=request.continue_final_message,
            variables=request.chat_template_kwargs,
            receive=http.receive,
        )
        request.messages.clear()  # images as text are megabytes, and an answer may take minutes
        token_ids = prompt.token_ids
        check_ids(context, token_ids, name="messages")
        check_length(context, len(token_ids), params, name="messages")
        n = params.get("n", 1)
        format = ChatFormat(
            id=new_id("chatcmpl-"),
            created=now(),
            model=context.model_names[0] if request.model is None else request.model,
            num_top=(request.top_logprobs or 0) if request.logprobs else None,
            make_parser=make_parser,
            names_its_function=isinstance(request.tool_choice, NamedTool),
            token_bytes=token_bytes,
        )
        generate = GenerateRequest(
            request_id=format.id,
            prompt_token_ids=token_ids,
            params=params,
            grammar=forced_call_grammar(request) or grammar_of(request),
            cache_extra=cache_extra_of(request.cache_salt),
            media=prompt.media,
        )
        clock.num_prompt_tokens = [len(token_ids)]
        if request.stream:
            events = chat_events(
                format,
                deltas_of(context.client, [generate], clock=clock),
                n=n,
                usage=UsageCounter([len(token_ids)]),
                includes_usage=request.includes_usage,
            )
            return EventStream(events)
        collected = await unless_gone(
            http.receive, collect_whole(context.client, [generate], clock=clock, n=n)
        )
        return json_reply(format.completion(collected))

"""Prompts of all kinds to token ids, checked against the model before anything reaches the engine.

Long texts are tokenised on a worker thread (the tokenizer's own code runs without Python's lock), so that one
long prompt does not hold up the streams of others. Read ``sampling.py`` for the other half of a request.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive

from gapless.errors import RequestError
from gapless.multimodal.items import MediaPrompt
from gapless.serve.context import ServeContext, TextTokenizer
from gapless.serve.deltas import unless_gone
from gapless.serve.errors import ApiError
from gapless.serve.media import PlacedPart, media_of
from gapless.serve.messages import Media
from gapless.serve.protocol.chat import Message, Tool

_INLINE_CHARS = 4096
"""About a millisecond of tokenising; a thread costs a tenth of it."""
_INLINE_MESSAGES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPrompt:
    """``token_ids`` holds a placeholder for every row that ``media`` becomes."""

    token_ids: list[int]
    media: Media | None = None


def need_tokenizer(context: ServeContext) -> TextTokenizer:
    if context.tokenizer is None:
        raise RequestError("this model has no tokenizer: send prompts as token ids to /v1/completions")
    return context.tokenizer


async def encode_prompt(
    context: ServeContext, prompt: str | list[int], *, name: str, add_special_tokens: bool
) -> list[int]:
    """Token ids of text or ids. ``name`` is the field at fault in errors. Raises ``ApiError``."""
    if isinstance(prompt, str):
        prompt = await encode_text(context, prompt, add_special_tokens=add_special_tokens)
    check_ids(context, prompt, name=name)
    return prompt


async def encode_prompts(
    context: ServeContext, prompts: Sequence[str | list[int]], *, name: str, add_special_tokens: bool
) -> list[list[int]]:
    """``encode_prompt`` of each. A request may have a thousand: others get their turn in between."""
    found: list[list[int]] = []
    for prompt in prompts:
        if found:
            await asyncio.sleep(0)
        found.append(await encode_prompt(context, prompt, name=name, add_special_tokens=add_special_tokens))
    return found


async def encode_text(context: ServeContext, text: str, *, add_special_tokens: bool) -> list[int]:
    tokenizer = need_tokenizer(context)
    if len(text) <= _INLINE_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


async def encode_chat(
    context: ServeContext,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: dict[str, Any] | None,
    receive: Receive,
    add_special_tokens: bool = False,
) -> ChatPrompt:
    """Render and encode; images and videos are prepared as long as the connection behind ``receive`` lasts.

    Raises ``ApiError`` with what the template says, or what is wrong with an image.
    """
    tokenizer = need_tokenizer(context)
    parts = list(media_of(messages))
    if parts and context.media is None:
        first = parts[0]
        raise ApiError(
            f"{first.name}: content parts of type {first.part.type!r} are not supported: this model reads "
            "text only",
            param=first.name,
            code="invalid_value",
        )
    options: dict[str, Any] = dict(variables or {})
    if context.settings.chat_template is not None:
        options["chat_template"] = context.settings.chat_template
    if tools:
        options["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    if continue_final_message:
        options["continue_final_message"] = True

    def render() -> str:
        return tokenizer.apply_chat_template(
            [message.for_template() for message in messages],
            add_generation_prompt=add_generation_prompt,
            **options,
        )

    try:
        text = render() if len(messages) <= _INLINE_MESSAGES else await asyncio.to_thread(render)
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
        # A template is a program over what the caller sent: what it cannot digest is the caller's to mend.
        if isinstance(error, RequestError):
            raise
        raise ApiError(
            f"the chat template refuses these messages: {error}", param="messages", code="invalid_value"
        ) from None
    token_ids = await encode_text(context, text, add_special_tokens=add_special_tokens)
    if not parts:
        return ChatPrompt(token_ids=token_ids)
    prompt = await unless_gone(receive, _with_media(context, token_ids, parts))
    return ChatPrompt(token_ids=list(prompt.token_ids), media=Media.of(prompt))


async def _with_media(
    context: ServeContext, token_ids: list[int], parts: Sequence[PlacedPart]
) -> MediaPrompt:
    assert context.media is not None
    try:
        return await context.media.prompt(token_ids, parts, max_tokens=context.client.info.max_model_len - 1)
    except RequestError as error:
        raise ApiError(str(error), param="messages", code="invalid_value") from None


def cache_extra_of(cache_salt: str | None) -> bytes:
    """What keeps a request's cached prefix apart: nothing, or a digest of the caller's salt."""
    return b"" if cache_salt is None else hashlib.sha256(cache_salt.encode()).digest()


def check_ids(context: ServeContext, token_ids: list[int], *, name: str) -> None:
    """Raises ``ApiError`` for an empty prompt or a token that the model does not have."""
    if not token_ids:
        raise ApiError(f"{name} is empty: at least one token is needed", param=name, code="invalid_value")
    vocab_size = context.client.info.vocab_size
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        shown = str(wrong) if abs(wrong) < 10**20 else "a number of many digits"
        raise ApiError(
            f"{name} has the token id {shown}: must be between 0 and {vocab_size - 1}",
            param=name,
            code="invalid_value",
        )


def check_length(context: ServeContext, num_prompt: int, params: dict[str, Any], *, name: str) -> None:
    """Raises ``ApiError`` unless the prompt, and as many tokens as were asked for, fit the model. (As many as
    the model's authors recommend need not: the answer then ends where the model does.)"""
    limit = context.client.info.max_model_len
    asked = params.get("max_tokens", 16)
    if num_prompt >= limit:
        raise ApiError(
            f"the prompt has {num_prompt} tokens, but the maximum context length is {limit} tokens, at least "
            "one of them generated; shorten it",
            param=name,
            code="context_length_exceeded",
        )
    is_asked = "max_tokens" in params and asked != context.sampling_defaults.get("max_tokens")
    if asked is not None and is_asked and num_prompt + asked > limit:
        raise ApiError(
            f"max_tokens={asked} and a prompt of {num_prompt} tokens exceed the maximum context length of "
            f"{limit} tokens; ask for at most {limit - num_prompt}",
            param="max_tokens",
            code="context_length_exceeded",
        )

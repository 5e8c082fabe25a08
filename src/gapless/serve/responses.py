"""Every body that leaves this server, as msgspec structs with OpenAI's exact names.

msgspec encodes a struct several times faster than pydantic, which matters where one is made for each streamed
token. Fields that are ``UNSET`` are left out of the JSON; None is written as null, where OpenAI writes null.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

ChatFinish = Literal["stop", "length", "tool_calls"]


class PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | UnsetType = UNSET
    prompt_tokens_details: PromptDetails | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class Function(msgspec.Struct, omit_defaults=True):
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET


class ToolCall(msgspec.Struct):
    id: str
    function: Function
    type: str = "function"


class ToolCallDelta(msgspec.Struct):
    index: int
    function: Function
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    finish_reason: ChatFinish
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    system_fingerprint: None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    stop_reason: str | int | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"
    system_fingerprint: None = None


class TextLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | UnsetType = UNSET


class TextCompletion(msgspec.Struct):
    """Also each event of a stream: plain completions have one shape for both."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"
    system_fingerprint: None = None


class EmbeddingData(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[EmbeddingData]
    usage: Usage
    object: str = "list"


class ModelCard(msgspec.Struct):
    id: str
    created: int
    root: str
    max_model_len: int
    input_modalities: list[str]
    """``text``, and ``image`` and ``video`` where they may stand in chats."""
    object: str = "model"
    owned_by: str = "gapless"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


class Tokens(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    prompt: str

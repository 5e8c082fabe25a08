"""``POST /v1/chat/completions``: messages, tools, and what to do with them.

Content is text, or parts of which those of a user may be images and videos (``media_parts.py``); other kinds
(audio, files) are refused by name. Arguments of earlier tool calls come as JSON text and reach the template
as objects, which is what templates expect.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from gapless.serve.protocol.common import (
    IGNORED,
    PARTS_BRANCH,
    TEXT_BRANCH,
    FieldError,
    FirstFault,
    Strict,
)
from gapless.serve.protocol.generation import NEUTRAL, GenerationRequest
from gapless.serve.protocol.media_parts import ContentPart

Role = Literal["system", "developer", "user", "assistant", "tool"]

RESERVED_TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "documents", "chat_template", "conversations", "return_assistant_tokens_mask"}
    | {"add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "self"}
)
"""Variables that a request may not set through ``chat_template_kwargs``: they have fields of their own, or
are no variables in Python."""


Content = Annotated[
    Annotated[str, Tag(TEXT_BRANCH)] | Annotated[FirstFault[ContentPart], Tag(PARTS_BRANCH)],
    Discriminator(lambda value: PARTS_BRANCH if isinstance(value, list) else TEXT_BRANCH),
]
"""Told apart by its type first, so that what is wrong with a part is told, not that a list is no text."""


class FunctionCall(Strict):
    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, value: str) -> str:
        try:
            parsed = json.loads(value or "{}")
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise ValueError("arguments of a tool call must be a JSON object, as text")
        return value or "{}"


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """Streamed calls have one; it says nothing more here."""


class Message(Strict):
    role: Role
    content: Content | None = None
    name: str | None = None
    tool_calls: FirstFault[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None
    """Part of answers, so it comes back in a history; without effect."""

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> Message:
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"tool_calls belong to messages of the assistant, not to role {self.role!r}")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(f"tool_call_id belongs to messages of a tool, not to role {self.role!r}")
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message with role {self.role!r} needs content")
        if self.role != "user" and any(True for _ in self.media_parts()):
            raise ValueError(f"images and videos belong to messages of a user, not to role {self.role!r}")
        return self

    def media_parts(self) -> Iterator[tuple[int, ContentPart]]:
        """Images and videos among the parts, with their positions."""
        if isinstance(self.content, list):
            yield from ((i, part) for i, part in enumerate(self.content) if part.media_kind is not None)

    def for_template(self) -> dict[str, Any]:
        """What chat templates read: content as one string, or as parts where there are images; arguments as
        objects."""
        content: Any = self.content
        if any(True for _ in self.media_parts()):
            content = [part.for_template() for part in content]
        elif isinstance(content, list):
            content = "\n".join(part.content for part in content)
        if content is None and self.refusal is not None:
            content = self.refusal
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": "" if content is None else content,
        }
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": json.loads(call.function.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        return message


class FunctionDefinition(Strict):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Arguments keep to the schema whenever a call is forced (``required`` or a named function)."""


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerationRequest):
    ignored: ClassVar[tuple[str, ...]] = tuple(IGNORED)
    neutral: ClassVar[tuple[str, ...]] = (
        *NEUTRAL,
        "functions",
        "function_call",
        "modalities",
        "audio",
        "prediction",
        "moderation",
        "reasoning_effort",
        "verbosity",
        "web_search_options",
        "documents",
        "mm_processor_kwargs",
        "chat_template",
        "include_reasoning",
    )

    messages: FirstFault[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: FirstFault[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """Left out: ``auto`` with tools, ``none`` without."""
    parallel_tool_calls: bool = True
    """False: at most one call in an answer."""
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _chat_options_fit_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs needs logprobs true")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise FieldError("max_tokens", "max_tokens and max_completion_tokens mean the same: give one")
        if self.continue_final_message and self.add_generation_prompt:
            raise FieldError(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other",
            )
        reserved = sorted(RESERVED_TEMPLATE_NAMES & set(self.chat_template_kwargs or {}))
        if reserved:
            raise FieldError(
                "chat_template_kwargs", f"chat_template_kwargs may not set {', '.join(reserved)}"
            )
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names: set[str] = set()
        for tool in self.tools or []:
            if tool.function.name in names:
                raise FieldError("tools", f"tools has two functions with the name {tool.function.name!r}")
            names.add(tool.function.name)
        if self.tool_choice in (None, "none"):
            return
        if not names:
            raise FieldError("tool_choice", "tool_choice needs tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise FieldError(
                "tool_choice", f"tool_choice names {self.tool_choice.function.name!r}, which is not in tools"
            )
        if self.tool_choice == "auto":
            return  # the format binds the text, and calls in it are found as always
        has_grammar = self.structured_outputs is not None or self.regex is not None
        if has_grammar or (self.response_format is not None and self.response_format.type != "text"):
            raise FieldError(
                "tool_choice",
                "tool_choice forces a call, so no other format can bind the answer: give only one",
            )

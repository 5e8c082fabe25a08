"""``POST /tokenize`` and ``POST /detokenize``, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from gapless.serve.protocol.chat import RESERVED_TEMPLATE_NAMES, Message, Tool
from gapless.serve.protocol.common import EndpointRequest, FieldError, FirstFault


class TokenizeRequest(EndpointRequest):
    """Text (``prompt``) or a chat (``messages``)."""

    prompt: str | None = None
    messages: FirstFault[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    """Left out: true for text, false for chats, whose template has them."""
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: FirstFault[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _text_or_chat(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, one of them")
        if self.continue_final_message and "add_generation_prompt" not in self.model_fields_set:
            self.add_generation_prompt = False
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
        return self


class DetokenizeRequest(EndpointRequest):
    tokens: FirstFault[int]

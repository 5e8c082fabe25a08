"""What a chat answer looks like: ids and names, which tool-call parser reads it, how it ends.

``ChatFormat`` is made from a checked request; the streamed and the whole answer are built from the same one.
Read ``chat_stream.py`` next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from gapless.serve.answers import Choice, Collected
from gapless.serve.errors import ApiError
from gapless.serve.logprobs import chat_logprobs
from gapless.serve.messages import TokenLogprob
from gapless.serve.protocol.chat import ChatRequest, NamedTool
from gapless.serve.responses import (
    ChatChoice,
    ChatCompletion,
    ChatFinish,
    ChatLogprobs,
    ChatMessage,
    Function,
    ToolCall,
)
from gapless.serve.token_bytes import TokenBytes
from gapless.serve.tools import PARSERS
from gapless.serve.tools.base import FirstCallOnly, Piece, TextPassage, ToolParser
from gapless.serve.tools.call_list import NamedParser, RequiredParser

MakeParser = Callable[[], ToolParser]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatFormat:
    """``num_top``: None without log-probabilities. ``make_parser``: None where all text is content."""

    id: str
    created: int
    model: str
    num_top: int | None
    make_parser: MakeParser | None
    names_its_function: bool
    """Such a call ends with ``stop``, as OpenAI documents it."""
    token_bytes: TokenBytes

    def logprobs(self, tokens: Sequence[Sequence[TokenLogprob]]) -> ChatLogprobs | None:
        """None where they were not asked for."""
        if self.num_top is None:
            return None
        return chat_logprobs(tokens, num_top=self.num_top, token_bytes=self.token_bytes)

    def finish_reason(self, reason: str | None, *, has_calls: bool) -> ChatFinish:
        if reason == "length":
            return "length"
        return "tool_calls" if has_calls and not self.names_its_function else "stop"

    def completion(self, collected: Collected) -> ChatCompletion:
        choices = [self._choice(index, choice) for index, choice in enumerate(collected.choices[0])]
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=collected.usage.usage(),
        )

    def _choice(self, index: int, choice: Choice) -> ChatChoice:
        content, calls = choice.text, list[ToolCall]()
        if self.make_parser is not None:
            parser = self.make_parser()
            content, calls = _assemble([*parser.feed(choice.text), *parser.finish()])
        return ChatChoice(
            index=index,
            message=ChatMessage(content=content if content or not calls else None, tool_calls=calls or UNSET),
            finish_reason=self.finish_reason(choice.finish_reason, has_calls=bool(calls)),
            logprobs=None if self.num_top is None else self.logprobs(choice.logprobs),
            stop_reason=UNSET if choice.stop_reason is None else choice.stop_reason,
        )


def parser_for(request: ChatRequest, *, tool_format: str | None) -> MakeParser | None:
    """Raises ``ApiError`` when the model has no format for the calls it may make."""
    if not request.tools or request.tool_choice == "none":
        return None
    make: MakeParser
    if isinstance(request.tool_choice, NamedTool):
        name = request.tool_choice.function.name
        return lambda: NamedParser(name)
    if request.tool_choice == "required":
        make = RequiredParser
    elif tool_format is None:
        raise ApiError(
            "how this model writes tool calls is not known: set tool_choice to 'required', to a function or "
            "to 'none', or start the server with --tool-call-parser",
            param="tools",
            code="unsupported_value",
        )
    else:
        make = PARSERS[tool_format]
    if request.parallel_tool_calls:
        return make
    return lambda: FirstCallOnly(make())


def _assemble(pieces: list[Piece]) -> tuple[str, list[ToolCall]]:
    content: list[str] = []
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, TextPassage):
            content.append(piece.text)
        elif piece.id is not None:
            calls.append({"id": piece.id, "name": piece.name, "arguments": [piece.arguments]})
        else:
            calls[piece.call]["arguments"].append(piece.arguments)
    return "".join(content), [
        ToolCall(id=call["id"], function=Function(name=call["name"], arguments="".join(call["arguments"])))
        for call in calls
    ]

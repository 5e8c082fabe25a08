"""A chat answer as events. Per token of plain content it costs one encoding.

Order within a choice, as OpenAI has it: the role, then content and calls as they come, then an empty delta
with the reason of the end; after all choices the usage, if asked for. Invariant: content, names and arguments
put together are those of the whole answer, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from gapless.serve.answers import UsageCounter
from gapless.serve.chat_format import ChatFormat
from gapless.serve.deltas import Deltas
from gapless.serve.messages import Delta
from gapless.serve.responses import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    Function,
    ToolCallDelta,
    Usage,
)
from gapless.serve.sse import Events, TextEvent, event
from gapless.serve.tools.base import Piece, TextPassage, ToolParser


async def chat_events(
    format: ChatFormat, deltas: Deltas, *, n: int, usage: UsageCounter, includes_usage: bool
) -> Events:
    """Raises what ``deltas`` raises."""
    choices = [_Choice(format, index) for index in range(n)]
    no_usage = None if includes_usage else UNSET
    try:
        async for position, items in deltas:
            events: list[bytes] = []
            for delta in items:
                usage.add(position, delta)
                choice = choices[delta.index]
                if choice.is_plain(delta):
                    if delta.text:
                        events.append(choice.plain_event(delta.text, no_usage))
                    continue
                for part in choice.chunks(delta):
                    events.append(event(_chunk(format, [part], no_usage)))
            if events:
                yield b"".join(events)
    finally:
        await deltas.aclose()
    if includes_usage:
        yield event(_chunk(format, [], usage.usage()))


def _chunk(format: ChatFormat, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
    return ChatChunk(id=format.id, created=format.created, model=format.model, choices=choices, usage=usage)


class _Choice:
    """What one choice has sent so far."""

    def __init__(self, format: ChatFormat, index: int) -> None:
        self._format, self._index = format, index
        self._parser: ToolParser | None = None if format.make_parser is None else format.make_parser()
        self._has_role = self._has_calls = False
        self._plain: TextEvent | None = None

    def is_plain(self, delta: Delta) -> bool:
        """Whether its event differs from others in its content only."""
        is_content = self._parser is None and self._has_role
        return is_content and not delta.logprobs and delta.finish_reason is None

    def plain_event(self, text: str, no_usage: UnsetType | None) -> bytes:
        if self._plain is None:
            choice = ChatChunkChoice(index=self._index, delta=ChatDelta(content=""))
            self._plain = TextEvent(_chunk(self._format, [choice], no_usage), "content")
        return self._plain.of(text)

    def chunks(self, delta: Delta) -> Iterator[ChatChunkChoice]:
        index = self._index
        if not self._has_role:
            self._has_role = True
            yield ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
        logprobs: ChatLogprobs | None = None
        if delta.logprobs:
            logprobs = self._format.logprobs(delta.logprobs)
        if self._parser is None:
            if delta.text or logprobs is not None:
                yield ChatChunkChoice(index=index, delta=ChatDelta(content=delta.text), logprobs=logprobs)
        else:
            pieces = self._parser.feed(delta.text)
            if delta.finish_reason is not None:
                pieces += self._parser.finish()
            if not pieces and logprobs is not None:
                yield ChatChunkChoice(index=index, delta=ChatDelta(), logprobs=logprobs)
            for piece in pieces:
                self._has_calls = self._has_calls or not isinstance(piece, TextPassage)
                yield ChatChunkChoice(index=index, delta=_delta_of(piece), logprobs=logprobs)
                logprobs = None
        if delta.finish_reason is not None:
            yield ChatChunkChoice(
                index=index,
                delta=ChatDelta(),
                finish_reason=self._format.finish_reason(delta.finish_reason, has_calls=self._has_calls),
                stop_reason=UNSET if delta.stop_reason is None else delta.stop_reason,
            )


def _delta_of(piece: Piece) -> ChatDelta:
    if isinstance(piece, TextPassage):
        return ChatDelta(content=piece.text)
    if piece.id is None:
        call = ToolCallDelta(index=piece.call, function=Function(arguments=piece.arguments))
    else:
        function = Function(name=piece.name or "", arguments=piece.arguments)
        call = ToolCallDelta(index=piece.call, id=piece.id, type="function", function=function)
    return ChatDelta(tool_calls=[call])

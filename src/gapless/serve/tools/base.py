"""What every tool-call parser does: text goes in as it is generated, passages and calls come out.

A streamed and a whole answer go through the same parser, and what comes out does not depend on where the text
was split; so both have the same content, names and arguments, to the byte. Arguments are the model's own
characters, never parsed and written again. A call is announced once its name and the beginning of its
arguments are known; text that looked like a call until then and turns out to be none is content. Read
``json_call.py`` for the part all formats share.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple, Protocol

from gapless.serve.tools.json_call import JsonCall

ID_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


class TextPassage(NamedTuple):
    """Content: text outside of calls."""

    text: str


class ToolDelta(NamedTuple):
    """Part of call number ``call``. The first of a call has ``id`` and ``name``; arguments are appended."""

    call: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Piece = TextPassage | ToolDelta


class ToolParser(Protocol):
    def feed(self, text: str) -> list[Piece]:
        """What is certain now."""

    def finish(self) -> list[Piece]:
        """The rest; nothing follows."""


class CallNumbers:
    """Gives each call of one answer its index and id, and keeps content clear of space around calls."""

    def __init__(self, *, id_length: int = 24, id_prefix: str = "call_") -> None:
        self.num_calls = 0
        self._id_length, self._id_prefix = id_length, id_prefix
        self._space = ""
        """White space that is content only if more content follows directly."""

    def start(self, name: str) -> ToolDelta:
        """Space before a call belongs to the format, not to the content."""
        self._space = ""
        self.num_calls += 1
        suffix = "".join(secrets.choice(ID_ALPHABET) for _ in range(self._id_length))
        return ToolDelta(call=self.num_calls - 1, id=self._id_prefix + suffix, name=name)

    def arguments(self, text: str) -> ToolDelta:
        return ToolDelta(call=self.num_calls - 1, arguments=text)

    def read(self, call: JsonCall, text: str) -> list[Piece]:
        """Feed ``text`` to ``call``; returns what is certain now. ``call.used`` tells what was its own."""
        call.feed(text)
        pieces: list[Piece] = []
        if call.can_start and not call.has_failed and not call.has_started:
            call.has_started = True
            pieces.append(self.start(call.name or ""))
        if call.has_started:
            arguments = call.take_arguments()
            if arguments:
                pieces.append(self.arguments(arguments))
        return pieces

    def content(self, text: str) -> list[Piece]:
        """``text`` as content, less white space at its end, which is held back."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return [TextPassage(kept)] if kept else []

    def finish(self) -> list[Piece]:
        space, self._space = self._space, ""
        return [TextPassage(space)] if space and not self.num_calls else []


class FirstCallOnly:
    """A parser whose answer has one call at most (``parallel_tool_calls`` false)."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[Piece]:
        return [piece for piece in self._parser.feed(text) if _is_first(piece)]

    def finish(self) -> list[Piece]:
        return [piece for piece in self._parser.finish() if _is_first(piece)]


def _is_first(piece: Piece) -> bool:
    return isinstance(piece, TextPassage) or piece.call == 0


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``marker``."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0

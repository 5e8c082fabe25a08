"""Hermes' and Qwen's format: each call between ``<tool_call>`` and ``</tool_call>``, content around them."""

from __future__ import annotations

from gapless.serve.tools.base import CallNumbers, Piece, held_back
from gapless.serve.tools.json_call import JsonCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """One state at a time: content, inside a call, or between a call's brace and its closing tag."""

    def __init__(self) -> None:
        self._numbers = CallNumbers()
        self._text = ""
        """Not decided yet."""
        self._call: JsonCall | None = None

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        while self._text and self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._call is None:
            pieces += self._numbers.content(self._text)
        elif not self._call.has_started:
            pieces += self._numbers.content(_OPEN + self._call.raw + self._text)
        self._text = ""
        return pieces + self._numbers.finish()

    def _step(self, pieces: list[Piece]) -> bool:
        """Decide about the beginning of ``_text``; False when more text is needed."""
        if self._call is None:
            return self._read_content(pieces)
        if self._call.is_done:
            return self._read_close()
        call = self._call
        pieces += self._numbers.read(call, self._text)
        self._text = self._text[call.used :]
        if call.has_failed:
            if not call.has_started:
                pieces += self._numbers.content(_OPEN + call.raw)
            self._call = None
        return True

    def _read_content(self, pieces: list[Piece]) -> bool:
        before, tag, after = self._text.partition(_OPEN)
        if tag:
            pieces += self._numbers.content(before)
            self._text, self._call = after, JsonCall()
            return True
        kept = held_back(self._text, _OPEN)
        end = len(self._text) - kept
        pieces += self._numbers.content(self._text[:end])
        self._text = self._text[end:]
        return False

    def _read_close(self) -> bool:
        """A missing closing tag is forgiven."""
        text = self._text.lstrip()
        if len(text) < len(_CLOSE) and _CLOSE.startswith(text):
            return False
        self._text, self._call = text.removeprefix(_CLOSE), None
        return True

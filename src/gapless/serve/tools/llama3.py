"""Llama 3's format: the whole answer is ``{"name": …, "parameters": {…}}``, several separated by ``;``.

``<|python_tag|>`` may stand before it. An answer that begins with anything else is content to its end, and so
is JSON that turns out to have no name.
"""

from __future__ import annotations

from gapless.serve.tools.base import CallNumbers, Piece
from gapless.serve.tools.json_call import JsonCall

_TAG = "<|python_tag|>"


class Llama3Parser:
    def __init__(self) -> None:
        self._numbers = CallNumbers()
        self._text = ""
        self._prefix = ""
        """Text before the current object, for the case that it is no call."""
        self._call: JsonCall | None = None
        self._is_content = False

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        while self._text and self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._call is not None and not self._call.has_started:
            pieces += self._numbers.content(self._prefix + self._call.raw)
        elif self._call is None and not self._is_content:
            pieces += self._numbers.content(self._prefix + self._text)
        return pieces + self._numbers.finish()

    def _step(self, pieces: list[Piece]) -> bool:
        if self._is_content:
            pieces += self._numbers.content(self._text)
            self._text = ""
            return False
        if self._call is None:
            return self._look_for_call(pieces)
        call = self._call
        pieces += self._numbers.read(call, self._text)
        self._text = self._text[call.used :]
        if call.has_failed:
            if not call.has_started:
                pieces += self._numbers.content(self._prefix + call.raw)
            self._is_content, self._call = True, None
        elif call.is_done:
            self._prefix, self._call = "", None
        return True

    def _look_for_call(self, pieces: list[Piece]) -> bool:
        """Space, separators and the tag may come before a brace; anything else makes all of it content."""
        skipped = 0
        separators = " \t\r\n;," if self._numbers.num_calls else " \t\r\n"
        while skipped < len(self._text) and self._text[skipped] in separators:
            skipped += 1
        self._prefix += self._text[:skipped]
        self._text = self._text[skipped:]
        if self._text.startswith("{"):
            self._call = JsonCall()
            return True
        if self._text.startswith(_TAG):
            self._prefix += _TAG
            self._text = self._text[len(_TAG) :]
            return True
        if _TAG.startswith(self._text):
            return False
        self._is_content = True
        self._text, self._prefix = self._prefix + self._text, ""
        return True

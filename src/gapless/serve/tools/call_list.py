"""Calls as a JSON list, ``[{"name": …, "arguments": {…}}, …]``, and the two forms of forced calls.

``CallList`` is a part of Mistral's format and the whole answer when some call is ``required``; there a
grammar makes the list right, so that a list cut short is the only thing that can be wrong with it.
"""

from __future__ import annotations

from gapless.serve.tools.base import CallNumbers, Piece, TextPassage
from gapless.serve.tools.json_call import JsonCall


class CallList:
    """Reads from the opening bracket to the closing one. ``rest`` is the text after the list."""

    def __init__(self, numbers: CallNumbers) -> None:
        self._numbers = numbers
        self._call: JsonCall | None = None
        self._opened = False
        self._num_before = numbers.num_calls
        self.raw = ""
        """The text of a list in which no call has been found so far."""
        self.rest = ""
        self.is_done = False

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text and not self.is_done:
            text = self._read_between(text) if self._call is None else self._read_call(text, pieces)
        self.rest = text
        return pieces

    def leftover(self) -> str:
        """Text that belongs to no call, when the list ended or broke without any."""
        return self.raw if self._numbers.num_calls == self._num_before else ""

    def _read_call(self, text: str, pieces: list[Piece]) -> str:
        call = self._call
        assert call is not None
        pieces += self._numbers.read(call, text)
        self.raw += text[: call.used]
        if call.has_failed:
            self.is_done = True
        if call.is_done or call.has_failed:
            self._call = None
        return text[call.used :]

    def _read_between(self, text: str) -> str:
        character = text[0]
        if character == "{" and self._opened:
            self._call = JsonCall()
            return text
        self.raw += character
        if character == "[" and not self._opened:
            self._opened = True
        elif character not in " \t\r\n,":  # the closing bracket, or what belongs in no list
            self.is_done = True
        return text[1:]


class RequiredParser:
    """The answer is a list of calls."""

    def __init__(self) -> None:
        self._numbers = CallNumbers()
        self._calls = CallList(self._numbers)

    def feed(self, text: str) -> list[Piece]:
        if self._calls.is_done:
            return []
        return self._calls.feed(text)

    def finish(self) -> list[Piece]:
        leftover = self._calls.leftover()
        return [TextPassage(leftover)] if leftover else []


class NamedParser:
    """The answer is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers = CallNumbers()

    def feed(self, text: str) -> list[Piece]:
        if not text:
            return []
        start: list[Piece] = [] if self._numbers.num_calls else [self._numbers.start(self._name)]
        return [*start, self._numbers.arguments(text)]

    def finish(self) -> list[Piece]:
        return [] if self._numbers.num_calls else [self._numbers.start(self._name)]

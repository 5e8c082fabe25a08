"""Mistral's format: after ``[TOOL_CALLS]`` a JSON list of calls, or (newer models) ``name{…}`` for each.

The marker is a special token, so a request with tools keeps special tokens in its text. Ids have nine
characters, the only length that Mistral's templates accept back.
"""

from __future__ import annotations

from gapless.serve.tools.base import CallNumbers, Piece, held_back
from gapless.serve.tools.call_list import CallList
from gapless.serve.tools.json_call import JsonCall

_MARKER, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_MAX_NAME_CHARS = 200


class MistralParser:
    def __init__(self) -> None:
        self._numbers = CallNumbers(id_length=9, id_prefix="")
        self._text = ""
        self._is_marked = False
        """Behind a marker; what it introduces is not known yet."""
        self._list: CallList | None = None
        self._call: JsonCall | None = None
        self._name = ""

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        while self._text and self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._list is not None:
            pieces += self._leave_list()
        elif self._call is not None:
            if not self._call.has_started:
                pieces += self._numbers.content(_MARKER + self._name + self._call.raw)
        elif self._is_marked:
            pieces += self._numbers.content(_MARKER + self._text)
        else:
            pieces += self._numbers.content(self._text)
        self._text = ""
        return pieces + self._numbers.finish()

    def _step(self, pieces: list[Piece]) -> bool:
        if self._list is not None:
            pieces += self._list.feed(self._text)
            self._text = self._list.rest
            if self._list.is_done:
                pieces += self._leave_list()
            return True
        if self._call is not None:
            self._read_arguments(self._call, pieces)
            return True
        return self._read_marked(pieces) if self._is_marked else self._read_content(pieces)

    def _read_content(self, pieces: list[Piece]) -> bool:
        before, marker, after = self._text.partition(_MARKER)
        if marker:
            pieces += self._numbers.content(before)
            self._text, self._is_marked = after, True
            return True
        end = len(self._text) - held_back(self._text, _MARKER)
        pieces += self._numbers.content(self._text[:end])
        self._text = self._text[end:]
        return False

    def _read_marked(self, pieces: list[Piece]) -> bool:
        text = self._text.lstrip()
        if text.startswith("["):
            self._list, self._is_marked = CallList(self._numbers), False
            return True
        name, brace, _ = text.partition("{")
        if brace:
            self._name = self._text[: self._text.index("{")]
            self._text = self._text[len(self._name) :]
            self._call = JsonCall(name=_function_name(name))
            self._is_marked = False
            return True
        if len(text) > _MAX_NAME_CHARS or _MARKER in text:
            pieces += self._numbers.content(_MARKER)
            self._is_marked = False
            return True
        return False

    def _read_arguments(self, call: JsonCall, pieces: list[Piece]) -> None:
        pieces += self._numbers.read(call, self._text)
        self._text = self._text[call.used :]
        if call.has_failed and not call.has_started:
            pieces += self._numbers.content(_MARKER + self._name + call.raw)
        if call.is_done or call.has_failed:
            self._call = None

    def _leave_list(self) -> list[Piece]:
        assert self._list is not None
        leftover = self._list.leftover()
        self._list = None
        return self._numbers.content(_MARKER + leftover) if leftover else []


def _function_name(head: str) -> str | None:
    """Of ``name``, ``name[ARGS]`` or ``name[CALL_ID]id[ARGS]``; None where an object with a name follows."""
    return head.strip().removesuffix(_ARGS).partition(_CALL_ID)[0].strip() or None

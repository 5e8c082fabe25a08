"""One call as a JSON object, ``{"name": …, "arguments": {…}}``, read piece by piece.

Only the object's own level is understood: keys in any order, ``parameters`` for ``arguments``, other keys
passed over. The value of the arguments is handed on as it stands, from its first character to its closing
brace. Arguments that the model wrote as JSON text inside a string are unpacked. Invariant: after ``feed``,
``used`` says how many characters of the text belonged to the object, whatever the split.
"""

from __future__ import annotations

import json
from typing import Literal

_SPACE = " \t\n\r"
_ARGUMENT_KEYS = ("arguments", "parameters")
_State = Literal["start", "key", "colon", "value", "inside", "comma", "done", "failed"]


class JsonCall:
    """``name`` gives the name where the format writes it outside the object: then only arguments are read."""

    def __init__(self, *, name: str | None = None) -> None:
        self.name = name
        self.raw = ""
        """Everything read so far, for the case that it is no call after all."""
        self.used = 0
        self.has_started = False
        """It has been announced: what follows can no longer be content."""
        self._is_bare = name is not None
        self._state: _State = "value" if self._is_bare else "start"
        self._key = "arguments" if self._is_bare else ""
        self._part: list[str] = []
        """Characters of the key or value being read."""
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._is_scalar = False
        self._fresh: list[str] = []
        """Characters of the arguments not taken yet."""
        self._has_arguments = False

    @property
    def is_done(self) -> bool:
        return self._state == "done"

    @property
    def has_failed(self) -> bool:
        return self._state == "failed"

    @property
    def can_start(self) -> bool:
        """The call has a name, and arguments that began or that never will."""
        return bool(self.name) and (self._has_arguments or self.is_done)

    def feed(self, text: str) -> None:
        for position, character in enumerate(text):
            self._read(character)
            if self._state in ("done", "failed"):
                self.used = position + 1
                break
        else:
            self.used = len(text)
        self.raw += text[: self.used]

    def take_arguments(self) -> str:
        """What has come of the arguments since the last call of this."""
        text = "".join(self._fresh)
        self._fresh.clear()
        if self.is_done and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        return text

    def _read(self, character: str) -> None:
        if self._state == "inside":
            self._read_inside(character)
        elif character in _SPACE:
            return
        elif self._state == "start":
            self._state = "key" if character == "{" else "failed"
        elif self._state == "key":
            if character == "}" and not self._key:
                self._close_object()
            elif character == '"':
                self._key = ""
                self._begin(character)
            else:
                self._state = "failed"
        elif self._state == "colon":
            self._state = "value" if character == ":" else "failed"
        elif self._state == "value":
            self._begin(character)
        elif self._state == "comma":
            if character == "}":
                self._close_object()
            else:
                self._state = "key" if character == "," else "failed"

    def _begin(self, character: str) -> None:
        """First character of a key or a value."""
        is_arguments = self._key in _ARGUMENT_KEYS
        if is_arguments and (character == "[" or self._has_arguments):
            self._state = "failed"  # arguments have names, and come once
            return
        if character in ",:}]":
            self._state = "failed"
            return
        self._state = "inside"
        self._in_string = character == '"'
        self._depth = int(character in "{[")
        self._is_scalar = not self._in_string and not self._depth
        self._part = [character]
        if self._streams:
            self._has_arguments = True
            self._fresh.append(character)

    def _read_inside(self, character: str) -> None:
        if self._is_scalar and (character in _SPACE or character in ",}]"):
            self._end_value()
            if self._state == "comma":
                self._read(character)
            return
        if self._streams:
            self._fresh.append(character)
        else:
            self._part.append(character)
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = False
                if self._depth == 0:
                    self._end_value()
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()

    @property
    def _streams(self) -> bool:
        return self._key in _ARGUMENT_KEYS and bool(self._part) and self._part[0] == "{"

    def _end_value(self) -> None:
        part = "".join(self._part)
        if not self._key:
            key = _string(part)
            self._key = key or ""
            self._state = "colon" if key else "failed"
            return
        self._state = "done" if self._is_bare else "comma"
        if self._key == "name":
            self.name = _string(part)
            if not self.name:
                self._state = "failed"
        elif self._key in _ARGUMENT_KEYS and part[0] != "{":
            self._take_packed(part)
        self._key, self._part = "", []

    def _take_packed(self, part: str) -> None:
        """Arguments in a string; null stands for none."""
        if part == "null":
            return
        text = (_string(part) or "").strip()
        if not text.startswith("{"):
            self._state = "failed"
            return
        self._has_arguments = True
        self._fresh.append(text)

    def _close_object(self) -> None:
        self._state = "done" if self.name else "failed"


def _string(literal: str) -> str | None:
    """The text of a JSON string that can be sent on; None for anything else."""
    try:
        value = json.loads(literal)
        if isinstance(value, str):
            value.encode()
            return value
    except ValueError:  # UnicodeEncodeError is one
        return None
    return None

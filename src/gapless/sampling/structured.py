"""What the text of an answer must look like: a JSON schema, any JSON object, one of several texts, a regular
expression, or a grammar.

Names and meaning are vLLM's. Only the form is checked here; whether a schema or an expression can be used is
found when it is compiled (``engine/grammar.py``, which to read next).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gapless.errors import RequestError

GrammarKind = Literal["json_schema", "json_object", "regex", "ebnf"]
_FIELDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputsParams:
    """Exactly one field is given. Raises ``RequestError`` naming the field.

    ``json``: a JSON schema, as a dict or as its text. ``choice``: the answer is one of these texts.
    ``grammar``: EBNF as xgrammar reads it; the first rule is called ``root``. The whole answer matches, from
    its first character to its last.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise RequestError(f"structured_outputs.json_object={self.json_object!r}: must be True or False")
        given = [name for name in _FIELDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            told = " and ".join(given) if given else "none of them is given"
            raise RequestError(f"structured_outputs takes exactly one of {', '.join(_FIELDS)}; here {told}")
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise RequestError(f"structured_outputs.{name}={text!r}: must be a non-empty string")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    @property
    def kind(self) -> GrammarKind:
        if self.json is not None:
            return "json_schema"
        if self.regex is not None:
            return "regex"
        return "json_object" if self.json_object else "ebnf"

    @property
    def text(self) -> str:
        """The schema, the expression or the grammar; empty for any JSON object."""
        if self.choice is not None:
            return "root ::= " + " | ".join(_quoted(text) for text in self.choice)
        text = self.json or self.regex or self.grammar or ""
        assert isinstance(text, str)
        return text


def _schema_text(schema: object) -> str:
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping):
        raise RequestError(f"structured_outputs.json={schema!r}: must be a JSON schema, as a dict or as text")
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.json is not a JSON schema: {error}") from None


def _choices(choices: object) -> tuple[str, ...]:
    texts = tuple(choices) if isinstance(choices, Iterable) and not isinstance(choices, str) else ()
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(
            f"structured_outputs.choice={choices!r}: must be a list of at least one non-empty string"
        )
    return texts


def _quoted(text: str) -> str:
    """As an EBNF string, which has JSON's escapes."""
    return json.dumps(text, ensure_ascii=False)

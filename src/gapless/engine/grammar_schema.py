"""JSON schemas before they are compiled: what the compiler would pass over in silence is refused by name.

xgrammar ignores keywords that it does not know, and answers would break them; it also takes minutes for
schemas that are nested hundreds of levels deep. One walk over the schema finds both. ``additionalProperties``
keeps its standard default (anything may be added) only where an object names no properties: a model that may
invent further fields at every comma rarely finds an end. Invariant: every text that fits a schema which
leaves here is JSON and valid; the one exception is ``oneOf``, which is read as ``anyOf`` where its branches
overlap. Read ``grammar.py`` next.
"""

from __future__ import annotations

import json
import re
from typing import Any

from gapless.errors import RequestError

MAX_NESTING = 64
"""Levels of schemas inside schemas; compiling takes the cube of it (30 ms here, a minute at 1,000)."""

_UNSUPPORTED = (
    *("not", "if", "then", "else", "multipleOf", "uniqueItems", "contains", "minContains", "maxContains"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
)
_HARMLESS: dict[str, tuple[Any, ...]] = {"uniqueItems": (False,), "dependentRequired": ({},), "then": ({},)}
"""Values with which an unsupported keyword demands nothing."""
_COMPOSERS = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_CONSTRAINTS = frozenset(
    (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems", "minLength"),
        *("maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    )
)
_LOOSE_CHARACTER, _JSON_CHARACTER = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\]"
"""As printed grammars write them; inside of a string every backslash would be doubled."""
_ESCAPE_RULE = re.compile(r"^(basic_escape(?:_\d+)?) ::= .*$", re.MULTILINE)
_HEX = "[0-9A-Fa-f]"
_WHOLE_ESCAPE = (
    r'[\"\\/bfnrt] | "u" '
    f"([0-9A-Ca-cEFef] {_HEX} {_HEX} {_HEX} | [Dd] [0-7] {_HEX} {_HEX} | "
    f'[Dd] [89ABab] {_HEX} {_HEX} "\\\\u" [Dd] [C-Fc-f] {_HEX} {_HEX})'
)
_ESCAPE = re.compile(r"\\x([0-9A-Fa-f]{2})|\\.", re.DOTALL)
_PATTERN_PART = re.compile(r"\[\^|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\.|.|\\", re.DOTALL)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SCHEMAS = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems")


def prepare_schema(text: str) -> str:
    """The schema as it is compiled. Raises ``RequestError`` naming keyword and place."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise RequestError(f"the JSON schema is not JSON: {reason}") from None
    if not isinstance(schema, dict):
        raise RequestError(f"the JSON schema must be an object, not {text[:40]}")
    return json.dumps(_prepare(schema, "#", 1), ensure_ascii=False)


def close_gaps(grammar: str) -> str:
    """The printed grammar of a schema, to be read again, without what is no JSON or no text: the compiler's
    rule for strings of a limited length lets control characters through, and the one for escapes halves of a
    surrogate pair, which strict readers refuse (both seen in xgrammar 0.2.9).

    Printed escapes of two digits become four, for the reader takes a letter behind them for a third digit.
    """
    closed = _ESCAPE_RULE.sub(lambda match: f"{match[1]} ::= {_WHOLE_ESCAPE}", grammar)
    closed = closed.replace(_LOOSE_CHARACTER, _JSON_CHARACTER)
    if closed == grammar:
        return grammar
    return _ESCAPE.sub(lambda match: match[0] if match[1] is None else f"\\u00{match[1]}", closed)


def _prepare(schema: Any, place: str, depth: int) -> Any:
    if not isinstance(schema, dict):
        return schema  # true and false; anything else is told by the compiler
    if depth > MAX_NESTING:
        raise RequestError(f"the JSON schema is nested more than {MAX_NESTING} levels deep, at {place[:60]}…")
    _check(schema, place)
    result = dict(schema)
    for name in _MAPS:
        if isinstance(result.get(name), dict):
            result[name] = {k: _prepare(v, f"{place}/{name}/{k}", depth + 1) for k, v in result[name].items()}
    for name in _LISTS:
        if isinstance(result.get(name), list):
            parts = enumerate(result[name])
            result[name] = [_prepare(part, f"{place}/{name}/{i}", depth + 1) for i, part in parts]
    for name in _SCHEMAS:
        if name in result:
            result[name] = _prepare(result[name], f"{place}/{name}", depth + 1)
    names_fields = {"properties", "patternProperties"} & result.keys()
    if names_fields and not {"additionalProperties", "unevaluatedProperties"} & result.keys():
        result["additionalProperties"] = False
    return result


def _check_pattern(pattern: str, place: str) -> None:
    """The compiler writes a pattern's characters into the JSON text as they are; only ``.``, ``\\s`` and
    classes that leave characters out keep to what JSON allows."""
    is_negated = False
    for part in _PATTERN_PART.findall(pattern):
        if part[0] == "[" or part == "]":
            is_negated = part == "[^"
        elif not is_negated and _must_be_escaped(part):
            raise _refusal(
                f"pattern {pattern[:60]!r}: {part!r} is a character that JSON escapes, which is supported in "
                "[^...] only",
                place,
            )


def _must_be_escaped(part: str) -> bool:
    if part[0] == "\\" and len(part) > 1:
        if part[1] in 'nrtfv0c\\"':
            return True
        code = int(part[2:], 16) if part[1] in "xu" and len(part) > 2 else 0x41
    else:
        code = ord(part)
    return code < 0x20 or code in (0x22, 0x5C)


def _check(schema: dict[str, Any], place: str) -> None:
    for name in _UNSUPPORTED:
        if name in schema and schema[name] not in _HARMLESS.get(name, ()):
            raise _refusal(f"{name!r} is not supported", place)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        raise _refusal(f"$ref={reference!r} must lead into the schema itself, as in '#/$defs/name'", place)
    composer = next((name for name in _COMPOSERS if name in schema), None)
    if composer is not None:
        beside = sorted(_CONSTRAINTS & schema.keys()) + [n for n in _COMPOSERS if n in schema][1:]
        if composer in ("anyOf", "oneOf") and "type" in schema:
            beside.append("type")
        if beside:
            raise _refusal(f"{beside[0]!r} beside {composer!r} is not supported", place)
    if composer == "allOf" and isinstance(schema["allOf"], list) and len(schema["allOf"]) > 1:
        raise _refusal("'allOf' of several schemas is not supported: merge them into one", place)
    patterns = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(patterns if isinstance(patterns, dict) else ())):
        if isinstance(pattern, str):
            _check_pattern(pattern, place)
    if {"minLength", "maxLength"} & schema.keys():
        for name in ("pattern", "format"):
            if name in schema:
                raise _refusal(f"{name!r} together with a length is not supported", place)


def _refusal(what: str, place: str) -> RequestError:
    return RequestError(f"JSON schema, {place[:200]}: {what}")

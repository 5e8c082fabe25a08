"""Tool calls out of text: the formats by name, and how one is found for a model.

``make_parser`` gives a fresh parser for one answer. Read ``base.py`` for what a parser does, then one format.
"""

from __future__ import annotations

from collections.abc import Callable

from gapless.serve.tools.base import Piece, TextPassage, ToolDelta, ToolParser
from gapless.serve.tools.hermes import HermesParser
from gapless.serve.tools.llama3 import Llama3Parser
from gapless.serve.tools.mistral import MistralParser

PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
}
"""``hermes`` is also what Qwen writes."""

NEEDS_SPECIAL_TOKENS = frozenset({"mistral"})
"""Formats whose marker is a special token, which must then stay in the text."""


def parser_of_template(template: str | None) -> str | None:
    """The format that a chat template teaches its model, or None for a template without tools."""
    if not template or "tools" not in template:
        return None
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or '"parameters"' in template:
        return "llama3"
    return None


__all__ = [
    "NEEDS_SPECIAL_TOKENS",
    "PARSERS",
    "Piece",
    "TextPassage",
    "ToolDelta",
    "ToolParser",
    "parser_of_template",
]

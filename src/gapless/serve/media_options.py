"""How many images and videos a request may have, from any source to one checked form.

A command line has text, a file has tables, Python has dictionaries; equal things compare equal here, however
they were written. Read ``settings.py`` for the field, ``media.py`` for its use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gapless.errors import ConfigError

PerPrompt = tuple[tuple[str, int], ...]
"""Kinds and their limits, sorted."""

MAX_ITEMS = 1024
KINDS = ("image", "video")
DEFAULT_PER_PROMPT: PerPrompt = (("image", 16), ("video", 1))

_FLAG = "--limit-mm-per-prompt"


def parse_per_prompt(value: Any) -> PerPrompt:
    """``image=4,video=1``, the same as JSON or as a mapping; a kind left out has its default. Raises
    ``ConfigError``."""
    limits = dict(DEFAULT_PER_PROMPT)
    for name, number in _mapping(value).items():
        if name not in KINDS:
            raise ConfigError(f"{_FLAG}: unknown kind {name!r}; kinds are {', '.join(KINDS)}")
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MAX_ITEMS:
            raise ConfigError(f"{_FLAG} {name}={number}: must be a number from 0 to {MAX_ITEMS}")
        limits[name] = number
    return tuple(sorted(limits.items()))


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, tuple):
        return dict(value)
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        pairs = [item.partition("=") for item in value.split(",")]
        return {name.strip(): _number(number.strip()) for name, _, number in pairs}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{_FLAG} is not JSON ({error}): {value}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{_FLAG}={value!r}: must be a JSON object")
    return dict(value)


def _number(text: str) -> Any:
    """As it came where it is none: the check says what is wrong."""
    return int(text) if text.isascii() and text.isdigit() else text

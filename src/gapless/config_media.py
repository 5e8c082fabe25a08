"""``--mm-processor-kwargs``: settings of a model's processor, from any source to one checked form.

A command line has text, a file has tables, Python has dictionaries; equal things compare equal here, however
they were written. Names are those of Transformers' processors. Read ``multimodal/overrides.py`` for what they
do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gapless.errors import ConfigError

Pairs = tuple[tuple[str, Any], ...]
"""A mapping that compares and never changes, sorted by name."""

PIXELS = ("min_pixels", "max_pixels")
FRAMES = ("fps", "num_frames", "min_frames", "max_frames")
GROUPS = {"images_kwargs": PIXELS, "videos_kwargs": (*PIXELS, *FRAMES)}


def parse_processor_kwargs(value: Any) -> Pairs:
    """Names as in Transformers' processors: ``min_pixels``, ``max_pixels``, ``fps``, ... for both
    kinds alike, or inside ``images_kwargs`` and ``videos_kwargs`` for one. Raises ``ConfigError``."""
    flag = "--mm-processor-kwargs"
    result: dict[str, Any] = {}
    for name, item in _mapping(value, flag).items():
        if name in GROUPS:
            inner = _mapping(item, f"{flag}: {name}")
            for key, number in inner.items():
                _check_kwarg(key, number, GROUPS[name], f"{flag}: {name}.")
            result[name] = tuple(sorted(inner.items()))
        else:
            _check_kwarg(name, item, (*PIXELS, *FRAMES), f"{flag}: ")
            result[name] = item
    if "fps" in result and "num_frames" in result:
        raise ConfigError(f"{flag}: fps and num_frames exclude each other; give one")
    return tuple(sorted(result.items()))


def _check_kwarg(name: str, value: Any, known: tuple[str, ...], where: str) -> None:
    if name not in known:
        raise ConfigError(f"{where}{name} is not known; known: {', '.join(known)}")
    types = (int, float) if name == "fps" else int
    if not isinstance(value, types) or isinstance(value, bool) or not 0 < value <= 2**31:
        raise ConfigError(f"{where}{name}={value!r}: must be a number above 0")


def _mapping(value: Any, flag: str) -> dict[str, Any]:
    if isinstance(value, tuple):
        return dict(value)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{flag} is not JSON ({error}): {value}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{flag}={value!r}: must be a JSON object")
    return dict(value)

"""Options about images and videos that are more than a number, from any source to one checked form.

A command line has text, a file has tables, Python has dictionaries; equal things compare equal here, however
they were written. Read ``settings.py`` for the fields, ``media.py`` for their use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gapless.errors import ConfigError

if TYPE_CHECKING:
    from gapless.multimodal.pixels import PixelSettings
    from gapless.multimodal.processor import Processor

Pairs = tuple[tuple[str, Any], ...]
"""A mapping that compares and never changes, sorted by name."""

MAX_ITEMS = 1024
KINDS = ("image", "video")
DEFAULT_PER_PROMPT: Pairs = (("image", 16), ("video", 1))

_PIXELS = ("min_pixels", "max_pixels")
_FRAMES = ("fps", "num_frames", "min_frames", "max_frames")
_GROUPS = {"images_kwargs": _PIXELS, "videos_kwargs": (*_PIXELS, *_FRAMES)}


def parse_per_prompt(value: Any) -> Pairs:
    """``image=4,video=1``, the same as JSON or as a mapping; a kind left out has its default. Raises
    ``ConfigError``."""
    flag = "--limit-mm-per-prompt"
    limits = dict(DEFAULT_PER_PROMPT)
    for name, number in _mapping(value, flag).items():
        if name not in KINDS:
            raise ConfigError(f"{flag}: unknown kind {name!r}; kinds are {', '.join(KINDS)}")
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MAX_ITEMS:
            raise ConfigError(f"{flag} {name}={number}: must be a number from 0 to {MAX_ITEMS}")
        limits[name] = number
    return tuple(sorted(limits.items()))


def parse_processor_kwargs(value: Any) -> Pairs:
    """Names as in Transformers' processors: ``min_pixels``, ``max_pixels``, ``fps``, ... for both
    kinds alike, or inside ``images_kwargs`` and ``videos_kwargs`` for one. Raises ``ConfigError``."""
    flag = "--mm-processor-kwargs"
    result: dict[str, Any] = {}
    for name, item in _mapping(value, flag).items():
        if name in _GROUPS:
            inner = _mapping(item, f"{flag}: {name}")
            for key, number in inner.items():
                _check_kwarg(key, number, _GROUPS[name], f"{flag}: {name}.")
            result[name] = tuple(sorted(inner.items()))
        else:
            _check_kwarg(name, item, (*_PIXELS, *_FRAMES), f"{flag}: ")
            result[name] = item
    if "fps" in result and "num_frames" in result:
        raise ConfigError(f"{flag}: fps and num_frames exclude each other; give one")
    return tuple(sorted(result.items()))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorOverrides:
    """``--mm-processor-kwargs`` applied to one model's processor. Raises ``ConfigError`` where they leave no
    size that an image may have."""

    kwargs: Pairs

    def apply(self, processor: Processor) -> Processor:
        given = dict(self.kwargs)
        groups = {name: dict(given.pop(name, ())) for name in _GROUPS}
        pixels = {name: given.pop(name) for name in _PIXELS if name in given}
        frames = {name: number for name, number in given.items() if name in _FRAMES}
        videos = groups["videos_kwargs"]
        frames |= {name: videos[name] for name in _FRAMES if name in videos}
        return processor.with_settings(
            image=_resized(processor.image, {**pixels, **groups["images_kwargs"]}),
            video=_resized(
                processor.video, {**pixels, **{name: videos[name] for name in _PIXELS if name in videos}}
            ),
            sampling=frames,
        )


def _resized(settings: PixelSettings, pixels: Mapping[str, int]) -> PixelSettings:
    low, high = (pixels.get(name, getattr(settings, name)) for name in _PIXELS)
    settings = replace(settings, min_pixels=low, max_pixels=high)
    if settings.min_pixels > settings.max_pixels:
        raise ConfigError(
            f"--mm-processor-kwargs: min_pixels={settings.min_pixels} exceeds max_pixels="
            f"{settings.max_pixels}; the model's own value holds for the one that is not given"
        )
    return settings


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
        value = _parsed(value, flag)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{flag}={value!r}: must be a JSON object")
    return dict(value)


def _parsed(text: str, flag: str) -> Any:
    if not text.lstrip().startswith("{") and flag == "--limit-mm-per-prompt":
        pairs = [item.partition("=") for item in text.split(",")]
        return {name.strip(): _number(number.strip()) for name, _, number in pairs}
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is not JSON ({error}): {text}") from None


def _number(text: str) -> Any:
    """As it came where it is none: the check says what is wrong."""
    return int(text) if text.isascii() and text.isdigit() else text

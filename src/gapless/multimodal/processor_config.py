"""A folder's processor files to settings for images and videos.

Who saved a folder decides where settings lie: ``processor_config.json`` with a part for each (Transformers
5), ``preprocessor_config.json`` and ``video_preprocessor_config.json`` (Qwen3-VL), or the former alone for
both (Qwen2.5-VL). What no file says follows from the model's config and the family's published values.
Invariant: a setting that would change patches is followed or refused, never ignored. Read ``pixels.py`` for
their use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from gapless.errors import ModelError
from gapless.models.json_file import read_json
from gapless.models.vl_config import VisionLanguageConfig
from gapless.multimodal.pixels import PixelSettings

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)
_QWEN2_LIMITS = {"image": (56 * 56, 28 * 28 * 16384), "video": (128 * 28 * 28, 28 * 28 * 768)}
_QWEN3_LIMITS = {"image": (65536, 16777216), "video": (4096, 25165824)}

_ALWAYS_ON = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


class ProcessorFiles:
    """The settings in ``folder``, for a model of ``config``."""

    def __init__(self, folder: Path, config: VisionLanguageConfig) -> None:
        self._folder, self._config = folder, config

    def image(self) -> PixelSettings:
        """Raises ``ModelError`` for settings that are not implemented."""
        path, raw = self._first(("image_processor", "preprocessor_config.json"))
        return self._settings(raw, path, kind="image")

    def video(self) -> PixelSettings:
        """Raises ``ModelError`` for settings that are not implemented."""
        path, raw = self._video_file()
        return self._settings(raw, path, kind="video")

    def sampling(self) -> Mapping[str, Any]:
        """How frames are chosen: the fields that ``sampling.FrameSampling`` takes, but for its defaults."""
        path, raw = self._video_file()
        chosen: dict[str, Any] = {
            "spacing": "ends" if self._config.has_timestamps else "steps",
            "temporal_patch_size": self._config.temporal_patch_size,
        }
        for key in ("fps", "num_frames", "min_frames", "max_frames"):
            value = raw.get(key)
            if value is None:
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
                raise ModelError(f"{path}: '{key}'={value!r} must be a positive number")
            chosen[key] = value
        return chosen

    def _video_file(self) -> tuple[Path, Mapping[str, Any]]:
        files = [("video_processor", "video_preprocessor_config.json")]
        if not self._config.has_timestamps:
            files.append(("image_processor", "preprocessor_config.json"))
        return self._first(*files)

    def _first(self, *places: tuple[str, str]) -> tuple[Path, Mapping[str, Any]]:
        """The first of (part of ``processor_config.json``, file of its own) that exists, else nothing."""
        joint = self._folder / "processor_config.json"
        parts = read_json(joint) if joint.is_file() else {}
        for part, name in places:
            if isinstance(parts.get(part), Mapping):
                return joint, parts[part]
            if (self._folder / name).is_file():
                return self._folder / name, read_json(self._folder / name)
        return joint, {}

    def _settings(
        self, raw: Mapping[str, Any], path: Path, *, kind: Literal["image", "video"]
    ) -> PixelSettings:
        config = self._config
        for key in _ALWAYS_ON:
            if raw.get(key) is False:
                raise ModelError(f"{path}: '{key}'=false is not implemented; images are always prepared so")
        if raw.get("cap_pixels_per_frame"):
            raise ModelError(f"{path}: 'cap_pixels_per_frame'=true is not implemented; leave it out")
        for key, of_model in (
            ("patch_size", config.patch_size),
            ("merge_size", config.merge_size),
            ("temporal_patch_size", config.temporal_patch_size),
        ):
            if raw.get(key) not in (None, of_model):
                raise ModelError(f"{path}: '{key}'={raw[key]!r}, but the vision tower's is {of_model}")
        limits = _QWEN3_LIMITS if config.has_timestamps else _QWEN2_LIMITS
        low, high = _pixel_limits(raw, path, limits[kind])
        default_mean, default_std = (_HALF, _HALF) if config.has_timestamps else (_CLIP_MEAN, _CLIP_STD)
        holds_for: Literal["frame", "video"] = "video" if config.has_timestamps else "frame"
        return PixelSettings(
            patch_size=config.patch_size,
            merge_size=config.merge_size,
            temporal_patch_size=config.temporal_patch_size,
            min_pixels=low,
            max_pixels=high,
            mean=_triple(raw, "image_mean", path, default_mean),
            std=_triple(raw, "image_std", path, default_std),
            rescale_factor=_positive(raw, "rescale_factor", path, 1 / 255),
            resample=_resample(raw, path),
            limits_hold_for="image" if kind == "image" else holds_for,
        )


def _pixel_limits(raw: Mapping[str, Any], path: Path, default: tuple[int, int]) -> tuple[int, int]:
    size = raw.get("size") or {}
    known = {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}
    if not isinstance(size, Mapping) or not set(size) <= known:
        raise ModelError(f"{path}: 'size'={size!r} must be an object with shortest_edge and longest_edge")
    limits = []
    for edge, key, fallback in (
        ("shortest_edge", "min_pixels", default[0]),
        ("longest_edge", "max_pixels", default[1]),
    ):
        given = (raw.get(key), size.get(edge), size.get(key), fallback)
        value = next(number for number in given if number is not None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{path}: '{key}'={value!r} must be a positive number of pixels")
        limits.append(value)
    if limits[0] > limits[1]:
        raise ModelError(f"{path}: min_pixels={limits[0]} exceeds max_pixels={limits[1]}")
    return limits[0], limits[1]


def _triple(
    raw: Mapping[str, Any], key: str, path: Path, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    value = raw.get(key)
    if value is None:
        return default
    is_triple = isinstance(value, list) and len(value) == 3
    if not is_triple or not all(_is_finite(v) for v in value) or (key[-3:] == "std" and 0 in value):
        raise ModelError(f"{path}: '{key}'={value!r} must be three numbers, one for each channel")
    return float(value[0]), float(value[1]), float(value[2])


def _positive(raw: Mapping[str, Any], key: str, path: Path, default: float) -> float:
    value = raw.get(key)
    if value is None:
        return default
    if not _is_finite(value) or value <= 0:
        raise ModelError(f"{path}: '{key}'={value!r} must be a positive number")
    return float(value)


def _is_finite(value: object) -> bool:
    """JSON as Python reads it has NaN and infinities, which would reach every pixel."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _resample(raw: Mapping[str, Any], path: Path) -> int:
    value = raw.get("resample", 3)
    if value is None:
        return 3
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 5:
        raise ModelError(f"{path}: 'resample'={value!r} must be the number of a filter of Pillow, 0 to 5")
    return value

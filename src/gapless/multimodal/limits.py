"""How large images and videos may be, as one frozen object.

A picture of a few kilobytes may unpack to gigabytes, so sizes are judged by what a header announces, before
anything is decoded, and again by what decoding yields. Every field is checked when the object is made, so
limits that exist are legal. Read ``images.py`` and ``videos.py`` for where they act.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from gapless.errors import ConfigError, RequestError

MAX_PIXELS = 89_478_485
"""Of one image: where Pillow itself begins to speak of bombs."""

_HIGHEST = {
    "max_image_bytes": 2**30,
    "max_image_pixels": MAX_PIXELS,
    "max_aspect_ratio": 200,
    "max_video_bytes": 2**31,
    "max_video_seconds": 24 * 3600,
    "max_video_frames": 2**16,
    "max_decoded_pixels": 2**31,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaLimits:
    """Raises ``ConfigError`` for values out of range."""

    max_image_bytes: int = 20 * 2**20
    """As it comes: a file, or a data URL decoded."""
    max_image_pixels: int = 64 * 2**20
    """Width times height, of an image and of one frame of a video."""
    max_aspect_ratio: int = 200
    """Longer side over shorter side; the processors of Qwen's models take no more."""
    max_video_bytes: int = 256 * 2**20
    max_video_seconds: int = 3600
    max_video_frames: int = 768
    """Frames taken from one video. Sampling never takes more; frames that were chosen already may not be
    more."""
    max_decoded_pixels: int = 2**28
    """Of all frames taken from one video together, and of all images of one prompt together; three bytes each
    are held while it is prepared."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, high = getattr(self, field.name), _HIGHEST[field.name]
            flag = "--" + field.name.replace("_", "-")
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{flag}={value!r}: must be an integer")
            if not 1 <= value <= high:
                raise ConfigError(f"{flag}={value}: must be between 1 and {high}")

    def check_together(self, num_pixels: int, name: str) -> None:
        """``num_pixels``: of a prompt's images and videos so far, the last of which is ``name``. Raises
        ``RequestError``."""
        if num_pixels > self.max_decoded_pixels:
            raise RequestError(
                f"{name}: the images and videos up to this one have {num_pixels} pixels together, the limit "
                f"is {self.max_decoded_pixels}; send fewer or smaller ones, or raise the server's "
                "--max-decoded-pixels"
            )


DEFAULT_LIMITS = MediaLimits()

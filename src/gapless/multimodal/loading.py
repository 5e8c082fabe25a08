"""Images and videos from wherever they are to pixels: the one way in, for server, library and command line.

A ``MediaLoader`` holds what may be read and how large it may be. It blocks while it reads and decodes, so a
server calls it on a worker thread; nothing in it is shared, so many threads may. Invariant: whatever is wrong
with what a caller sent is a ``RequestError`` that begins with ``name``, the place in the request. Read
``access.py`` for URLs, ``images.py`` and ``videos.py`` for decoding.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gapless.errors import ConfigError, RequestError
from gapless.multimodal.access import MediaAccess
from gapless.multimodal.limits import DEFAULT_LIMITS, MediaLimits

if TYPE_CHECKING:
    from PIL import Image

    from gapless.multimodal.videos import ChooseFrames, VideoFrames


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaLoader:
    """For URLs that strangers send."""

    limits: MediaLimits = DEFAULT_LIMITS
    access: MediaAccess = field(default_factory=MediaAccess)

    def image(self, url: str, *, name: str = "image", timeout_s: float | None = None) -> Image.Image:
        """``timeout_s``: for fetching it. Raises ``RequestError``."""
        images = _images()
        most = self.limits.max_image_bytes
        data = self.access.read(url, kind="image", max_bytes=most, name=name, timeout_s=timeout_s)
        return images.decode_image(data, limits=self.limits, name=name)

    def video(
        self, url: str, choose: ChooseFrames, *, name: str = "video", timeout_s: float | None = None
    ) -> VideoFrames:
        """``choose`` says which frames are taken. Raises ``RequestError``."""
        videos = _videos()
        most = self.limits.max_video_bytes
        data = self.access.read(url, kind="video", max_bytes=most, name=name, timeout_s=timeout_s)
        return videos.decode_video(data, choose, limits=self.limits, name=name)


def open_image(
    source: str | os.PathLike[str] | bytes | Image.Image | np.ndarray,
    *,
    limits: MediaLimits = DEFAULT_LIMITS,
    name: str = "image",
) -> Image.Image:
    """RGB of what the caller's own program passes: a path, a data URL, a file's bytes, an opened image, or an
    array of 8-bit pixels (height, width, 3). Raises ``RequestError``."""
    images = _images()
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3:
            raise RequestError(
                f"{name}: an array of shape {source.shape} and type {source.dtype} is no image; pass uint8 "
                "of shape (height, width, 3)"
            )
        source = images.from_pixels(source)
    if isinstance(source, images.Image.Image):
        return images.to_rgb(source, limits=limits, name=name)
    data = _read(source, kind="image", max_bytes=limits.max_image_bytes, name=name)
    return images.decode_image(data, limits=limits, name=name)


def open_video(
    source: str | os.PathLike[str] | bytes,
    choose: ChooseFrames,
    *,
    limits: MediaLimits = DEFAULT_LIMITS,
    name: str = "video",
) -> VideoFrames:
    """Frames of what the caller's own program passes: a path, a data URL or a file's bytes. Raises
    ``RequestError``."""
    data = _read(source, kind="video", max_bytes=limits.max_video_bytes, name=name)
    return _videos().decode_video(data, choose, limits=limits, name=name)


def _read(source: object, *, kind: str, max_bytes: int, name: str) -> bytes:
    if isinstance(source, bytes):
        return source
    if isinstance(source, str) and source[:5].lower() == "data:":
        return MediaAccess().read(source, kind=kind, max_bytes=max_bytes, name=name)
    if not isinstance(source, (str, os.PathLike)):
        raise RequestError(f"{name}: {type(source).__name__} is no {kind}; pass a path, bytes or a data URL")
    path = Path(source)
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise RequestError(f"{name}: {path} is no file")
        if size > max_bytes:
            raise RequestError(f"{name}: {path} has {size} bytes, the limit is {max_bytes}")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{name}: {path} cannot be read ({error})") from None


@functools.cache
def _images() -> Any:
    try:
        from gapless.multimodal import images
    except ImportError as error:
        raise _missing("images", error) from None
    return images


@functools.cache
def _videos() -> Any:
    try:
        from gapless.multimodal import videos
    except ImportError as error:
        raise _missing("videos", error) from None
    return videos


def _missing(what: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"{what} need packages that are not installed ({error.name}): pip install 'gapless[vision]'"
    )

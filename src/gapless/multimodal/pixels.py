"""From pixels to patches: how large an image or video becomes, and how its values reach the vision tower.

The rules are those of Transformers' processors for these models: both sides become multiples of a token's
pixels, the area is brought within limits, and patches come out in blocks that the tower's merger joins to
tokens. They stay bytes, pixel by pixel, with the normalisation that a tower's input has: that is done, and
colours are parted, where the tower runs, to the same bits as in Transformers. ``F`` frames, ``H`` height,
``W`` width, ``P`` patches, ``B`` bytes of a patch (time, rows, columns, colours). Read
``processor_config.py`` for where settings come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

from gapless.errors import RequestError
from gapless.multimodal.items import Normalisation

MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelSettings:
    """``min_pixels`` and ``max_pixels`` bound an image, a frame (``frame``) or all frames (``video``)."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale_factor: float = 1 / 255
    resample: int = int(Image.Resampling.BICUBIC)
    limits_hold_for: Literal["image", "frame", "video"] = "image"

    @property
    def token_size(self) -> int:
        """Pixels along each side of a token."""
        return self.patch_size * self.merge_size


def grid_of(
    settings: PixelSettings, *, height: int, width: int, num_frames: int = 1, name: str
) -> tuple[int, int, int]:
    """Patches in time, height and width. ``name`` begins every error. Raises ``RequestError``."""
    if height < 1 or width < 1 or num_frames < 1:
        raise RequestError(
            f"{name}: it has {num_frames} x {height} x {width} pixels; each must be at least 1"
        )
    num_steps = -(-num_frames // settings.temporal_patch_size)
    if settings.limits_hold_for == "video":
        # The last frame is repeated where frames do not fill a step, which one alone never does.
        new_height, new_width = _size_of_frames(
            settings, max(num_frames, settings.temporal_patch_size), height, width, name
        )
    else:
        new_height, new_width = _size_of_image(settings, height, width, name)
    return num_steps, new_height // settings.patch_size, new_width // settings.patch_size


class Patches:
    """``[P, B]`` uint8, to be normalised, that are made where they are needed, in staging memory for one.

    Of RGB images, brought to the size of the grid; the last is repeated until they fill the grid's steps. A
    single picture's pixels are in a patch once. What is wrong with an image must be known, and it must not
    change, until they are written.
    """

    dtype = np.dtype(np.uint8)

    def __init__(
        self, settings: PixelSettings, pictures: Sequence[Image.Image], grid_thw: tuple[int, int, int]
    ) -> None:
        steps, grid_h, grid_w = grid_thw
        patch, merge = settings.patch_size, settings.merge_size
        size = (grid_w * patch, grid_h * patch)
        self._made: np.ndarray | None = None
        self._pictures = [_at_size(settings, picture, size) for picture in pictures]
        self._band_rows = settings.token_size
        self.normalisation = _normalisation(settings, len(pictures))
        depth = settings.temporal_patch_size // self.normalisation.num_repeats
        # Whole rows of patches move: to part the colours, too, took 13 times as long.
        self._row = np.dtype((np.void, 3 * patch))
        self._shape = (steps, grid_h // merge, grid_w // merge, merge, merge, depth, patch)
        self.shape = (math.prod(grid_thw), depth * patch * self._row.itemsize)
        self.nbytes = math.prod(self.shape)

    def write(self, target: np.ndarray) -> None:
        """All of them into ``nbytes`` bytes that lie side by side."""
        if self._made is not None:
            target[...] = self._made.reshape(-1)
            return
        rows = target.view(self._row).reshape(self._shape)
        steps, depth = self._shape[0], self._shape[-2]
        for index in range(steps * depth):
            step, moment = divmod(index, depth)
            picture = self._pictures[min(index, len(self._pictures) - 1)]
            bands = rows[step, ..., moment, :].transpose(0, 2, 4, 1, 3)
            for band, pixels in zip(bands, _bands(picture, self._band_rows), strict=True):
                band[...] = np.frombuffer(pixels, self._row).reshape(band.shape)

    def array(self) -> np.ndarray:
        """``[P, B]``, made once. It takes the place of the pictures: both would be more than twice its
        bytes, for as long as a request lives."""
        if self._made is None:
            made = np.empty(self.nbytes, self.dtype)
            self.write(made)
            self._made = made.reshape(self.shape)
            self._pictures.clear()
        return self._made


def _normalisation(settings: PixelSettings, num_frames: int) -> Normalisation:
    is_still = num_frames == 1  # one picture fills every place in time
    return Normalisation(
        rescale_factor=settings.rescale_factor,
        mean=settings.mean,
        std=settings.std,
        num_repeats=settings.temporal_patch_size if is_still else 1,
    )


def _at_size(settings: PixelSettings, picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    return picture if picture.size == size else picture.resize(size, resample=settings.resample)


_make_encoder = getattr(Image, "_getencoder", None)
"""What ``tobytes`` works with; Pillow does not promise that it stays."""


def _bands(picture: Image.Image, num_rows: int) -> Iterator[bytes]:
    """The bytes of ``num_rows`` rows after each other, of which there are a multiple.

    What ``tobytes`` does, in pieces that stay in the CPU's caches until they have been put in their places:
    all bytes at once are fresh memory, which takes the system longer to give than Pillow to fill it.
    """
    width, height = picture.size
    if _make_encoder is None:
        pixels, size = picture.tobytes(), 3 * width * num_rows
        yield from (pixels[start : start + size] for start in range(0, len(pixels), size))
        return
    encoder = _make_encoder(picture.mode, "raw", picture.mode)
    try:
        encoder.setimage(picture.im, (0, 0, width, height))
        for _ in range(0, height, num_rows):
            yield encoder.encode(3 * width * num_rows)[2]
    finally:
        encoder.cleanup()


def _size_of_image(settings: PixelSettings, height: int, width: int, name: str) -> tuple[int, int]:
    _check_aspect(height, width, name)
    factor = settings.token_size
    area = height * width
    new_height, new_width = (round(side / factor) * factor for side in (height, width))
    if new_height * new_width > settings.max_pixels:
        return _shrunk(height, width, math.sqrt(area / settings.max_pixels), factor)
    if new_height * new_width < settings.min_pixels:
        return _grown(height, width, math.sqrt(settings.min_pixels / area), factor)
    return new_height, new_width


def _size_of_frames(
    settings: PixelSettings, num_frames: int, height: int, width: int, name: str
) -> tuple[int, int]:
    factor, depth = settings.token_size, settings.temporal_patch_size
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect(height, width, name)
    volume = num_frames * height * width
    new_height, new_width = (round(side / factor) * factor for side in (height, width))
    new_volume = round(num_frames / depth) * depth * new_height * new_width
    if new_volume > settings.max_pixels:
        return _shrunk(height, width, math.sqrt(volume / settings.max_pixels), factor)
    if new_volume < settings.min_pixels:
        return _grown(height, width, math.sqrt(settings.min_pixels / volume), factor)
    return new_height, new_width


def _shrunk(height: int, width: int, scale: float, factor: int) -> tuple[int, int]:
    new_height, new_width = (
        max(factor, math.floor(side / scale / factor) * factor) for side in (height, width)
    )
    return new_height, new_width


def _grown(height: int, width: int, scale: float, factor: int) -> tuple[int, int]:
    new_height, new_width = (math.ceil(side * scale / factor) * factor for side in (height, width))
    return new_height, new_width


def _check_aspect(height: int, width: int, name: str) -> None:
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise RequestError(
            f"{name}: it is {width} x {height} pixels, one side over {MAX_ASPECT_RATIO} times the other; "
            "crop it"
        )

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
from collections.abc import Sequence
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


def resized(
    settings: PixelSettings, frames: Sequence[Image.Image], grid_thw: tuple[int, int, int]
) -> np.ndarray:
    """``[F, H, W, 3]`` uint8 of RGB images at the size of the grid; read only."""
    _, grid_h, grid_w = grid_thw
    size = (grid_w * settings.patch_size, grid_h * settings.patch_size)
    arrays_HW3 = [
        np.asarray(frame if frame.size == size else frame.resize(size, resample=settings.resample))
        for frame in frames
    ]
    return arrays_HW3[0][None] if len(arrays_HW3) == 1 else np.stack(arrays_HW3)


def patches(settings: PixelSettings, pixels_FHW3: np.ndarray, grid_thw: tuple[int, int, int]) -> np.ndarray:
    """``[P, B]`` uint8, of ``normalisation``; the last frame is repeated until frames fill the grid's steps.
    A single frame's pixels are in a patch once."""
    steps, grid_h, grid_w = grid_thw
    patch, merge, depth = settings.patch_size, settings.merge_size, settings.temporal_patch_size
    num_frames = pixels_FHW3.shape[0]
    depth //= normalisation(settings, pixels_FHW3).num_repeats
    if num_frames < steps * depth:
        last_FHW3 = np.repeat(pixels_FHW3[-1:], steps * depth - num_frames, axis=0)
        pixels_FHW3 = np.concatenate([pixels_FHW3, last_FHW3])
    # Whole rows of patches move: to part the colours, too, took 13 times as long.
    row = np.dtype((np.void, 3 * patch))
    rows = pixels_FHW3.reshape(
        steps, -1, grid_h // merge, merge, patch, grid_w // merge, merge, 3 * patch
    ).view(row)[..., 0]
    rows_of_patches = np.ascontiguousarray(rows.transpose(0, 2, 5, 3, 6, 1, 4))
    return rows_of_patches.view(np.uint8).reshape(steps * grid_h * grid_w, -1)


def normalisation(settings: PixelSettings, pixels_FHW3: np.ndarray) -> Normalisation:
    """Of the patches of these frames."""
    is_still = pixels_FHW3.shape[0] == 1  # one picture fills every place in time
    return Normalisation(
        rescale_factor=settings.rescale_factor,
        mean=settings.mean,
        std=settings.std,
        num_repeats=settings.temporal_patch_size if is_still else 1,
    )


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

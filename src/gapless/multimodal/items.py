"""What stands for images and videos in a prompt, between the processor, the engine and the encoder.

A prompt with media is token ids in which *placeholder* tokens mark where rows of an encoder's output go. One
``MediaItem`` is one image or one video: its patches as the processor made them, its grid, and the ranges of
placeholders it fills, in order. Patches are pixels, with a ``Normalisation`` that says which values a tower
sees, or these values themselves. Pixels may stay in their picture until they are needed. Invariant: an item's
``num_tokens`` is the sum of its ranges' lengths and the number of rows that the encoder makes of it. ``P``
patches, ``C`` values per patch, ``T`` prompt tokens; of a patch ``A`` pixels, ``K`` channels, ``R`` times
that each is repeated. Read ``processor.py`` for how prompts come to be.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # the command line knows items, and its help waits for no numpy
    import numpy as np

    from gapless.multimodal.pixels import Patches

MediaKind = Literal["image", "video"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalisation:
    """What a pixel becomes in each channel: ``(pixel * rescale_factor - mean) / std``."""

    rescale_factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    num_repeats: int = 1
    """How often the values of a channel follow each other in a patch: the pixels of a still picture are kept
    once and fill every moment."""

    def table(self) -> np.ndarray:
        """``[3, 256]`` float32, not to be written: every byte's value, in the steps and precisions of
        Transformers' processors."""
        return _table(self.rescale_factor, self.mean, self.std)


@dataclass(frozen=True, kw_only=True, eq=False)
class MediaItem:
    """One image or video of one prompt. Compared by identity; equal contents have equal hashes. Nobody writes
    to its patches."""

    kind: MediaKind
    patches_PC: np.ndarray | Patches
    """In the order the tower expects (blocks of ``merge_size`` squared patches): float32 values, those of a
    channel together; or uint8 pixels with a ``normalisation``, the channels of a pixel together, of which a
    patch has ``C / num_repeats`` bytes. ``Patches`` are pixels that have not left their picture yet."""
    grid_thw: tuple[int, int, int]
    """Temporal, vertical and horizontal patches; their product is ``P``."""
    ranges: tuple[tuple[int, int], ...]
    """(start, length) of its placeholders in the prompt, ascending; a video may have one for each frame."""
    normalisation: Normalisation | None = None
    """Of patches that are pixels."""
    known_hash: bytes | None = None
    """Its ``content_hash``, where somebody has computed that before."""

    @functools.cached_property
    def content_hash(self) -> bytes:
        """Names patches and grid: equal names mean equal embeddings from one model. Computed when it is asked
        for (0.4 ms for an image of 448 pixels squared), so not at all where nothing is kept by it. Pictures
        are strangers' work, so the hash is a cryptographic one; of those, processors have instructions for
        SHA-256 (half of BLAKE2's time)."""
        if self.known_hash is not None:
            return self.known_hash
        import numpy as np

        patches_PC = np.ascontiguousarray(self.array_PC)
        named = (self.kind, self.grid_thw, patches_PC.shape, str(patches_PC.dtype), self.normalisation)
        digest = hashlib.sha256(repr(named).encode())
        digest.update(patches_PC.data)
        return digest.digest()

    @property
    def array_PC(self) -> np.ndarray:
        """``patches_PC`` as an array."""
        import numpy as np

        return self.patches_PC if isinstance(self.patches_PC, np.ndarray) else self.patches_PC.array()

    @property
    def num_tokens(self) -> int:
        return sum(length for _, length in self.ranges)

    @property
    def num_patches(self) -> int:
        return self.patches_PC.shape[0]

    def values_PC(self) -> np.ndarray:
        """``[P, C]`` float32: what Transformers' processors make of it. Pixels are normalised every time."""
        if self.normalisation is None:
            return self.array_PC
        import numpy as np

        tables, num_repeats = self.normalisation.table(), self.normalisation.num_repeats
        num_patches, num_bytes = self.patches_PC.shape
        pixels_PAK = self.array_PC.reshape(num_patches, -1, len(tables))
        shape = (num_patches, len(tables), num_repeats, num_bytes // len(tables))
        values_PKRA = np.empty(shape, np.float32)
        for channel, table in enumerate(tables):
            values_PKRA[:, channel] = table[pixels_PAK[..., channel]][:, None]
        return values_PKRA.reshape(num_patches, num_bytes * num_repeats)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MediaPrompt:
    """A prompt's tokens with the placeholders expanded, and what the decoder needs besides."""

    token_ids: tuple[int, ...]
    items: tuple[MediaItem, ...]
    """In the order of their first placeholder."""
    rope_positions_3T: np.ndarray
    """int32: temporal, vertical and horizontal position of every prompt token."""
    rope_delta: int
    """A generated token at index ``i`` has position ``i + rope_delta`` on all three axes."""


@functools.lru_cache(maxsize=32)
def _table(
    rescale_factor: float, mean: tuple[float, float, float], std: tuple[float, float, float]
) -> np.ndarray:
    import numpy as np

    scaled_256 = (np.arange(256, dtype=np.float64) * rescale_factor).astype(np.float32)
    mean_31, std_31 = (np.array(v, dtype=np.float32)[:, None] for v in (mean, std))
    return (scaled_256 - mean_31) / std_31

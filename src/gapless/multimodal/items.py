"""What stands for images and videos in a prompt, between the processor, the engine and the encoder.

A prompt with media is token ids in which *placeholder* tokens mark where rows of an encoder's output go. One
``MediaItem`` is one image or one video: its patches as the processor made them, its grid, and the ranges of
placeholders it fills, in order. Invariant: an item's ``num_tokens`` is the sum of its ranges' lengths and the
number of rows that the encoder makes of it. ``P`` patches, ``C`` values per patch, ``T`` prompt tokens. Read
``processor.py`` for how prompts come to be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

MediaKind = Literal["image", "video"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MediaItem:
    """One image or video of one prompt. Compared by identity; equal contents have equal hashes."""

    kind: MediaKind
    patches_PC: np.ndarray
    """float32, in the order the tower expects (blocks of ``merge_size`` squared patches)."""
    grid_thw: tuple[int, int, int]
    """Temporal, vertical and horizontal patches; their product is ``P``."""
    content_hash: bytes
    """Names patches and grid: equal names mean equal embeddings from one model."""
    ranges: tuple[tuple[int, int], ...]
    """(start, length) of its placeholders in the prompt, ascending; a video may have one for each frame."""

    @property
    def num_tokens(self) -> int:
        return sum(length for _, length in self.ranges)

    @property
    def num_patches(self) -> int:
        return self.patches_PC.shape[0]


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

"""Where the tokens of a prompt with media lie on the three axes of m-rope.

Text advances all axes together. The rows of an image, or of the frames of a video, lie on a grid that starts
at the position the text has reached; behind it text goes on at the next free row or column, which is fewer
positions than the media has tokens. Equal to ``get_rope_index`` of Transformers' models. ``T`` tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gapless.graphs.frozen_arrays import frozen
from gapless.models.vision.grids import GridCache


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaBlock:
    """Consecutive placeholders that form one grid."""

    start: int
    """Index of its first token in the prompt."""
    steps: int
    rows: int
    columns: int
    time_interval: int = 1
    """Temporal positions from one step to the next."""

    @property
    def num_tokens(self) -> int:
        return self.steps * self.rows * self.columns


def rope_positions(num_tokens: int, blocks: Sequence[MediaBlock]) -> tuple[np.ndarray, int]:
    """``[3, T]`` int32 and the offset from a generated token's index to its positions. ``blocks`` ascend."""
    positions_3T = np.empty((3, num_tokens), dtype=np.int32)
    index, position, highest = 0, 0, -1
    for block in blocks:
        num_text = block.start - index
        positions_3T[:, index : block.start] = np.arange(position, position + num_text, dtype=np.int32)
        position += num_text
        index = block.start + block.num_tokens
        grid_3N = _grids[block.steps, block.rows, block.columns, block.time_interval]
        np.add(grid_3N, position, out=positions_3T[:, block.start : index])
        last = max((block.steps - 1) * block.time_interval, block.rows - 1, block.columns - 1)
        highest = max(highest, position - 1, position + last)
        position += max(block.rows, block.columns)
    positions_3T[:, index:] = np.arange(position, position + num_tokens - index, dtype=np.int32)
    if index < num_tokens:
        highest = max(highest, position + num_tokens - index - 1)
    return positions_3T, highest + 1 - num_tokens


def _grid(key: tuple[int, int, int, int]) -> np.ndarray:
    """``[3, N]``: positions of a block behind its first, never written. ``key``: steps, rows, columns and the
    time interval."""
    *sides, interval = key
    grid_3N = np.indices(sides, dtype=np.int32).reshape(3, -1)
    grid_3N[0] *= interval
    return frozen(grid_3N)


_grids: GridCache[tuple[int, int, int, int], np.ndarray] = GridCache(
    _grid, num_patches=lambda key: math.prod(key[:3])
)

"""What follows from the grids of images and videos alone: boundaries, positions, the order of windows.

Transformers computes all of it in ``vision_utils`` with operations that read data on the host; here that is
done once per grid and kept, since the same sizes come again and again, and joined for the items of a run.
Invariants: a frame of a video is a segment of its own; arrays are int32 (weights float32) and never written
after they were made. ``P`` patches, ``U`` merged units, ``N`` segments, ``W`` windows.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from gapless.errors import ModelError

Grid = tuple[int, int, int]
"""Temporal, vertical and horizontal patches."""

_MAX_KEPT = 128
_MAX_KEPT_PATCHES = 1 << 20
"""Of all grids that are kept: about 50 bytes each, where 128 of the largest images have 300 MB."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GridArrays:
    """One item's. Lengths and not cumulative sums, so that items join by concatenation."""

    full_lens_N: np.ndarray
    positions_P2: np.ndarray
    """Row and column of each patch, in the order the blocks see them."""
    window_lens_W: np.ndarray | None = None
    window_index_U: np.ndarray | None = None
    """Where each unit comes from when windows lie one behind the other."""
    reverse_index_U: np.ndarray | None = None
    interp_indices_P4: np.ndarray | None = None
    interp_weights_P4: np.ndarray | None = None


class GridCache(Generic[K, T]):
    """``make(grid)`` for the grids seen last: bounded in number and in patches. Safe to use from threads.
    Other keys than grids come with their ``num_patches``."""

    def __init__(self, make: Callable[[K], T], *, num_patches: Callable[[Any], int] = math.prod) -> None:
        self._make, self._num_patches_of = make, num_patches
        self._lock = threading.Lock()
        self._kept: OrderedDict[K, T] = OrderedDict()
        self._num_patches = 0

    def __getitem__(self, grid: K) -> T:
        with self._lock:
            found = self._kept.get(grid)
            if found is not None:
                self._kept.move_to_end(grid)
                return found
        made = self._make(grid)
        with self._lock:
            if grid not in self._kept:
                self._kept[grid] = made
                self._num_patches += self._num_patches_of(grid)
            while len(self._kept) > 1 and self._is_full():
                oldest, _ = self._kept.popitem(last=False)
                self._num_patches -= self._num_patches_of(oldest)
        return made

    def _is_full(self) -> bool:
        return len(self._kept) > _MAX_KEPT or self._num_patches > _MAX_KEPT_PATCHES


def num_patches_of(grids: Sequence[Grid]) -> int:
    return sum(map(math.prod, grids))


def check_grid(grid: Grid, *, merge_size: int) -> None:
    """Raises ``ModelError`` for a grid that no image can have."""
    _, height, width = grid
    if min(grid) <= 0 or height % merge_size or width % merge_size:
        raise ModelError(
            f"grid {grid} of an image or video must be positive, height and width multiples of {merge_size}"
        )


def full_lens(grid: Grid) -> np.ndarray:
    """The length of every frame."""
    frames, height, width = grid
    return np.full(frames, height * width, np.int32)


def positions(grid: Grid, merge_size: int) -> np.ndarray:
    """Row and column of each patch, patches of one merged unit next to each other: ``[P, 2]``."""
    from transformers.vision_utils import get_vision_position_ids

    return get_vision_position_ids(_tensor(grid), merge_size).numpy().astype(np.int32)


def windows(
    grid: Grid, *, merge_size: int, window_size: int, patch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """The order of units by window, and the length of every window in patches."""
    from transformers.vision_utils import get_vision_window_index

    index_U, ends = get_vision_window_index(
        _tensor(grid), spatial_merge_size=merge_size, window_size=window_size, patch_size=patch_size
    )
    return index_U.numpy().astype(np.int32), np.diff(ends.numpy()).astype(np.int32)


def interpolation(
    grid: Grid, *, merge_size: int, num_grid_per_side: int, mode: str, align_corners: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Which learned positions each patch mixes, and how much of each: ``[P, taps]`` twice."""
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    indices, weights = get_vision_interpolation_indices_and_weights(
        _tensor(grid),
        num_grid_per_side=num_grid_per_side,
        mode=mode,
        align_corners=align_corners,
        spatial_merge_size=merge_size,
    )
    return indices.numpy().astype(np.int32), weights.numpy().astype(np.float32)


def joined(parts: Sequence[np.ndarray | None]) -> np.ndarray:
    """The arrays of several items one behind the other."""
    present = [part for part in parts if part is not None]
    return present[0] if len(present) == 1 else np.concatenate(present)


def joined_indices(parts: Sequence[np.ndarray | None]) -> np.ndarray:
    """The same for permutations, each shifted by the units before it."""
    present = [part for part in parts if part is not None]
    if len(present) == 1:
        return present[0]
    indices, first = np.concatenate(present), 0
    for part in present:
        indices[first : first + len(part)] += first
        first += len(part)
    return indices


def cumulative(lens: np.ndarray) -> np.ndarray:
    """``[0, l0, l0 + l1, ...]``."""
    sums = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=sums[1:])
    return sums


def _tensor(grid: Grid):  # type: ignore[no-untyped-def]  # torch is imported where the towers are
    import torch

    return torch.tensor([grid])

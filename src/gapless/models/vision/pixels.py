"""Patches of images and videos on their way to a tower: as pixels, normalised on the device, or as values.

Pixels are an eighth of the bytes of float32 values for a still picture, a quarter for a video; nothing is
converted on the host. Invariant: what a tower reads is the same to the last bit either way. Items whose
patches are values already, and those that share a run with one, go as values. Read
``graphs/device/upload.py`` for the copies and ``kernels/pixels.py`` for the conversion.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from gapless.graphs.device.upload import HostRows, RawRows
from gapless.kernels.pixels import values_writer
from gapless.multimodal.items import MediaItem, Normalisation


def patch_rows(items: Sequence[MediaItem]) -> HostRows | RawRows:
    """``[P, C]``: the patches of ``items``, one behind the other."""
    first = items[0].normalisation
    if first is not None and len(items) == 1:
        patches_PB = items[0].patches_PC
        num_patches, num_bytes = patches_PB.shape
        shape = (num_patches, num_bytes * first.num_repeats)
        return RawRows((patches_PB,), shape=shape, finish=_Finish(((first, num_patches),)))
    if first is None or any(item.normalisation is None for item in items):
        return HostRows([item.values_PC() for item in items])
    # What shares a normalisation is one launch; nearly always that is all.
    runs = tuple(
        (normalisation, sum(item.num_patches for item in group))
        for normalisation, group in groupby(items, key=_normalisation_of)
    )
    width = items[0].patches_PC.shape[1] * first.num_repeats
    shape = (sum(num_patches for _, num_patches in runs), width)
    return RawRows([item.patches_PC for item in items], shape=shape, finish=_Finish(runs))


def _normalisation_of(item: MediaItem) -> Normalisation:
    assert item.normalisation is not None
    return item.normalisation


@dataclass(frozen=True, slots=True)
class _Finish:
    """Bytes, as they lie one behind the other, become rows of ``values``."""

    runs: tuple[tuple[Normalisation, int], ...]

    def __call__(self, raw: Tensor, values_PC: Tensor) -> Callable[[], None]:
        writers: list[Callable[[], None]] = []
        row = start = 0
        for normalisation, num_patches in self.runs:
            num_bytes = values_PC.shape[1] // normalisation.num_repeats
            bytes_PB = raw[start : start + num_patches * num_bytes].view(num_patches, num_bytes)
            table_KV = _table(normalisation, values_PC.dtype, values_PC.device)
            rows_PC = values_PC[row : row + num_patches]
            writers.append(values_writer(bytes_PB, table_KV, normalisation.num_repeats, rows_PC))
            row += num_patches
            start += num_patches * num_bytes
        return writers[0] if len(writers) == 1 else functools.partial(_call_all, writers)


def _call_all(writers: Sequence[Callable[[], None]]) -> None:
    for write in writers:
        write()


def _table(normalisation: Normalisation, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Kept where it has to be copied. On a CPU it is an operation like any other, which may be recorded: its
    result belongs to the recording."""
    make = _new_table if device.type == "cpu" else _kept_table
    return make(normalisation, dtype, device)


def _new_table(normalisation: Normalisation, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rounded on the host, as values are that come from there."""
    return torch.from_numpy(normalisation.table()).to(dtype).to(device)


_kept_table = functools.lru_cache(maxsize=32)(_new_table)

"""How many bytes a tensor's elements span: what an alias by address must cover."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def storage_bytes(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from the first to one past the last element that ``size`` and ``stride`` reach."""
    last = 0
    for extent, step in zip(size, stride, strict=True):
        if extent == 0:
            return 0
        last += (extent - 1) * step
    return (last + 1) * dtype.itemsize

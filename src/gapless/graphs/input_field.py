"""The schema of a static input: its dimensions, symbolic or fixed, its dtype and what its padding holds.

``buffers.py`` makes the memory. Raises ``GraphError`` for a dimension it cannot read.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from gapless.errors import GraphError


@dataclass(frozen=True, kw_only=True, slots=True)
class InputField:
    """One static input.

    ``dims``: an ``int``, a symbol, ``"symbol+k"`` or ``"m*symbol+k"`` per dimension. ``pad`` fills whatever
    the batch does not; ``"last"`` repeats the last real value (cumulative offsets). ``poison`` holds other
    legal pad values that verification uses to prove that pad rows cannot influence real ones. ``on_device``
    inputs are tensors copied on the device, or ``HostRows`` or ``RawRows`` where the input is also
    ``from_host``. ``by_column`` is for a table that is much wider than most batches need: it is stored column
    by column, and only columns with values are staged (the others hold the pad, 0).
    ``is_made``: no batch brings it, because the forward itself writes all of it, padding too, before anything
    reads it; ``by_column`` then says only how it is stored.
    """

    name: str
    dims: tuple[str | int, ...]
    dtype: torch.dtype = torch.int32
    pad: int | float | Literal["last"] = 0
    poison: int | float | tuple[int | float, ...] | None = None
    on_device: bool = False
    from_host: bool = False
    by_column: bool = False
    is_made: bool = False

    @property
    def is_staged(self) -> bool:
        """Whether batches bring it on the host."""
        return not (self.on_device or self.is_made)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(dim_size(dim, sizes) for dim in self.dims)


def dim_size(dim: str | int, sizes: Mapping[str, int]) -> int:
    """The size of one declared dimension. ``"2*tokens+1"`` with ``{"tokens": 4}`` is 9."""
    if isinstance(dim, int):
        return dim
    size = sizes.get(dim)
    if size is not None:
        return size
    factor, symbol, addend = parse_dim(dim)
    return factor * sizes[symbol] + addend


@functools.cache
def parse_dim(dim: str) -> tuple[int, str, int]:
    """Factor, symbol and addend of ``"m*symbol+k"``. Raises ``GraphError`` for anything else."""
    match = _DIM.fullmatch(dim)
    if match is None:
        raise GraphError(f"dimension {dim!r} is not 'symbol', 'symbol+k' or 'm*symbol+k'")
    factor, symbol, addend = match.groups()
    return int(factor or 1), symbol, int(addend or 0)


_DIM = re.compile(r"(?:(\d+)\*)?([A-Za-z_]\w*)([+-]\d+)?")

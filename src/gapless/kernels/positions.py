"""Learned positions of an image's patches, interpolated from a square table and added to their embeddings.

By torch operations this makes a float32 tensor four times the size of the patches' hidden states, which would
be most of an encoder graph's memory; the kernel makes none. ``P`` patches, ``H`` hidden size, ``S`` learned
positions, ``C`` corners that a patch mixes.
"""

from __future__ import annotations

import functools
from types import ModuleType

from torch import Tensor

from gapless.errors import ConfigError
from gapless.graphs.ops import register_custom_op
from gapless.kernels.launch import launch
from gapless.kernels.select import next_power_of_2

_TILE = 1024


@register_custom_op(mutates_args=["out_PH"])
def add_interpolated(
    embedded_PH: Tensor, table_SH: Tensor, indices_PC: Tensor, weights_PC: Tensor, out_PH: Tensor
) -> None:
    """``out[p] = embedded[p] + sum over c of weights[p, c] * table[indices[p, c]]``; the sum is rounded
    before it is added, as in two steps. Raises ``ConfigError`` for tensors that are not contiguous."""
    num_patches, size = embedded_PH.shape
    tensors = (embedded_PH, table_SH, indices_PC, weights_PC, out_PH)
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ConfigError("interpolated positions are added in contiguous tensors only")
    if num_patches == 0:
        return
    tile = min(_TILE, next_power_of_2(size))
    constants = {"SIZE": size, "NUM_CORNERS": indices_PC.shape[1], "TILE": tile, "num_warps": 4}
    launch(_kernels().add_interpolated_kernel, (num_patches, -(-size // tile)), tensors, constants)


@functools.cache
def _kernels() -> ModuleType:
    from gapless.kernels import positions_jit

    return positions_jit

"""Penalties from device tables of token counts in one kernel, and their update by a second.

They replace a dozen operations on planes of a row each. Both work in place and are launched eagerly, because
the table grows with the number of requests that have penalties. ``sampling/token_counts.py`` is the oracle.
``R`` sampled rows, ``P`` penalised rows among them, ``S`` slots, ``V`` vocabulary.
"""

from __future__ import annotations

import functools
from types import ModuleType

from torch import Tensor

from gapless.kernels.launch import launch

_TILE = 4096


def penalise_rows(
    logits_RV: Tensor,
    counts_SV: Tensor,
    rows_P: Tensor,
    slots_P: Tensor,
    *,
    repetition_P: Tensor,
    presence_P: Tensor,
    frequency_P: Tensor,
) -> None:
    """As ``token_counts.penalise_rows``, in place."""
    num_rows, size = rows_P.shape[0], logits_RV.shape[1]
    assert logits_RV.stride(1) == counts_SV.stride(1) == 1
    args = (
        logits_RV,
        counts_SV,
        rows_P,
        slots_P,
        repetition_P,
        presence_P,
        frequency_P,
        logits_RV.stride(0),
        counts_SV.stride(0),
    )
    constants = {"SIZE": size, "TILE": _TILE, "num_warps": 8, "enable_fp_fusion": False}
    launch(kernels().penalise_kernel, (num_rows, -(-size // _TILE)), args, constants)


def count_drawn(counts_SV: Tensor, tokens_R: Tensor, rows_P: Tensor, slots_P: Tensor) -> None:
    """As ``token_counts.count_drawn``, in place."""
    args = (counts_SV, tokens_R, rows_P, slots_P, counts_SV.stride(0))
    launch(kernels().count_drawn_kernel, (rows_P.shape[0],), args, {"num_warps": 1})


@functools.cache
def kernels() -> ModuleType:
    """The module of Triton kernels, imported at the first launch."""
    from gapless.kernels import penalty_jit

    return penalty_jit

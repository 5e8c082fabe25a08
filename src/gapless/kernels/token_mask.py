"""Bit masks over the vocabulary in one kernel, which writes the impossible tokens and reads no logit.

Launched eagerly: which rows follow a grammar differs from step to step. ``sampling/token_masks.py`` is the
oracle.
"""

from __future__ import annotations

import functools
from types import ModuleType

from torch import Tensor

_TILE_WORDS = 128


def mask_rows(logits_RV: Tensor, bits_KW: Tensor, rows_K: Tensor) -> None:
    """As ``token_masks.mask_rows``, in place."""
    num_rows, num_words = bits_KW.shape
    assert logits_RV.stride(1) == bits_KW.stride(1) == 1
    kernels().mask_kernel[(num_rows, -(-num_words // _TILE_WORDS))](
        logits_RV,
        bits_KW,
        rows_K,
        logits_RV.stride(0),
        bits_KW.stride(0),
        SIZE=logits_RV.shape[1],
        NUM_WORDS=num_words,
        TILE_WORDS=_TILE_WORDS,
        num_warps=8,
    )


@functools.cache
def kernels() -> ModuleType:
    """The module of Triton kernels, imported at the first launch."""
    from gapless.kernels import token_mask_jit

    return token_mask_jit

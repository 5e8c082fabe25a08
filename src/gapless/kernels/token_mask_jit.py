"""The Triton kernel of bit masks; what it must compute is in ``sampling/token_masks.py``.

Shapes in names: R rows of logits, K masked rows among them, V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: allow-untyped-defs


@triton.jit
def mask_kernel(
    logits_RV,
    bits_KW,
    rows_K,
    logits_stride_r,
    bits_stride_k,
    SIZE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    """One program per masked row and tile of words; each word is spread over its 32 tokens."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_K + place).to(tl.int64)
    word = tl.program_id(1) * TILE_WORDS + tl.arange(0, TILE_WORDS)
    bits = tl.load(bits_KW + place * bits_stride_k + word, mask=word < NUM_WORDS, other=0)
    bit = tl.arange(0, 32)
    is_allowed = (bits[:, None] >> bit[None, :]) & 1
    token = word[:, None] * 32 + bit[None, :]
    cell = logits_RV + row * logits_stride_r + token
    tl.store(cell, float("-inf"), mask=(token < SIZE) & (is_allowed == 0))

"""The Triton kernels of penalties; what they must compute is in ``sampling/token_counts.py``.

Shapes in names: R sampled rows, P penalised rows among them, S slots of the table of counts, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: allow-untyped-defs


@triton.jit
def penalise_kernel(
    logits_RV,
    counts_SV,
    rows_P,
    slots_P,
    repetition_P,
    presence_P,
    frequency_P,
    logits_stride_r,
    counts_stride_s,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per penalised row and tile of the vocabulary. Every product is rounded before it is
    subtracted, as in separate operations: launch without fused multiply-add."""
    place = tl.program_id(0)
    row = tl.load(rows_P + place).to(tl.int64)
    slot = tl.load(slots_P + place).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_token = token < SIZE
    cell = logits_RV + row * logits_stride_r + token
    logit = tl.load(cell, mask=is_token, other=0.0)
    count = tl.load(counts_SV + slot * counts_stride_s + token, mask=is_token, other=0)
    factor = tl.where(count != 0, tl.load(repetition_P + place), 1.0)
    scaled = tl.where(logit > 0, tl.div_rn(logit, factor), logit * factor)
    num_drawn = (count >> 1).to(tl.float32)
    scaled = scaled - tl.load(frequency_P + place) * num_drawn
    presence = tl.where(num_drawn > 0, tl.load(presence_P + place), 0.0)
    tl.store(cell, scaled - presence, mask=is_token)


@triton.jit
def count_drawn_kernel(counts_SV, tokens_R, rows_P, slots_P, counts_stride_s):
    """One program per penalised row: one more of the token that was drawn, if one was."""
    place = tl.program_id(0)
    token = tl.load(tokens_R + tl.load(rows_P + place))
    cell = counts_SV + tl.load(slots_P + place).to(tl.int64) * counts_stride_s + tl.maximum(token, 0)
    count = tl.load(cell)
    tl.store(cell, count + 2, mask=token >= 0)

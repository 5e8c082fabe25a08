"""Bit masks over the vocabulary, applied to rows of logits: pure tensor operations.

The oracle of ``kernels/token_mask.py``, and the path of devices without Triton. Shapes: R rows of logits, K
masked rows among them, V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mask_rows(logits_RV: Tensor, bits_KW: Tensor, rows_K: Tensor) -> None:
    """Make every token impossible whose bit is not set, in place. Bit ``t % 32`` of int32 word ``t // 32``
    is token ``t``."""
    shift_32 = torch.arange(32, dtype=torch.int32, device=bits_KW.device)
    allowed_KV = ((bits_KW.unsqueeze(-1) >> shift_32) & 1).flatten(1)[:, : logits_RV.shape[1]].bool()
    index_K = rows_K.long()
    logits_RV[index_K] = logits_RV[index_K].masked_fill(~allowed_KV, -torch.inf)

"""The head of a step and its greedy choice as one operator: in one pass over the weights, where that is best.

``head_product_jit.py`` multiplies and picks at once; for shapes that ``head_tiles.py`` has no tiles for, the
product is made first (``linear.py``) and ``finish_greedy`` picks. Both round logits to the model's dtype and
write them as float32 only where a flag on the device says that somebody reads them. ``R`` sampled rows, ``E``
hidden size, ``V`` vocabulary, ``C`` chunks of it.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from gapless.graphs.ops import register_custom_op
from gapless.kernels.head import finish_greedy, pick_best
from gapless.kernels.head_tiles import MAX_HEAD_ROWS, HeadTiles, head_tiles
from gapless.kernels.launch import Constants, launch
from gapless.kernels.linear import small_linear
from gapless.kernels.select import launch_options


@register_custom_op(mutates_args=["logits_RV", "tokens_R"])
def head_greedy(
    hidden_RE: Tensor,
    weight_VE: Tensor,
    logits_RV: Tensor,
    tokens_R: Tensor,
    needs_logits_1: Tensor,
    invalid: int,
) -> None:
    """``finish_greedy`` of ``hidden @ weight.T``, rounded to their dtype.

    ``logits_RV`` says how large the vocabulary is; ``weight`` may have more rows, which are not read. Raises
    ``ConfigError`` for a vocabulary that ``finish_greedy`` refuses.
    """
    (num_rows, num_in), size = hidden_RE.shape, logits_RV.shape[1]
    tiles = head_tiles(num_rows, num_in, size, hidden_RE.dtype, hidden_RE.device)
    if tiles is None:
        rows_VE = weight_VE if weight_VE.shape[0] == size else weight_VE[:size]
        finish_greedy(small_linear(hidden_RE, rows_VE, None), logits_RV, tokens_R, needs_logits_1, invalid)
        return
    launch_head(hidden_RE, weight_VE, logits_RV, tokens_R, needs_logits_1, invalid, tiles)


def launch_head(
    hidden_RE: Tensor,
    weight_VE: Tensor,
    logits_RV: Tensor,
    tokens_R: Tensor,
    needs_logits_1: Tensor,
    invalid: int,
    tiles: HeadTiles,
) -> None:
    """``head_greedy`` with given tiles, in half precision and for one row or more: for the operator, and for
    timing and compiling it."""
    num_rows, size = hidden_RE.shape[0], logits_RV.shape[1]
    assert hidden_RE.dtype == weight_VE.dtype
    assert hidden_RE.dtype in (torch.bfloat16, torch.float16)
    assert hidden_RE.stride(1) == weight_VE.stride(1) == logits_RV.stride(1) == tokens_R.stride(0) == 1
    assert weight_VE.shape[0] >= size
    num_chunks = -(-size // tiles.block_o)
    best_RC = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=hidden_RE.device)
    index_RC = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=hidden_RE.device)
    rows_pad = tiles.rows_pad(num_rows)
    strides = (hidden_RE.stride(0), weight_VE.stride(0), logits_RV.stride(0))
    launch(
        _kernels().head_product_kernel,
        (-(-num_rows // rows_pad), num_chunks),
        (hidden_RE, weight_VE, logits_RV, needs_logits_1, best_RC, index_RC, *strides, size, num_rows),
        _constants(tiles, rows_pad, hidden_RE.shape[1], hidden_RE.device),
    )
    pick_best(best_RC, index_RC, tokens_R, invalid)


def compile_head(weight_VE: Tensor) -> None:
    """Compile all kernels that ``head_greedy`` may want for this head; where launches only compile
    (``launch.compiling_ahead``), for there is no memory for what they would write."""
    size, num_in = weight_VE.shape
    for num_rows in (1 << n for n in range(1, MAX_HEAD_ROWS.bit_length())):
        tiles = head_tiles(num_rows, num_in, size, weight_VE.dtype, weight_VE.device)
        if tiles is not None:
            hidden_RE = weight_VE.new_empty((num_rows, num_in))
            logits_RV = weight_VE.new_empty((2, size), dtype=torch.float32)  # for its strides
            tokens_R = weight_VE.new_empty(num_rows, dtype=torch.int64)
            flag_1 = weight_VE.new_empty(1, dtype=torch.int32)
            launch_head(hidden_RE, weight_VE, logits_RV, tokens_R, flag_1, -1, tiles)


@functools.cache
def _constants(tiles: HeadTiles, rows_pad: int, num_in: int, device: torch.device) -> Constants:
    return Constants(
        NUM_IN=num_in,
        ROWS_PAD=rows_pad,
        BLOCK_O=tiles.block_o,
        BLOCK_I=tiles.block_i,
        SPLIT=tiles.split,
        NUM_EARLY=tiles.num_early,
        PREFETCH=tiles.prefetch,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch_options(device),
    )


@functools.cache
def _kernels() -> ModuleType:
    from gapless.kernels import head_product_jit

    return head_product_jit

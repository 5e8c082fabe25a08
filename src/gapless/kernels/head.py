"""The end of a greedy step: float32 logits and the best token of each row, in two kernels.

The first splits each row over many programs, which also write the float32 logits where a flag on the device
says that somebody reads them: they are two thirds of its bytes, and a step of greedy requests needs none. The
second picks among the chunks. Both write straight into the caller's buffers. ``R`` sampled rows, ``V``
vocabulary, ``C`` chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gapless.errors import ConfigError
from gapless.graphs.ops import register_custom_op
from gapless.kernels.launch import launch
from gapless.kernels.select import kernels, launch_options, next_power_of_2

MAX_VOCAB_SIZE = 1 << 24


@register_custom_op(mutates_args=["logits_RV", "tokens_R"])
def finish_greedy(
    raw_RV: Tensor, logits_RV: Tensor, tokens_R: Tensor, needs_logits_1: Tensor, invalid: int
) -> None:
    """``tokens_R`` (int64) = the best index of each row of ``raw_RV``, the lowest among equals, or
    ``invalid`` where the row holds a NaN. ``logits_RV`` = ``raw_RV`` as float32 if ``needs_logits_1``
    (``[1]`` int32) is not 0, else it is left as it was."""
    num_rows, size = raw_RV.shape
    if size > MAX_VOCAB_SIZE:
        raise ConfigError(f"the fused head handles vocabularies of up to {MAX_VOCAB_SIZE}, not {size}")
    if num_rows == 0:
        return
    assert raw_RV.stride(1) == logits_RV.stride(1) == tokens_R.stride(0) == 1
    tile = _tile(num_rows, size)
    num_chunks = -(-size // tile)
    best_RC = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=raw_RV.device)
    index_RC = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=raw_RV.device)
    launch(
        kernels().best_of_chunk_kernel,
        (num_rows, num_chunks),
        (raw_RV, logits_RV, needs_logits_1, best_RC, index_RC, raw_RV.stride(0), logits_RV.stride(0)),
        {
            "SIZE": size,
            "TILE": tile,
            "num_warps": min(max(tile // 256, 1), 8),
            **launch_options(raw_RV.device),
        },
    )
    pick_best(best_RC, index_RC, tokens_R, invalid)


def pick_best(best_RC: Tensor, index_RC: Tensor, tokens_R: Tensor, invalid: int) -> None:
    """``tokens_R`` (int64) = the index (int32) of each row's best chunk (float32), the first among equals, or
    ``invalid`` where one is NaN. Both are contiguous; neither ``R`` nor ``C`` is 0."""
    num_rows, num_chunks = best_RC.shape
    chunks_pad = next_power_of_2(num_chunks)
    constants = {
        "INVALID": invalid,
        "NUM_CHUNKS": num_chunks,
        "CHUNKS_PAD": chunks_pad,
        "num_warps": min(max(chunks_pad // 256, 1), 8),
        **launch_options(best_RC.device),
    }
    launch(kernels().best_of_row_kernel, (num_rows,), (best_RC, index_RC, tokens_R), constants)


def _tile(num_rows: int, size: int) -> int:
    """Chunks that spread one row over the whole GPU; larger ones where there are rows enough to fill it."""
    wanted = 1024 if num_rows <= 4 else 4096
    # The second kernel holds one value per chunk: keep that a small tile for huge vocabularies.
    return min(max(wanted, next_power_of_2(size) // 4096), next_power_of_2(size))

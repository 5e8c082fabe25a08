"""Positions, cache slots and block tables of a step, made on the device by one kernel.

They follow from little: where each request's tokens begin, how long it is, and its row of the block table. A
step with a prompt of 4,096 tokens stages 36 KB instead of 330 (256 requests at most), and the host neither
computes nor writes the rest in front of the GPU's work. Padding is 0 everywhere (position 0, a slot of the
sink block), and every entry is written in every step.

The kernel comes first of all in a step, and those behind it read what it makes before their ``gdc_wait``, as
they read what was staged. So it lets no kernel start early, and the one behind it must let others start
behind its own wait only: then all of them start when this one's writes are there for every reader (to have
begun late is not enough: without the wait a write may still be on its way). Behind it comes
``embed_norm_kernel``, which keeps to that, or a kernel of torch, which is never early. ``T`` tokens, ``B``
requests, ``M`` columns of the block table. What the arrays mean: ``attention/base.py``.
"""

from __future__ import annotations

import functools
from types import ModuleType

from torch import Tensor

from gapless.errors import ConfigError
from gapless.graphs.ops import register_custom_op
from gapless.kernels.launch import Constants, launch

TILE_TOKENS, TILE_COLUMNS, REQUESTS_AT_ONCE = 32, 16, 256
"""4,096 tokens are one wave of programs on an H200; a tile and all requests are 32 values a thread."""


@register_custom_op(mutates_args=["positions_T", "slot_mapping_T", "block_table_BM"])
def write_step_arrays(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    packed_tables: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    block_table_BM: Tensor,
    block_size: int,
) -> None:
    """Fill the last three from the first three; all of them int32.

    ``packed_tables``: the rows of the block tables one behind the other, from the first request on, each as
    wide as the longest request needs (``ceil(max(seq_lens) / block_size)``). What lies behind is not read.
    Requests without tokens have length 0. Raises ``ConfigError`` for shapes that do not go together.
    """
    (num_reqs,), (num_tokens,) = seq_lens.shape, positions_T.shape
    num_columns = block_table_BM.shape[1]
    if len(query_start_loc) != num_reqs + 1 or len(block_table_BM) != num_reqs:
        raise ConfigError(
            f"{num_reqs} lengths go with {num_reqs + 1} starts and {num_reqs} rows of the block table, "
            f"not with {len(query_start_loc)} and {len(block_table_BM)}"
        )
    if slot_mapping_T.shape != positions_T.shape:
        raise ConfigError(f"{num_tokens} positions, but {len(slot_mapping_T)} slots")
    grid = -(-num_tokens // TILE_TOKENS) + -(-num_columns // TILE_COLUMNS)
    if grid == 0:
        return
    arrays = (query_start_loc, seq_lens, packed_tables, positions_T, slot_mapping_T, block_table_BM)
    sizes = (num_reqs, num_tokens, num_columns, *block_table_BM.stride())
    launch(_kernels().step_arrays_kernel, (grid,), (*arrays, *sizes), _constants(block_size))


@functools.cache
def _constants(block_size: int) -> Constants:
    return Constants(
        BLOCK_SIZE=block_size,
        TILE_TOKENS=TILE_TOKENS,
        TILE_COLUMNS=TILE_COLUMNS,
        REQUESTS_AT_ONCE=REQUESTS_AT_ONCE,
        num_warps=8,
    )


@functools.cache
def _kernels() -> ModuleType:
    from gapless.kernels import step_arrays_jit

    return step_arrays_jit

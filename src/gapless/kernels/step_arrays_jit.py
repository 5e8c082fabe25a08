"""The Triton kernel of ``step_arrays.py``, apart so that only its user imports Triton.

It is the first kernel of a step and lets no other one start early. B requests, T tokens, M columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: allow-untyped-defs


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "num_columns", "stride_b", "stride_m"])
def step_arrays_kernel(
    query_start_loc,
    seq_lens,
    packed_tables,
    positions_T,
    slot_mapping_T,
    block_table_BM,
    num_reqs,
    num_tokens,
    num_columns,
    stride_b,
    stride_m,
    BLOCK_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    REQUESTS_AT_ONCE: tl.constexpr,
):
    """The first programs take a tile of tokens each, the others a tile of columns for all requests."""
    num_token_tiles = tl.cdiv(num_tokens, TILE_TOKENS)
    tile = tl.program_id(0)
    longest = 0
    for start in range(0, num_reqs, REQUESTS_AT_ONCE):
        request_B = start + tl.arange(0, REQUESTS_AT_ONCE)
        longest = tl.maximum(
            longest, tl.max(tl.load(seq_lens + request_B, mask=request_B < num_reqs, other=0), 0)
        )
    width = tl.cdiv(longest, BLOCK_SIZE)

    if tile < num_token_tiles:
        token_T = tile * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
        num_begun_T = tl.zeros([TILE_TOKENS], dtype=tl.int32)
        for start in range(0, num_reqs, REQUESTS_AT_ONCE):
            request_B = start + tl.arange(0, REQUESTS_AT_ONCE)
            is_request = request_B < num_reqs
            first_B = tl.load(query_start_loc + request_B, mask=is_request, other=0)
            has_begun = is_request[None, :] & (first_B[None, :] <= token_T[:, None])
            num_begun_T += tl.sum(has_begun.to(tl.int32), 1)
        is_real = token_T < tl.load(query_start_loc + num_reqs)
        request_T = num_begun_T - 1
        end_T = tl.load(query_start_loc + request_T + 1, mask=is_real, other=0)
        length_T = tl.load(seq_lens + request_T, mask=is_real, other=0)
        position_T = tl.where(is_real, length_T - end_T + token_T, 0)
        place_T = request_T * width + position_T // BLOCK_SIZE
        block_T = tl.load(packed_tables + place_T, mask=is_real, other=0)
        is_token = token_T < num_tokens
        tl.store(positions_T + token_T, position_T, mask=is_token)
        tl.store(slot_mapping_T + token_T, block_T * BLOCK_SIZE + position_T % BLOCK_SIZE, mask=is_token)
    else:
        column_M = (tile - num_token_tiles) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        for start in range(0, num_reqs, REQUESTS_AT_ONCE):
            request_B = start + tl.arange(0, REQUESTS_AT_ONCE)
            is_request = request_B < num_reqs
            length_B = tl.load(seq_lens + request_B, mask=is_request, other=0)
            is_known = (length_B > 0)[None, :] & (column_M < width)[:, None]
            place_MB = request_B[None, :] * width + column_M[:, None]
            block_MB = tl.load(packed_tables + place_MB, mask=is_known, other=0)
            target_MB = block_table_BM + request_B[None, :] * stride_b + column_M[:, None] * stride_m
            is_entry = is_request[None, :] & (column_M < num_columns)[:, None]
            tl.store(target_MB, block_MB, mask=is_entry)

"""Triton kernels that give tokens to the experts of a mixture: routing, and grouping by expert.

Nothing is counted on the host. Routing gives each chunk of tokens its experts and counts them; grouping turns
the counts into the order of *slots* (a slot is one token with one of its experts) sorted by expert, and into
*blocks*: an expert, and up to ``block_p`` of its slots. There are as many blocks as the worst routing of so
many tokens could need; what this one leaves empty stands at the end. Rows of padding choose no expert, so
they are in no slot and no block, and no count sees them. There are no atomics: every sum has one owner and
one order, so results are the same bits in every run. Read ``moe_product_jit.py`` next.

Shapes: T tokens, N experts, K experts per token, P = T * K slots, C chunks, B blocks (expert, first place,
number of slots), E hidden size, I input and O output features of a product.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: allow-untyped-defs


@triton.jit(do_not_specialize=["num_tokens", "num_places", "num_blocks", "block_p"])
def route_kernel(
    logits_TN,
    query_start_loc,
    weights_TK,
    experts_TK,
    slots_P,
    blocks_B3,
    counts_N,
    ranks_TN,
    chunk_counts_CN,
    logits_stride_t,
    num_tokens,
    num_places,
    num_blocks,
    block_p,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    IS_ALONE: tl.constexpr,
    FILL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per ``CHUNK`` tokens, a warp for each: softmax, the ``TOP_K`` best experts, and what
    ``group_kernel`` needs of them: their ranks (``TOP_K``: not chosen) and counts.

    Of equal probabilities the lower index wins. A row with a NaN or an infinity gets the first experts and
    NaN weights, so that its result is NaN. Rows outside ``query_start_loc[0] .. [num_places]`` choose expert
    ``NUM_EXPERTS``, with weight 0. With ``IS_ALONE`` there is one chunk, and the program groups it too.
    """
    token_T = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert_N = tl.arange(0, EXPERTS_PAD)
    is_expert = (expert_N < NUM_EXPERTS)[None, :]
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first, last = tl.load(query_start_loc), tl.load(query_start_loc + num_places)
    is_token = token_T < num_tokens
    is_real = is_token & (token_T >= first) & (token_T < last)
    source = logits_TN + token_T.to(tl.int64)[:, None] * logits_stride_t + expert_N[None, :]
    # Loads do not wait for the limits: what stands in rows of padding is replaced.
    logits = tl.load(source, mask=is_token[:, None] & is_expert, other=0.0).to(tl.float32)
    logits = tl.where(is_real[:, None], logits, 0.0)
    is_broken_T = tl.max(((logits - logits) != 0.0).to(tl.int32), 1) != 0  # NaN or infinite
    logits = tl.where(is_broken_T[:, None], 0.0, logits)
    logits = tl.where(is_expert, logits, float("-inf"))
    exponent = tl.exp(logits - tl.max(logits, 1)[:, None])
    probability = exponent / tl.sum(exponent, 1)[:, None]

    # As integers, which one instruction compares for a warp, and which have the order of floats that are at
    # least 0. -1 is taken already, or no expert.
    left = tl.where(is_expert, probability.to(tl.int32, bitcast=True), -1)
    rank_TN = tl.full([CHUNK, EXPERTS_PAD], TOP_K, dtype=tl.int32)
    total = tl.full([CHUNK], 0.0 if RENORMALIZES else 1.0, dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.max(left, 1)
        index = tl.min(tl.where(left == best[:, None], expert_N[None, :], EXPERTS_PAD), 1)
        is_taken = expert_N[None, :] == index[:, None]
        left = tl.where(is_taken, -1, left)
        rank_TN = tl.where(is_taken, k, rank_TN)
        if RENORMALIZES:
            total += best.to(tl.float32, bitcast=True)
    weight = tl.where(is_broken_T[:, None], float("nan"), probability / total[:, None])
    slot = token_T[:, None] * TOP_K + rank_TN
    is_best = is_token[:, None] & (rank_TN < TOP_K)  # rows of padding have such too: all their logits are 0
    tl.store(weights_TK + slot, tl.where(is_real[:, None], weight, 0.0), mask=is_best)
    tl.store(experts_TK + slot, tl.where(is_real[:, None], expert_N[None, :], NUM_EXPERTS), mask=is_best)

    rank_TN = tl.where(is_real[:, None], rank_TN, TOP_K)
    chosen = (rank_TN < TOP_K).to(tl.int32)
    count_N = tl.sum(chosen, 0)
    if IS_ALONE:
        offset_N = tl.cumsum(count_N, 0) - count_N
        _write_slots(slots_P, offset_N, token_T, rank_TN, TOP_K)
        tl.store(counts_N + expert_N, count_N, mask=expert_N < NUM_EXPERTS)
        num_N = (count_N > 0).to(tl.int32)
        _write_blocks(blocks_B3, count_N, offset_N, num_N, 0, num_blocks, block_p, EXPERTS_PAD, FILL)
    else:
        tl.store(ranks_TN + token_T[:, None] * EXPERTS_PAD + expert_N[None, :], rank_TN.to(tl.int8))
        tl.store(chunk_counts_CN + tl.program_id(0) * EXPERTS_PAD + expert_N, count_N)


@triton.jit(do_not_specialize=["num_chunks", "num_blocks", "block_p"])
def group_kernel(
    ranks_TN,
    chunk_counts_CN,
    slots_P,
    blocks_B3,
    counts_N,
    num_chunks,
    num_blocks,
    block_p,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNK_TILE: tl.constexpr,
    FILL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per chunk: put its slots behind those of the chunks before it, expert by expert, and write
    its share of the blocks. Every program adds the counts of all chunks up for itself, ``CHUNK_TILE`` at a
    time: they are few."""
    chunk = tl.program_id(0)
    token_T = chunk * CHUNK + tl.arange(0, CHUNK)
    expert_N = tl.arange(0, EXPERTS_PAD)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rank_TN = tl.load(ranks_TN + token_T[:, None] * EXPERTS_PAD + expert_N[None, :]).to(tl.int32)
    before_N = tl.zeros([EXPERTS_PAD], dtype=tl.int32)
    count_N = tl.zeros([EXPERTS_PAD], dtype=tl.int32)
    for first in range(0, num_chunks, CHUNK_TILE):
        chunk_C = first + tl.arange(0, CHUNK_TILE)
        source = chunk_counts_CN + chunk_C[:, None] * EXPERTS_PAD + expert_N[None, :]
        found = tl.load(source, mask=(chunk_C < num_chunks)[:, None], other=0)
        count_N += tl.sum(found, 0)
        before_N += tl.sum(tl.where((chunk_C < chunk)[:, None], found, 0), 0)
    offset_N = tl.cumsum(count_N, 0) - count_N
    _write_slots(slots_P, offset_N + before_N, token_T, rank_TN, TOP_K)
    if chunk == 0:
        tl.store(counts_N + expert_N, count_N, mask=expert_N < NUM_EXPERTS)
    num_N = (count_N + block_p - 1) // block_p
    _write_blocks(blocks_B3, count_N, offset_N, num_N, chunk, num_blocks, block_p, EXPERTS_PAD, FILL)


@triton.jit
def _write_slots(slots_P, first_N, token_T, rank_TN, TOP_K: tl.constexpr):
    """The slots of these tokens, from ``first_N`` of each expert on, in the order of tokens."""
    is_chosen = rank_TN < TOP_K
    chosen = is_chosen.to(tl.int32)
    place = first_N[None, :] + tl.cumsum(chosen, 0) - chosen
    tl.store(slots_P + place, token_T[:, None] * TOP_K + rank_TN, mask=is_chosen)


@triton.jit
def _write_blocks(
    blocks_B3,
    count_N,
    offset_N,
    num_N,
    chunk,
    num_blocks,
    block_p,
    EXPERTS_PAD: tl.constexpr,
    FILL: tl.constexpr,
):
    """Every expert's block number ``chunk``, of ``num_N``, which reaches all: no chunk has more tokens than a
    block slots. And ``FILL`` blocks from ``chunk * FILL`` on are marked empty where they lie behind the last
    one."""
    expert_N = tl.arange(0, EXPERTS_PAD)
    first_N = tl.cumsum(num_N, 0) - num_N
    is_block = chunk < num_N
    target = blocks_B3 + (first_N + chunk) * 3
    tl.store(target, expert_N, mask=is_block)
    tl.store(target + 1, offset_N + chunk * block_p, mask=is_block)
    tl.store(target + 2, tl.minimum(count_N - chunk * block_p, block_p), mask=is_block)
    block_B = chunk * FILL + tl.arange(0, FILL)
    is_empty = (block_B >= tl.sum(num_N, 0)) & (block_B < num_blocks)
    for part in tl.static_range(3):
        tl.store(blocks_B3 + block_B * 3 + part, 0, mask=is_empty)

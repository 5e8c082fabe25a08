"""The Triton kernels themselves, apart so that only their users import Triton.

``TRITON_INTERPRET=1`` before the first import runs them on CPU tensors; that is how they are tested without a
GPU. Arithmetic is float32; results are rounded where the torch forward rounds, so that the two differ by the
order of sums only. The number of rows is known to the grid alone, never an argument: an argument of value 1
would be compiled in.

``EARLY`` kernels are launched while the kernel before them still runs (programmatic dependent launch, Hopper
and later), and let the next one start early too. Before ``gdc_wait`` they read only what no kernel of a step
writes: weights, the rotary table, the step's positions, slots, lengths and block tables, keys of earlier
steps; they write nothing. Where positions, slots and block tables are not staged, one kernel of the step does
write them, in front of all others (``step_arrays.py``): so ``embed_norm_kernel``, which comes behind it, lets
the next one start behind its own wait only.

Shapes in names: T tokens, E hidden size, I features of gate and up each, H query heads, K key/value heads,
G = H + 2K heads of a merged q/k/v row, D head size, F = D / 2, P positions, N cache blocks, S slots per
block, R sampled rows, V vocabulary, C chunks of the vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: allow-untyped-defs


@triton.jit
def prefetch(pointer):
    """Call the lines that ``pointer`` (of any shape) points to into the second-level cache; on GPUs only."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointer], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def write_rms_norm(row_E, weight, normed_TE, token, element, is_element, eps, SIZE: tl.constexpr):
    """The norm of one row, as every kernel that ends in one makes it."""
    value_E = row_E.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value_E * value_E, 0) / SIZE + eps)
    normed_E = (value_E * scale * weight).to(normed_TE.dtype.element_ty)
    tl.store(normed_TE + token * SIZE + element, normed_E, mask=is_element)


@triton.jit
def rms_norm_kernel(
    update_TE,
    residual_TE,
    weight_E,
    sum_TE,
    normed_TE,
    update_stride_t,
    residual_stride_t,
    eps,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    HAS_UPDATE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per row: ``sum = residual + update``, ``normed = norm(sum) * weight``.

    ``NUM_PARTS`` > 1: ``update`` is ``[NUM_PARTS, T, E]`` in float32 and contiguous; its parts are added in
    order and rounded once, as the product would have been that they come from.
    """
    token = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, SIZE_PAD)
    is_element = element < SIZE
    weight = tl.load(weight_E + element, mask=is_element, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row_E = tl.load(residual_TE + token * residual_stride_t + element, mask=is_element, other=0.0)
    if HAS_UPDATE:
        source = update_TE + token * update_stride_t + element
        update = tl.load(source, mask=is_element, other=0.0)
        if NUM_PARTS > 1:
            part_stride = tl.num_programs(0).to(tl.int64) * SIZE
            for part in tl.static_range(1, NUM_PARTS):
                update += tl.load(source + part * part_stride, mask=is_element, other=0.0)
            update = update.to(sum_TE.dtype.element_ty)
        row_E = (row_E.to(tl.float32) + update.to(tl.float32)).to(sum_TE.dtype.element_ty)
        tl.store(sum_TE + token * SIZE + element, row_E, mask=is_element)
    write_rms_norm(row_E, weight, normed_TE, token, element, is_element, eps, SIZE)


@triton.jit
def embed_norm_kernel(
    input_ids_T,
    drawn_rows_T,
    drawn_R,
    embedding_VE,
    weight_E,
    hidden_TE,
    normed_TE,
    embedding_stride_v,
    eps,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per token: its row of the embedding, and that row's norm."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, SIZE_PAD)
    is_element = element < SIZE
    weight = tl.load(weight_E + element, mask=is_element, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()  # first: see the top of this file
        tl.extra.cuda.gdc_launch_dependents()
    drawn = tl.load(drawn_R + tl.load(drawn_rows_T + token)).to(tl.int64)
    token_id = tl.maximum(tl.load(input_ids_T + token).to(tl.int64), drawn)
    row_E = tl.load(embedding_VE + token_id * embedding_stride_v + element, mask=is_element, other=0.0)
    tl.store(hidden_TE + token * SIZE + element, row_E, mask=is_element)
    write_rms_norm(row_E, weight, normed_TE, token, element, is_element, eps, SIZE)


@triton.jit
def rotate_heads_kernel(
    qkv_TC,
    norm_weight_GD,
    rope_P2F,
    positions_T,
    slot_mapping_T,
    rotated_TGD,
    k_cache,
    v_cache,
    qkv_stride_t,
    rotated_stride_t,
    cache_stride_n,
    cache_stride_s,
    cache_stride_k,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per token and tile of heads: norm and rotate queries and keys; keys and values to their
    slot.

    The two halves of a head are two tiles, because a rotation pairs element i with element i + F. Without a
    cache the rotated keys follow the queries in ``rotated``, and values are left where they are. Without
    positions a kernel of this step has made the table, a row per token: it is read behind the wait.
    """
    token = tl.program_id(0).to(tl.int64)
    head_G = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    dim_F = tl.arange(0, HALF_PAD)
    is_dim = (dim_F < HALF)[None, :]
    is_rotated = (head_G < NUM_HEADS + NUM_KV_HEADS)[:, None]
    is_element = (head_G < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & is_dim

    position = token
    if HAS_POSITIONS:
        position = tl.load(positions_T + token).to(tl.int64)
    angle = rope_P2F + position * (2 * HALF) + dim_F
    if HAS_POSITIONS:
        cosine = tl.load(angle, mask=dim_F < HALF, other=0.0).to(tl.float32)[None, :]
        sine = tl.load(angle + HALF, mask=dim_F < HALF, other=0.0).to(tl.float32)[None, :]
    if HAS_NORM:
        weight = norm_weight_GD + head_G[:, None] * (2 * HALF) + dim_F[None, :]
        has_weight = is_rotated & is_dim
        first_weight = tl.load(weight, mask=has_weight, other=0.0).to(tl.float32)
        second_weight = tl.load(weight + HALF, mask=has_weight, other=0.0).to(tl.float32)
    if HAS_CACHE:
        slot = tl.load(slot_mapping_T + token).to(tl.int64)
        place = slot // BLOCK_SIZE * cache_stride_n + slot % BLOCK_SIZE * cache_stride_s
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    if not HAS_POSITIONS:
        cosine = tl.load(angle, mask=dim_F < HALF, other=0.0).to(tl.float32)[None, :]
        sine = tl.load(angle + HALF, mask=dim_F < HALF, other=0.0).to(tl.float32)[None, :]
    source = qkv_TC + token * qkv_stride_t + head_G[:, None] * (2 * HALF) + dim_F[None, :]
    first_raw = tl.load(source, mask=is_element, other=0.0)
    second_raw = tl.load(source + HALF, mask=is_element, other=0.0)
    dtype = rotated_TGD.dtype.element_ty
    first, second = first_raw.to(tl.float32), second_raw.to(tl.float32)
    if HAS_NORM:
        square_sum = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(square_sum / (2 * HALF) + eps)[:, None]
        first = ((first * scale).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
    rotated_first = ((first * cosine).to(dtype).to(tl.float32) - second * sine).to(dtype)
    rotated_second = ((second * cosine).to(dtype).to(tl.float32) + first * sine).to(dtype)

    target = rotated_TGD + token * rotated_stride_t + head_G[:, None] * (2 * HALF) + dim_F[None, :]
    if HAS_CACHE:
        is_query = (head_G < NUM_HEADS)[:, None] & is_dim
        is_key = (head_G >= NUM_HEADS)[:, None] & is_rotated & is_dim
        key = k_cache + place + (head_G - NUM_HEADS)[:, None] * cache_stride_k + dim_F[None, :]
        tl.store(key, rotated_first.to(k_cache.dtype.element_ty), mask=is_key)
        tl.store(key + HALF, rotated_second.to(k_cache.dtype.element_ty), mask=is_key)
        is_value = (head_G >= NUM_HEADS + NUM_KV_HEADS)[:, None] & is_element
        value_head = (head_G - NUM_HEADS - NUM_KV_HEADS)[:, None]
        value = v_cache + place + value_head * cache_stride_k + dim_F[None, :]
        tl.store(value, first_raw.to(v_cache.dtype.element_ty), mask=is_value)
        tl.store(value + HALF, second_raw.to(v_cache.dtype.element_ty), mask=is_value)
    else:
        is_query = is_rotated & is_dim
    tl.store(target, rotated_first, mask=is_query)
    tl.store(target + HALF, rotated_second, mask=is_query)


@triton.jit
def silu_mul_kernel(
    gate_up_TI, out_TI, gate_up_stride_t, SIZE: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr
):
    """One program per row and tile: ``silu(gate) * up`` of a merged row."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_element = element < SIZE
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = gate_up_TI + token * gate_up_stride_t + element
    gate = tl.load(source, mask=is_element, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=is_element, other=0.0).to(tl.float32)
    dtype = out_TI.dtype.element_ty
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_TI + token * SIZE + element, (activated * up).to(dtype), mask=is_element)


@triton.jit
def best_of_chunk_kernel(
    raw_RV,
    logits_RV,
    needs_logits_1,
    best_RC,
    index_RC,
    raw_stride_r,
    logits_stride_r,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per row and chunk of the vocabulary: the chunk's best logit and its index; its float32
    logits, if the flag says that they are needed.

    A chunk with a NaN has the best value NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    element = chunk * TILE + tl.arange(0, TILE)
    is_element = element < SIZE
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    is_written = is_element & (tl.load(needs_logits_1) != 0)
    raw = tl.load(raw_RV + row * raw_stride_r + element, mask=is_element, other=float("-inf"))
    value = raw.to(tl.float32)
    tl.store(logits_RV + row * logits_stride_r + element, value, mask=is_written)
    has_nan = tl.max((value != value).to(tl.int32), 0)
    best, index = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    target = row * tl.num_programs(1) + chunk
    tl.store(best_RC + target, tl.where(has_nan != 0, float("nan"), best))
    tl.store(index_RC + target, chunk * TILE + index.to(tl.int32))


@triton.jit
def best_of_row_kernel(
    best_RC,
    index_RC,
    tokens_R,
    INVALID: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per row: the index of its best chunk; ``INVALID`` where a chunk saw a NaN."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS_PAD)
    is_chunk = chunk < NUM_CHUNKS
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    best_C = tl.load(best_RC + row * NUM_CHUNKS + chunk, mask=is_chunk, other=float("-inf"))
    has_nan = tl.max((best_C != best_C).to(tl.int32), 0)
    _, winner = tl.max(best_C, 0, return_indices=True, return_indices_tie_break_left=True)
    index = tl.load(index_RC + row * NUM_CHUNKS + winner).to(tl.int64)
    tl.store(tokens_R + row, tl.where(has_nan != 0, INVALID, index))

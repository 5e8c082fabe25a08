"""The Triton kernels of random sampling; what they must compute is in ``sampling/sampler.py``.

A row's cut-off is found without a sort and without a plane of the row's size. A sorted sample of the row
gives splitters; one pass counts and weighs what is better than each of them; the cut-off then lies between
two neighbours, and the few thousand tokens between those are listed and searched by bisecting the bits of a
float. Should too many lie there (ties), the search reads the whole row instead: slower, the same result.
Sums are made in an order that depends on the row's length alone, never on the number of rows, so a draw does
not depend on the batch. Rows whose temperature is 0 stop after the first kernel. Read ``sample.py`` for the
order of the launches, ``sample_parts_jit.py`` for the parts that several kernels share.

Shapes in names: R rows, V vocabulary, C chunks of the vocabulary, N splitters, L listed tokens. A *gap* is
how far a logit lies below its row's best; gaps are ordered as the bits of their floats are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.kernels.sample_parts_jit import (
    INFINITY_BITS,
    STATE_BUDGET,
    STATE_COLUMN,
    STATE_CUT,
    STATE_SIZE,
    STATE_TIES,
    bracket_of,
    cut_of,
    first_beyond,
    first_column,
    gap_below_best,
    has_cut,
    row_best,
    sum_below,
    sum_tile,
    tokens_between,
    uniform_of,
    weight_of_gap,
)

# mypy: allow-untyped-defs


@triton.jit
def best_and_splitters_kernel(
    logits_RV,
    best_RC,
    index_RC,
    splitter_RN,
    temperature_R,
    top_k_R,
    top_p_R,
    logits_stride_r,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    NUM_SPLITTERS: tl.constexpr,
    SAMPLES: tl.constexpr,
    FILTERED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per row and chunk: the chunk's best logit (NaN if it holds one) and its index. With filters
    one more per row: logits that split it into parts of about equal size, best first, the last -inf."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = logits_RV + row * logits_stride_r
    if chunk < NUM_CHUNKS:
        element = chunk * CHUNK + tl.arange(0, CHUNK)
        value = tl.load(source + element, mask=element < SIZE, other=float("-inf"))
        has_nan = tl.max((value != value).to(tl.int32), 0)
        best, index = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(best_RC + row * NUM_CHUNKS + chunk, tl.where(has_nan != 0, float("nan"), best))
        tl.store(index_RC + row * NUM_CHUNKS + chunk, chunk * CHUNK + index.to(tl.int32))
    elif FILTERED:  # noqa: SIM102  (known when it is compiled, so not one condition with the next)
        if has_cut(row, temperature_R, top_k_R, top_p_R):
            place = (tl.arange(0, SAMPLES).to(tl.int64) * SIZE // SAMPLES).to(tl.int32)
            value = tl.load(source + place)
            value = tl.sort(tl.where(value == value, value, float("-inf")), descending=True)
            last_N = tl.min(tl.reshape(value, (NUM_SPLITTERS, SAMPLES // NUM_SPLITTERS)), 1)
            number_N = tl.arange(0, NUM_SPLITTERS)
            last_N = tl.where(number_N == NUM_SPLITTERS - 1, float("-inf"), last_N)
            tl.store(splitter_RN + row * NUM_SPLITTERS + number_N, last_N)


@triton.jit
def weigh_splitters_kernel(
    logits_RV,
    best_RC,
    splitter_RN,
    count_RCN,
    mass_RCN,
    temperature_R,
    top_k_R,
    top_p_R,
    logits_stride_r,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    NUM_SPLITTERS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per row and chunk: how many tokens are better than each splitter, and their mass."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if not has_cut(row, temperature_R, top_k_R, top_p_R):
        return
    temperature = tl.load(temperature_R + row)
    best = row_best(best_RC, row, NUM_CHUNKS, CHUNKS_PAD)
    number_N = tl.arange(0, NUM_SPLITTERS)
    splitter_N = gap_below_best(tl.load(splitter_RN + row * NUM_SPLITTERS + number_N), best)
    # A thread has its own elements and all splitters: nothing is computed twice, and there is one reduction.
    count_NT = tl.zeros((NUM_SPLITTERS, TILE), tl.int32)
    mass_NT = tl.zeros((NUM_SPLITTERS, TILE), tl.float32)
    for start in tl.range(0, CHUNK, TILE, loop_unroll_factor=4):
        element = chunk * CHUNK + start + tl.arange(0, TILE)
        value = tl.load(logits_RV + row * logits_stride_r + element, mask=element < SIZE, other=float("-inf"))
        gap = gap_below_best(value, best)
        weight = weight_of_gap(gap, temperature)
        is_better = gap[None, :] < splitter_N[:, None]
        count_NT += is_better.to(tl.int32)
        mass_NT += tl.where(is_better, weight[None, :], 0.0)
    count_N = tl.sum(count_NT, 1)
    mass_N = tl.sum(mass_NT, 1)
    target = (row * NUM_CHUNKS + chunk) * NUM_SPLITTERS + number_N
    tl.store(count_RCN + target, count_N)
    tl.store(mass_RCN + target, mass_N)


@triton.jit
def list_between_kernel(
    logits_RV,
    best_RC,
    splitter_RN,
    count_RCN,
    gap_RL,
    state_RS,
    temperature_R,
    top_k_R,
    top_p_R,
    logits_stride_r,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    NUM_SPLITTERS: tl.constexpr,
    LIST: tl.constexpr,
    BY_MASS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per row and chunk: list the gaps between the two splitters that the cut-off lies between,
    in the order of the vocabulary, if there is room for those of the whole row."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if not has_cut(row, temperature_R, top_k_R, top_p_R):
        return
    if BY_MASS:
        column = tl.load(state_RS + row * STATE_SIZE + STATE_COLUMN).to(tl.int32)
    else:
        top_k = tl.load(top_k_R + row)
        if top_k <= 0:
            return
        column = first_column(count_RCN, row, top_k, NUM_CHUNKS, CHUNKS_PAD, NUM_SPLITTERS)
    if column >= NUM_SPLITTERS:
        return
    between_C = tokens_between(count_RCN, row, column, NUM_CHUNKS, CHUNKS_PAD, NUM_SPLITTERS)
    if tl.sum(between_C, 0) > LIST:
        return
    before = tl.sum(tl.where(tl.arange(0, CHUNKS_PAD) < chunk, between_C, 0), 0)
    best = row_best(best_RC, row, NUM_CHUNKS, CHUNKS_PAD)
    low, high = bracket_of(splitter_RN, row, column, best, NUM_SPLITTERS)
    element = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits_RV + row * logits_stride_r + element, mask=element < SIZE, other=float("-inf"))
    gap = gap_below_best(value, best)
    is_between = (gap >= low) & (gap < high)
    place = before + tl.cumsum(is_between.to(tl.int32), 0) - 1
    tl.store(gap_RL + row * LIST + place, gap, mask=is_between & (place < LIST))


@triton.jit
def find_cut_kernel(
    logits_RV,
    best_RC,
    splitter_RN,
    count_RCN,
    mass_RCN,
    gap_RL,
    state_RS,
    temperature_R,
    top_k_R,
    top_p_R,
    logits_stride_r,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    NUM_SPLITTERS: tl.constexpr,
    LIST: tl.constexpr,
    BY_MASS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per row. First (by count) the cut-off of top-k, and from what it leaves the budget of top-p
    and where that will be reached; then (by mass) the cut-off of top-p."""
    row = tl.program_id(0).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if not has_cut(row, temperature_R, top_k_R, top_p_R):
        return
    temperature = tl.load(temperature_R + row)
    best = row_best(best_RC, row, NUM_CHUNKS, CHUNKS_PAD)
    state = state_RS + row * STATE_SIZE
    number_N = tl.arange(0, NUM_SPLITTERS)
    chunk_C = tl.arange(0, CHUNKS_PAD)
    cell_CN = (row * NUM_CHUNKS + chunk_C[:, None]) * NUM_SPLITTERS + number_N[None, :]
    is_chunk_C1 = (chunk_C < NUM_CHUNKS)[:, None]
    mass_CN = tl.load(mass_RCN + cell_CN, mask=is_chunk_C1, other=0.0)
    mass_N = tl.sum(mass_CN.to(tl.float64), 0)
    if BY_MASS:
        column = tl.load(state + STATE_COLUMN).to(tl.int32)
        if column >= NUM_SPLITTERS:
            return
        budget = tl.load(state + STATE_BUDGET)
        old_cut = tl.load(state + STATE_CUT).to(tl.int32)
        old_ties = tl.load(state + STATE_TIES)
        base = tl.sum(tl.where(number_N == column - 1, mass_N, 0.0), 0)
    else:
        top_k = tl.load(top_k_R + row)
        old_cut = tl.full((), INFINITY_BITS, tl.int32)
        old_ties = tl.full((), SIZE, tl.float64)
        column = tl.full((), NUM_SPLITTERS, tl.int32)
        budget = top_k.to(tl.float64)
        base = tl.zeros((), tl.float64)
        if top_k > 0:
            count_CN = tl.load(count_RCN + cell_CN, mask=is_chunk_C1, other=0)
            count_N = tl.sum(count_CN, 0)
            column = tl.sum((count_N < top_k).to(tl.int32), 0)
            base = tl.sum(tl.where(number_N == column - 1, count_N, 0), 0).to(tl.float64)
    cut = old_cut
    ties = old_ties
    mass = tl.sum(tl.where(number_N == NUM_SPLITTERS - 1, mass_N, 0.0), 0)
    if column < NUM_SPLITTERS:
        low, high = bracket_of(splitter_RN, row, column, best, NUM_SPLITTERS)
        num_between = tl.sum(tokens_between(count_RCN, row, column, NUM_CHUNKS, CHUNKS_PAD, NUM_SPLITTERS), 0)
        source = logits_RV + row * logits_stride_r
        listed = gap_RL + row * LIST
        low_bits = low.to(tl.int32, bitcast=True)
        fits = low_bits
        exceeds = tl.minimum(high.to(tl.int32, bitcast=True), old_cut + 1)
        below = base
        if (num_between <= TILE) & (num_between <= LIST):
            place = tl.arange(0, TILE)
            gap = tl.load(listed + place, mask=place < num_between, other=float("inf"))
            weight = weight_of_gap(gap, temperature)  # once: the search itself stays in registers
            while exceeds - fits > 1:
                trial = fits + (exceeds - fits) // 2
                found = base + sum_tile(gap, weight, trial, low_bits, BY_MASS)
                is_fit = found < budget
                fits = tl.where(is_fit, trial, fits)
                exceeds = tl.where(is_fit, exceeds, trial)
                below = tl.where(is_fit, found, below)
        else:
            while exceeds - fits > 1:
                trial = fits + (exceeds - fits) // 2
                found = base + sum_below(
                    trial, low_bits, listed, num_between, source, best, temperature, SIZE, TILE, LIST, BY_MASS
                )
                is_fit = found < budget
                fits = tl.where(is_fit, trial, fits)
                exceeds = tl.where(is_fit, exceeds, trial)
                below = tl.where(is_fit, found, below)
        cut = fits
        cut_weight = weight_of_gap(cut.to(tl.float32, bitcast=True), temperature)
        if BY_MASS:
            share = (budget - below) / tl.maximum(cut_weight, 1e-37).to(tl.float64)
            new_ties = tl.minimum(tl.ceil(share), SIZE * 1.0)
            ties = tl.where(cut == old_cut, tl.minimum(new_ties, old_ties), new_ties)
        else:
            ties = budget - below
            mass = tl.sum(tl.where(number_N == column - 1, mass_N, 0.0), 0) + sum_below(
                cut, low_bits, listed, num_between, source, best, temperature, SIZE, TILE, LIST, True
            )
            mass += ties * cut_weight.to(tl.float64)
    tl.store(state + STATE_CUT, cut.to(tl.float64))
    tl.store(state + STATE_TIES, ties)
    if not BY_MASS:
        top_p = tl.load(top_p_R + row)
        next_budget = top_p.to(tl.float64) * mass
        next_column = tl.sum((mass_N < next_budget).to(tl.int32), 0)
        tl.store(state + STATE_BUDGET, next_budget)
        tl.store(state + STATE_COLUMN, tl.where(top_p < 1.0, next_column, NUM_SPLITTERS).to(tl.float64))


@triton.jit
def weigh_kept_kernel(
    logits_RV,
    best_RC,
    state_RS,
    mass_RC,
    ties_RC,
    temperature_R,
    top_k_R,
    top_p_R,
    min_p_R,
    logits_stride_r,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    FILTERED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per row and chunk: the mass of what is better than the cut-off, and the number of tokens at
    it."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    temperature = tl.load(temperature_R + row)
    if temperature <= 0:
        return
    best = row_best(best_RC, row, NUM_CHUNKS, CHUNKS_PAD)
    element = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits_RV + row * logits_stride_r + element, mask=element < SIZE, other=float("-inf"))
    gap = gap_below_best(value, best)
    weight = weight_of_gap(gap, temperature)
    if FILTERED:
        cut, _ = cut_of(row, state_RS, temperature_R, top_k_R, top_p_R, SIZE)
        gap_bits = gap.to(tl.int32, bitcast=True)
        weight = tl.where((gap_bits < cut) & (weight >= tl.load(min_p_R + row)), weight, 0.0)
        is_tie = (gap_bits == cut) & (element < SIZE)
        tl.store(ties_RC + row * NUM_CHUNKS + chunk, tl.sum(is_tie.to(tl.int32), 0))
    tl.store(mass_RC + row * NUM_CHUNKS + chunk, tl.sum(weight, 0))


@triton.jit
def draw_kernel(
    logits_RV,
    best_RC,
    index_RC,
    state_RS,
    mass_RC,
    ties_RC,
    tokens_R,
    temperature_R,
    seed_R,
    index_R,
    top_k_R,
    top_p_R,
    min_p_R,
    logits_stride_r,
    INVALID: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    FILTERED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per row: the token at which the cumulative mass passes the row's random number."""
    row = tl.program_id(0).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk_C = tl.arange(0, CHUNKS_PAD)
    is_chunk_C = chunk_C < NUM_CHUNKS
    cell_C = row * NUM_CHUNKS + chunk_C
    best_C = tl.load(best_RC + cell_C, mask=is_chunk_C, other=float("-inf"))
    has_nan = tl.max((best_C != best_C).to(tl.int32), 0)
    _, winner = tl.max(best_C, 0, return_indices=True, return_indices_tie_break_left=True)
    best_token = tl.load(index_RC + row * NUM_CHUNKS + winner).to(tl.int64)
    temperature = tl.load(temperature_R + row)
    if (temperature <= 0) | (has_nan != 0):
        tl.store(tokens_R + row, tl.where(has_nan != 0, INVALID, best_token))
        return
    best = row_best(best_RC, row, NUM_CHUNKS, CHUNKS_PAD)
    mass_C = tl.load(mass_RC + cell_C, mask=is_chunk_C, other=0.0).to(tl.float64)
    if FILTERED:
        min_p = tl.load(min_p_R + row)
        cut, num_ties = cut_of(row, state_RS, temperature_R, top_k_R, top_p_R, SIZE)
        cut_weight = weight_of_gap(cut.to(tl.float32, bitcast=True), temperature)
        cut_weight = tl.where(cut_weight >= min_p, cut_weight, 0.0)
        ties_C = tl.load(ties_RC + cell_C, mask=is_chunk_C, other=0)
        ties_before_C = tl.cumsum(ties_C, 0) - ties_C
        kept_C = tl.minimum(tl.maximum(num_ties - ties_before_C, 0), ties_C)
        mass_C += kept_C.to(tl.float64) * cut_weight.to(tl.float64)
    upto_C = tl.cumsum(mass_C, 0)
    total = tl.max(upto_C, 0)
    target = uniform_of(tl.load(seed_R + row), tl.load(index_R + row)) * total
    chunk = first_beyond(chunk_C, upto_C, mass_C, target, CHUNKS_PAD)
    before = tl.sum(tl.where(chunk_C == chunk, upto_C - mass_C, 0.0), 0)

    place = tl.arange(0, CHUNK)
    element = chunk * CHUNK + place
    value = tl.load(logits_RV + row * logits_stride_r + element, mask=element < SIZE, other=float("-inf"))
    gap = gap_below_best(value, best)
    weight = weight_of_gap(gap, temperature)
    if FILTERED:
        gap_bits = gap.to(tl.int32, bitcast=True)
        is_tie = (gap_bits == cut) & (element < SIZE)
        rank = tl.sum(tl.where(chunk_C == chunk, ties_before_C, 0), 0) + tl.cumsum(is_tie.to(tl.int32), 0)
        is_kept = ((gap_bits < cut) | (is_tie & (rank <= num_ties))) & (weight >= min_p)
        weight = tl.where(is_kept, weight, 0.0)
    mass = weight.to(tl.float64)
    token = chunk * CHUNK + first_beyond(place, tl.cumsum(mass, 0), mass, target - before, CHUNK)
    tl.store(tokens_R + row, tl.where(total > 0, token.to(tl.int64), best_token))

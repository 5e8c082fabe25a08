"""What the sampling kernels share: gaps and weights, the state of a row's search, random numbers.

Every kernel recomputes a token's gap and weight from its logit in the same way, so that no plane of a row's
size is kept. The random number is that of ``sampler.uniform``, bit for bit. The kernels are in
``sample_jit.py``, with the legend of the shapes.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: allow-untyped-defs

LARGEST = tl.constexpr(3.4028234663852886e38)
INFINITY_BITS = tl.constexpr(0x7F800000)
# Per row, as the search hands it on: float64 so that one tensor holds counts and masses exactly.
STATE_CUT = tl.constexpr(0)
STATE_TIES = tl.constexpr(1)
STATE_BUDGET = tl.constexpr(2)
STATE_COLUMN = tl.constexpr(3)
STATE_SIZE = tl.constexpr(4)


@triton.jit
def has_cut(row, temperature_R, top_k_R, top_p_R):
    """Whether top-k or top-p leave anything out of this row."""
    has_filter = (tl.load(top_k_R + row) > 0) | (tl.load(top_p_R + row) < 1.0)
    return (tl.load(temperature_R + row) > 0) & has_filter


@triton.jit
def cut_of(row, state_RS, temperature_R, top_k_R, top_p_R, SIZE: tl.constexpr):
    """The bits of the row's cut-off, and how many tokens at it are kept."""
    is_cut = has_cut(row, temperature_R, top_k_R, top_p_R)
    state = state_RS + row * STATE_SIZE
    cut = tl.load(state + STATE_CUT, mask=is_cut, other=INFINITY_BITS * 1.0)
    num_ties = tl.load(state + STATE_TIES, mask=is_cut, other=SIZE * 1.0)
    return cut.to(tl.int32), num_ties.to(tl.int32)


@triton.jit
def row_best(best_RC, row, NUM_CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr):
    chunk = tl.arange(0, CHUNKS_PAD)
    best_C = tl.load(best_RC + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=float("-inf"))
    best_C = tl.where(best_C == best_C, best_C, float("-inf"))
    return tl.minimum(tl.maximum(tl.max(best_C, 0), -LARGEST), LARGEST)


@triton.jit
def gap_below_best(value, best):
    value = tl.where(value == value, value, float("-inf"))
    return best - tl.minimum(value, LARGEST)


@triton.jit
def weight_of_gap(gap, temperature):
    return tl.exp(-tl.div_rn(gap, tl.zeros_like(gap) + temperature))


@triton.jit
def bracket_of(splitter_RN, row, column, best, NUM_SPLITTERS: tl.constexpr):
    """The gaps between which the cut-off lies: the lower one may be it, the upper one is beyond."""
    splitter = splitter_RN + row * NUM_SPLITTERS + column
    high = gap_below_best(tl.load(splitter), best)
    low = gap_below_best(tl.load(splitter - 1, mask=column > 0, other=float("inf")), best)
    return tl.where(column > 0, low, 0.0), high


@triton.jit
def first_column(
    count_RCN, row, top_k, NUM_CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, NUM_SPLITTERS: tl.constexpr
):
    chunk_C = tl.arange(0, CHUNKS_PAD)
    number_N = tl.arange(0, NUM_SPLITTERS)
    cell_CN = (row * NUM_CHUNKS + chunk_C[:, None]) * NUM_SPLITTERS + number_N[None, :]
    count_CN = tl.load(count_RCN + cell_CN, mask=(chunk_C < NUM_CHUNKS)[:, None], other=0)
    return tl.sum((tl.sum(count_CN, 0) < top_k).to(tl.int32), 0)


@triton.jit
def tokens_between(
    count_RCN, row, column, NUM_CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, NUM_SPLITTERS: tl.constexpr
):
    """Per chunk: the number of tokens between splitter ``column`` and the one before."""
    chunk_C = tl.arange(0, CHUNKS_PAD)
    cell_C = count_RCN + (row * NUM_CHUNKS + chunk_C) * NUM_SPLITTERS + column
    is_chunk_C = chunk_C < NUM_CHUNKS
    better_C = tl.load(cell_C - 1, mask=is_chunk_C & (column > 0), other=0)
    return tl.load(cell_C, mask=is_chunk_C, other=0) - better_C


@triton.jit
def sum_below(
    bits,
    low_bits,
    listed,
    num_listed,
    source,
    best,
    temperature,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LIST: tl.constexpr,
    BY_MASS: tl.constexpr,
):
    """Number or mass of the tokens from gap ``low_bits`` up to, not including, ``bits``."""
    total = tl.zeros((), tl.float64)
    if num_listed <= LIST:
        start = tl.zeros((), tl.int32)
        while start < num_listed:
            place = start + tl.arange(0, TILE)
            gap = tl.load(listed + place, mask=place < num_listed, other=float("inf"))
            total += sum_tile(gap, weight_of_gap(gap, temperature), bits, low_bits, BY_MASS)
            start += TILE
    else:
        for start in range(0, SIZE, TILE):
            place = start + tl.arange(0, TILE)
            value = tl.load(source + place, mask=place < SIZE, other=float("-inf"))
            gap = gap_below_best(value, best)
            total += sum_tile(gap, weight_of_gap(gap, temperature), bits, low_bits, BY_MASS)
    return total


@triton.jit
def sum_tile(gap, weight, bits, low_bits, BY_MASS: tl.constexpr):
    gap_bits = gap.to(tl.int32, bitcast=True)
    is_below = (gap_bits < bits) & (gap_bits >= low_bits)
    if BY_MASS:
        return tl.sum(tl.where(is_below, weight, 0.0), 0).to(tl.float64)
    else:
        return tl.sum(is_below.to(tl.int32), 0).to(tl.float64)


@triton.jit
def first_beyond(place, upto, mass, target, NUM_PLACES: tl.constexpr):
    """The first place with mass whose cumulative mass exceeds the target; if rounding leaves none, the last
    with mass."""
    is_possible = mass > 0
    first = tl.min(tl.where(is_possible & (upto > target), place, NUM_PLACES), 0)
    last = tl.max(tl.where(is_possible, place, 0), 0)
    return tl.minimum(first, last)


@triton.jit
def uniform_of(seed, index):
    key = _mix(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    step = (index.to(tl.int64) + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    return (_mix(key + step) >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _mix(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)

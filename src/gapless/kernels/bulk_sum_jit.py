"""A sum over ranks of many rows in one kernel, alone or together with residual addition and norm behind it.

What ``rank_sum_jit.py`` does for a few rows costs twice the bytes (half of each word says whether it has
come), which is too much for megabytes. Here every program sends its rows as they are into the memory of each
other rank, then one flag behind them, waits for the others' flags, and adds up what has come to it. Rows are
*pushed*: stores over the link do not wait for one another, loads would.

**What orders a flag behind its rows**: all threads of the program have stored, a barrier, then one thread
exchanges the flag with release semantics at system scope, which is cumulative. On the other side one thread
sees it with acquire semantics, a barrier, and all threads read; past the first-level cache, which knows
nothing of what comes from outside.

**Why two halves and no barrier over ranks are enough**: program ``p`` has a region of its own in each rank's
memory, for each source and each of two halves, and an epoch, and every call runs all programs. A rank writes
epoch ``e + 2`` over epoch ``e`` only after its own call ``e + 1`` has ended, so after it has seen the flag
``e + 1`` of every peer's program ``p``. A peer sets that in a later kernel than its call ``e``, hence after
all of ``e`` was read. A flag may run ahead by one, so it is compared by its difference, which a counter
that overflows does not spoil. All ranks make the same calls in the same order, one at a time. Programs wait
for one another across ranks, so all of a call must be able to run at once; kernels that start early do so
when all of ours have begun.

What holds for early launches and for ranks that are gone is as in ``rank_sum_jit.py``.

``T`` rows, ``E`` elements of a row, ``P`` programs, ``R`` ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.kernels.jit import write_rms_norm

# mypy: allow-untyped-defs


@triton.jit(do_not_specialize=["num_rows"])  # or start-up would have tried one of three variants
def sum_many_rows_kernel(
    partial_TE,
    residual_TE,
    weight_E,
    sum_TE,
    normed_TE,
    inbox,
    flags,
    inbox_addresses_R,
    flag_addresses_R,
    epochs_P,
    released,
    num_rows,
    residual_stride_t,
    eps,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    REGION: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program ``p`` has rows ``p, p + P, ...``. Roundings and aliases as in ``sum_ranks_kernel``. ``REGION``
    elements of ``inbox`` are one program's, of one source and half. Slot ``k`` of a rank's memory is that of
    the rank ``k + 1`` behind it."""
    program = tl.program_id(0)
    element = tl.max_contiguous(tl.arange(0, SIZE_PAD), 8)
    is_element = element < SIZE
    dtype: tl.constexpr = partial_TE.dtype.element_ty
    ALIGNED: tl.constexpr = 128 // dtype.primitive_bitwidth  # rows and regions are multiples of 16 bytes
    if HAS_NORM:
        weight = tl.load(weight_E + element, mask=is_element, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    epoch = tl.load(epochs_P + program) + 1
    half = (epoch & 1).to(tl.int64) * (NUM_RANKS - 1)
    first = program.to(tl.int64)
    num_own = tl.cdiv(num_rows - program, NUM_PROGRAMS)
    for number in range(num_own):
        token = first + number * NUM_PROGRAMS
        own_E = tl.load(partial_TE + token * SIZE + element, mask=is_element, other=0.0)
        for step in tl.static_range(1, NUM_RANKS):
            address = tl.load(inbox_addresses_R + (RANK + step) % NUM_RANKS).to(tl.pointer_type(dtype))
            region = ((half + (NUM_RANKS - 1 - step)) * NUM_PROGRAMS + program) * REGION
            target = tl.multiple_of(address, 16) + tl.multiple_of(region + number * SIZE, ALIGNED) + element
            tl.store(target, own_E, mask=is_element)
    tl.debug_barrier()  # all threads have sent their part, and have read the epoch
    tl.store(epochs_P + program, epoch)
    for step in tl.static_range(1, NUM_RANKS):
        address = tl.load(flag_addresses_R + (RANK + step) % NUM_RANKS).to(tl.pointer_type(tl.int32))
        flag = address + (NUM_RANKS - 1 - step) * NUM_PROGRAMS + program
        tl.atomic_xchg(flag, epoch, sem="release", scope="sys")
    for slot in range(NUM_RANKS - 1):
        flag = flags + slot * NUM_PROGRAMS + program
        seen = tl.atomic_or(flag, 0, sem="acquire", scope="sys")
        while seen - epoch < 0:
            seen = tl.atomic_or(flag, 0, sem="acquire", scope="sys")
            is_released = tl.load(released, volatile=True)
            seen = tl.where(is_released != 0, epoch, seen)
    tl.debug_barrier()  # what one thread has seen is there for all

    typed_inbox = inbox.to(tl.pointer_type(dtype))
    for number in range(num_own):
        token = first + number * NUM_PROGRAMS
        if HAS_NORM:
            place = residual_TE + token * residual_stride_t + element
            residual_E = tl.load(place, mask=is_element, other=0.0)
        total_E = tl.zeros([SIZE_PAD], tl.float32)
        for source in tl.static_range(NUM_RANKS):
            if source == RANK:
                values_E = tl.load(partial_TE + token * SIZE + element, mask=is_element, other=0.0)
            else:
                behind = half + (source - RANK - 1 + NUM_RANKS) % NUM_RANKS
                region = (behind * NUM_PROGRAMS + program) * REGION
                place = typed_inbox + tl.multiple_of(region + number * SIZE, ALIGNED) + element
                values_E = tl.load(place, mask=is_element, other=0.0, cache_modifier=".cg")
            total_E += values_E.to(tl.float32)
        row_E = total_E.to(dtype)
        if HAS_NORM:
            row_E = (residual_E.to(tl.float32) + row_E.to(tl.float32)).to(sum_TE.dtype.element_ty)
        tl.store(sum_TE + token * SIZE + element, row_E, mask=is_element)
        if HAS_NORM:
            write_rms_norm(row_E, weight, normed_TE, token, element, is_element, eps, SIZE)

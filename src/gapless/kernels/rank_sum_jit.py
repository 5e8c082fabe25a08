"""A sum over ranks in one kernel, alone or together with the residual addition and the norm behind it.

Every rank writes its values into the memory of all others and waits for theirs in its own: no fence and no
separate signal, so what passes between two GPUs passes once. Values travel in **words** of 8 bytes, 4 of
which are values and 4 the number of the call (*epoch*), so that a word says by itself whether it has come:
an aligned access of 8 bytes is never seen half done (NCCL's LL protocol rests on the same). What is waited
for is read with ``volatile``, past the L1 cache, from this GPU's own memory, where words from outside arrive;
they are sent with ``.wt``, a store at system scope.

**Why two halves and no barrier are enough.** Program ``t`` (row ``t``) has, in each rank's memory, a slot for
each source and each of two halves, and an epoch of its own, which it alone counts on; calls use the halves in
turn. A rank writes epoch ``e + 2`` over epoch ``e`` only after its own call ``e + 1`` has ended, so after it
has read words of ``e + 1`` from every peer. A peer wrote those in a later kernel than its call ``e``, hence
after it had read all of ``e``; a load that has returned is not changed by what is written later. All this
concerns program ``t`` of each rank only, so calls may differ in rows, in row size and in kind, and graphs
and eager calls may alternate, as long as all ranks make the same calls in the same order, one at a time
(one stream). A program without a row does not run, on any rank, and its epoch stands still on all. Words of
older epochs in a slot (a longer row's, say) have another number and are not taken for this call's; an equal
one would be 2**32 calls old, with no call of that row size in between.

**What was written stays valid through early launches**: a program reads what kernels before it have written
(its values, the residual, the epoch) behind ``gdc_wait`` only, and every kernel between two calls waits for
the one before it, so "the call before has ended" is true there. The next kernel may start at once: it reads
what we write behind its own wait, and by then (all programs have begun) ours need nothing of it.

**A rank that is gone**: ``released`` is set by the host, and ends every wait, this one and later ones. There
is no other bound: a peer may take minutes for good (it compiles), and with the process of this rank its
kernels end too. What a released call leaves is wrong, and nobody may use it.

``T`` rows, ``E`` elements of a row, ``W`` words of a row, ``R`` ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.kernels.jit import write_rms_norm

# mypy: allow-untyped-defs


@triton.jit
def sum_ranks_kernel(
    partial_TE,
    residual_TE,
    weight_E,
    sum_TE,
    normed_TE,
    words,
    addresses_R,
    epochs_T,
    released,
    residual_stride_t,
    eps,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_PAD: tl.constexpr,
    SLOT_WORDS: tl.constexpr,
    SOURCE_WORDS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per row. ``sum`` is the sum over ranks in their order, rounded once; with a norm that plus
    ``residual``, rounded again as two kernels would, and ``normed`` its norm. ``sum`` may be ``partial``."""
    row = tl.program_id(0)
    token = row.to(tl.int64)
    # Two words, or four elements of 2 bytes, per thread and access: so no tile changes its layout.
    word = tl.max_contiguous(tl.arange(0, WORDS_PAD), 2)
    is_word = word < WORDS
    element = tl.max_contiguous(tl.arange(0, SIZE_PAD), 4)
    is_element = element < SIZE
    if HAS_NORM:
        weight = tl.load(weight_E + element, mask=is_element, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    epoch = tl.load(epochs_T + row) + 1
    source_words = partial_TE.to(tl.pointer_type(tl.int32)) + token * WORDS + word
    own_W = tl.load(source_words, mask=is_word, other=0)
    packed_W = (own_W.to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)
    slot = (epoch & 1) * (NUM_RANKS * SOURCE_WORDS) + row * SLOT_WORDS
    for step in range(1, NUM_RANKS):
        address = tl.load(addresses_R + (RANK + step) % NUM_RANKS).to(tl.pointer_type(tl.int64))
        target = tl.multiple_of(address, 16) + (slot + RANK * SOURCE_WORDS) + word
        tl.store(target, packed_W, mask=is_word, cache_modifier=".wt")
    if HAS_NORM:
        residual_E = tl.load(residual_TE + token * residual_stride_t + element, mask=is_element, other=0.0)
    tl.debug_barrier()  # all threads have read the epoch, and all of ``partial``
    tl.store(epochs_T + row, epoch)

    dtype: tl.constexpr = partial_TE.dtype.element_ty
    total_E = tl.zeros([SIZE_PAD], tl.float32)
    for source in range(NUM_RANKS):  # not unrolled: the compiler would add up, and keep all words, at the end
        values_W = own_W
        if source != RANK:
            place = words + (slot + source * SOURCE_WORDS) + word
            received_W = tl.load(place, mask=is_word, other=0, volatile=True)
            is_missing = _is_missing(received_W, epoch, is_word)
            while is_missing != 0:
                received_W = tl.load(place, mask=is_word, other=0, volatile=True)
                is_released = tl.load(released, volatile=True)
                is_missing = tl.where(is_released != 0, 0, _is_missing(received_W, epoch, is_word))
            values_W = received_W.to(tl.int32)
        total_E += _elements(values_W, dtype)
    row_E = total_E.to(dtype)
    if HAS_NORM:
        row_E = (residual_E.to(tl.float32) + row_E.to(tl.float32)).to(sum_TE.dtype.element_ty)
    tl.store(sum_TE + token * SIZE + element, row_E, mask=is_element)
    if HAS_NORM:
        write_rms_norm(row_E, weight, normed_TE, token, element, is_element, eps, SIZE)


@triton.jit
def _is_missing(received_W, epoch, is_word):
    """1 where any word is not of this call."""
    return tl.max((((received_W >> 32).to(tl.int32) != epoch) & is_word).to(tl.int32), 0)


@triton.jit
def _elements(values_W, dtype: tl.constexpr):
    """The elements in words of 4 bytes, in float32."""
    if dtype.primitive_bitwidth == 32:
        values_E = values_W.to(tl.float32, bitcast=True)
    else:
        first_W = values_W.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        second_W = (values_W >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        values_E = tl.interleave(first_W, second_W)
    return values_E

"""Tile shapes and numbers of splits of the attention kernels, as rules of shapes alone.

No autotuner: nothing may be compiled, timed or synchronised while a stream is capturing, and a bucket must
launch the same way every time. The rules come from sweeps on one H200 (``attention_kernels.py``,
``prefill_tiles.py``, ``decode_tiles.py`` and ``encoder_kernels.py`` of ``benchmarks/``). Invariant: whatever
a rule says fits in ``shared_bytes``, what a program may have of a multiprocessor's shared memory; a GPU with
less than Hopper's gets fewer stages or smaller tiles. Encoder tiles are the same on all, and fit in 99 KiB.
Used by ``triton_paged.py`` and ``triton_varlen.py``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from gapless.kernels.select import HOPPER_SHARED_BYTES, next_power_of_2, stages_that_fit

HOPPER_CONSUMER_ROWS = 64
"""Of queries, that one consumer of the kernel for Hopper has."""
MIN_TILE_ROWS = 16
"""The smallest matrix product Triton's ``dot`` takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillTile:
    """``block_q`` queries of ``pack`` heads against ``block_n`` keys at a time."""

    block_q: int
    pack: int
    block_n: int
    num_warps: int
    num_stages: int
    split_loop: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeTile:
    """``block_q`` queries of all heads of a key/value head; ``num_splits`` programs share the keys, each
    taking ``min_keys`` or more, and calling ``called_ahead`` of them before it may begin. ``loads_early``:
    the first tiles of keys are loaded before that too."""

    block_q: int
    block_n: int
    num_warps: int
    num_stages: int
    num_splits: int
    min_keys: int
    called_ahead: int
    loads_early: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderTile:
    """``block_q`` rows of one head against ``block_n`` keys at a time."""

    block_q: int
    block_n: int
    num_warps: int
    num_stages: int


@functools.lru_cache(maxsize=4096)
def prefill_tile(
    *,
    group: int,
    head_size: int,
    itemsize: int,
    num_tokens: int,
    shared_bytes: int = HOPPER_SHARED_BYTES,
) -> PrefillTile:
    """Large tiles where each tile of keys serves many queries; for short steps smaller ones, of which two run
    on a multiprocessor, without the second loop, whose pipeline would have to fill up once more."""
    head_bytes = _head_bytes(head_size, itemsize)
    has_room = shared_bytes >= _LONG_ROWS * head_bytes
    is_long = num_tokens >= _LONG_PREFILL and head_bytes <= 256 and has_room
    most_rows, block_n, num_stages = (128, 128, 3) if is_long else (64, _block_n(head_bytes), 3)
    if not is_long:
        fixed = (block_n, head_bytes, itemsize, shared_bytes)
        while (num_stages := _num_stages(3, most_rows, *fixed)) < 2 and most_rows > MIN_TILE_ROWS:
            most_rows //= 2
    # The largest power of 2 that divides the group: no row of a tile is wasted.
    pack = min(group & -group, most_rows)
    rows = min(most_rows, max(MIN_TILE_ROWS, pack * next_power_of_2(num_tokens)))
    return PrefillTile(
        block_q=rows // pack,
        pack=pack,
        block_n=block_n,
        num_warps=8 if is_long else 4,
        num_stages=num_stages,
        split_loop=num_tokens >= _LONG_PREFILL,
    )


@functools.lru_cache(maxsize=4096)
def hopper_tile(
    *,
    num_heads: int,
    group: int,
    head_size: int,
    itemsize: int,
    num_tokens: int,
    block_size: int,
    window: int,
) -> PrefillTile | None:
    """For the Gluon kernel of Hopper GPUs; None where the Triton kernel is to run. A consumer has 64 rows,
    because that is what a tensor-core product of a warpgroup takes; ``num_warps`` are those of one. Two share
    a program's keys, except where there are too few rows for all multiprocessors: there each is a program of
    its own. Fewer keys at a time leave less of a prompt's last tile behind the mask, more are quicker."""
    if head_size not in (64, 128) or itemsize != 2 or window or num_tokens < _SHORT_HOPPER_PREFILL:
        return None
    is_few = num_tokens * num_heads <= _FEW_HOPPER_ROWS
    block_n = 128 if is_few or num_tokens >= _LONG_HOPPER_PREFILL else 64
    if page_rows(block_size, block_n) < _MIN_PAGE_ROWS:
        return None
    pack = min(group & -group, HOPPER_CONSUMER_ROWS)
    return PrefillTile(
        block_q=HOPPER_CONSUMER_ROWS * (1 if is_few else 2) // pack,
        pack=pack,
        block_n=block_n,
        num_warps=4,
        num_stages=2 if block_n == 128 else 3,
        split_loop=True,
    )


@functools.lru_cache(maxsize=4096)
def encoder_tile(*, num_heads: int, num_rows: int, max_len: int, itemsize: int) -> EncoderTile:
    """Few rows against few keys at a time, of which two programs run on a multiprocessor: one's softmax goes
    beside the other's products. Many rows against twice as many keys, which was measured to be quicker."""
    is_wide = itemsize > 2
    is_small = is_wide or max_len <= 64 or num_rows * num_heads <= _FEW_ENCODER_ROWS
    return EncoderTile(
        block_q=64,
        block_n=32 if is_wide else 64 if is_small else 128,
        num_warps=4,
        num_stages=3 if is_small and not is_wide else 2,
    )


def page_rows(block_size: int, block_n: int) -> int:
    """Cache slots that lie together whatever the block table says: the largest power of 2 that divides a
    block, within a tile of ``block_n`` keys."""
    return min(block_size & -block_size, block_n)


@functools.lru_cache(maxsize=4096)
def decode_tile(
    *,
    group: int,
    head_size: int,
    itemsize: int,
    max_query_len: int,
    num_programs: int,
    max_keys: int,
    rotates: bool,
    shared_bytes: int = HOPPER_SHARED_BYTES,
) -> DecodeTile | None:
    """``num_programs``: requests times key/value heads, which splits multiply; ``max_keys``: what a block
    table can hold; ``rotates``: heads are rotated in this kernel. None where queries are too many for one
    tile."""
    group_pad = next_power_of_2(group)
    head_bytes = _head_bytes(head_size, itemsize)
    rows = max(MIN_TILE_ROWS, group_pad * next_power_of_2(max_query_len))
    if rows > max(_MAX_DECODE_ROWS, group_pad):
        return None
    is_few = num_programs <= _ENOUGH_PROGRAMS
    is_some = _ENOUGH_PROGRAMS < num_programs < 4 * _ENOUGH_PROGRAMS
    # Measured on Hopper. Most GPUs with less shared memory have no early launch, and then there is no gain.
    loads_early = rotates and rows == MIN_TILE_ROWS and head_bytes <= 256
    loads_early &= shared_bytes >= HOPPER_SHARED_BYTES
    loads_early &= num_programs < _MANY_PROGRAMS and (group <= _EARLY_GROUP or is_some)
    if rows > MIN_TILE_ROWS or head_bytes > 256:
        block_n, num_warps, num_stages = _block_n(head_bytes), 4, 3 if head_bytes > 256 else 4
    elif num_programs <= _VERY_FEW_PROGRAMS:
        block_n, num_warps, num_stages = 64, 4, 2
    elif is_few:  # most requests end with the first tile or the second
        block_n, num_warps, num_stages = 128, 8, 3
    elif is_some:
        block_n, num_warps, num_stages = 64, 4, 3 if loads_early else 4
    elif num_programs < 8 * _ENOUGH_PROGRAMS:  # small programs balance best when there are many of them
        block_n, num_warps, num_stages = 32, 2, 3 if loads_early else 4
    elif num_programs < _MANY_PROGRAMS:
        block_n, num_warps, num_stages = (16, 1, 3) if loads_early else (32, 1, 2)
    else:
        block_n, num_warps, num_stages = 32, 1, 3
    most = num_stages
    while (num_stages := _num_stages(most, rows, block_n, head_bytes, itemsize, shared_bytes)) < 2:
        if block_n <= _block_n(head_bytes):
            return None
        block_n, num_warps = block_n // 2, 4
    min_keys = max(block_n, _MIN_KEYS)
    num_splits = 1
    while (
        num_splits < _MAX_SPLITS
        and num_splits * num_programs * 2 <= _ENOUGH_PROGRAMS
        and num_splits * min_keys < max_keys
    ):
        num_splits *= 2
    return DecodeTile(
        block_q=rows // group_pad,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
        num_splits=num_splits,
        min_keys=min_keys,
        called_ahead=_CALLED_AHEAD if is_few else 0,
        loads_early=loads_early,
    )


_LONG_PREFILL = 1024
"""Tokens from which large tiles win: at 512 they leave multiprocessors idle."""
_LONG_ROWS = 128 + 2 * 2 * 128
"""Of shared memory, that large tiles need: queries, and two copies of keys and values."""
_SHORT_HOPPER_PREFILL = 512
"""Below, at 256 tokens, the Triton kernel is as quick (H200, 16 and 32 heads over 8)."""
_FEW_HOPPER_ROWS = 192 * 64
"""Of all heads: up to one and a half programs of one consumer for each of an H200's 132 multiprocessors. One
consumer beats two at 512 and 768 tokens of 16 heads (1.66 ms against 1.85 and 2.24 against 2.37 of a step of
28 layers) and is as quick at 1,024 (``h200_prefill_tiles.json``)."""
_LONG_HOPPER_PREFILL = 3072
"""At 1,024 and 2,048 tokens 64 keys at a time beat 128 by 2 and 1 %. In a step of 4,096 tokens one prompt
loses 1 % with them (``first_sweep``) and eight short ones gain 4 % (``many_short_prompts``)."""
_MIN_PAGE_ROWS = 8
"""The copy engine writes shared memory in patterns of 8 rows."""
_FEW_ENCODER_ROWS = 2 * 132 * 64
"""Of all heads: what two programs of 64 rows on each multiprocessor of an H200 take at once."""
_ENOUGH_PROGRAMS = 128
"""About one for each of 132 multiprocessors. More splits only add to the merge."""
_MANY_PROGRAMS = 16 * _ENOUGH_PROGRAMS
"""256 requests of 8 heads for keys, more than run at once: one stage more takes 10 % off attention for
lengths from 148 to 1,044, the longest first (``mixed_lengths`` in ``h200_decode_tiles.json``), and costs 1 %
of a step of short requests (*lead*). With half as many, all run at once and who has most keys ends last:
there two warps with 32 keys take a fifth less for such lengths, but 8 % more of a step of short requests
(*lead*)."""
_VERY_FEW_PROGRAMS = 8
"""One request of 8 heads for keys. Small programs are quicker there, perhaps because they leave room on their
multiprocessors for those of the product behind, which begin early: a step took 4.09 ms with tiles of 128
keys, 8 warps and 3 stages and 3.87 with these (32 heads; 16 heads 0.66 and 0.64; *lead*, ``docs/log.md``)."""
_EARLY_GROUP = 2
"""Heads of a key/value head, up to which all but the largest batches load early. Steps of the 0.6B model (2)
take 2 to 5 % less with it at 1, 16, 32 and 128 requests, those of the 8B model (4) 1 % less at 32 and 1 to
2 % more at 1, 8 and 128, perhaps because the products around attention are bound by memory there. From 2,048
programs on it costs 1 % (*lead*, ``docs/log.md``)."""
_MAX_SPLITS = 16
_MIN_KEYS = 64
_MAX_DECODE_ROWS = 64
_CALLED_AHEAD = 128
"""Where programs are few. With more the kernel is bound by memory, and what is called ahead by some comes
late for others (H200, 16 heads over 8: 2 % less of a step at batch 8, 5 % more at 128)."""


def _num_stages(most: int, rows: int, block_n: int, head_bytes: int, itemsize: int, shared_bytes: int) -> int:
    """Queries and weights of a tile stay, keys and values are copied in stages."""
    return stages_that_fit(
        most,
        stage_bytes=2 * block_n * head_bytes,
        other_bytes=rows * (head_bytes + block_n * itemsize),
        shared_bytes=shared_bytes,
    )


def _head_bytes(head_size: int, itemsize: int) -> int:
    return max(next_power_of_2(head_size), MIN_TILE_ROWS) * itemsize


def _block_n(head_bytes: int) -> int:
    """Keys of 16 KiB or less, so that three stages of keys and values fit in shared memory."""
    return 64 if head_bytes <= 256 else 32 if head_bytes <= 512 else 16

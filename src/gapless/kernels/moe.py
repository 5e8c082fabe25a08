"""A mixture of experts as operators: route tokens to experts and group them, multiply by expert; adding up is
in ``moe_sum.py``.

Every launch depends on the number of tokens alone. Who goes where is found on the device (``moe_jit.py``), so
one captured graph serves every routing, and as much work as a routing needs: blocks it leaves empty return at
once. ``query_start_loc`` tells which rows are real (from its first to its last entry, see
``attention/base.py``): the others are in no expert's block and in no count, and their results are zeros. With
a handful of tokens the weights of the chosen experts are all that matters, so tiles are small and many;
with thousands they are as large as tensor cores like. Letters as in ``moe_jit.py``. ``models/moe.py`` calls
these; ``benchmarks/moe_kernels.py`` times them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from gapless.errors import ConfigError
from gapless.graphs.ops import register_custom_op
from gapless.kernels.launch import Constants, launch
from gapless.kernels.select import (
    HOPPER_SHARED_BYTES,
    launch_options,
    next_power_of_2,
    shared_memory_bytes,
    stages_that_fit,
)

_MIN_BLOCK = 16
_MAX_ALONE = 16
"""Tokens that one program routes and groups; more take two kernels, and many multiprocessors."""
_MIN_CHUNK, _MAX_CHUNK = 4, 16
"""Tokens of a program, each with a warp: finding the best experts is one long chain of instructions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTiles:
    """How one of the two products is cut. ``block_p``: slots of a block, the same in both."""

    block_p: int
    block_o: int
    block_i: int
    weights_left: bool
    num_warps: int
    num_stages: int
    group: int = 1
    """Blocks that take each tile of weights one after another, so that those of one expert read it once."""


def block_slots(num_tokens: int, *, num_experts: int, top_k: int) -> int:
    """Slots of a block: about one and a half times what an expert gets on average, so that most experts need
    one block and read their weights once."""
    wanted = -(-3 * num_tokens * top_k // (2 * num_experts))
    return min(max(next_power_of_2(wanted), _MIN_BLOCK), 128)


def max_blocks(num_tokens: int, *, num_experts: int, top_k: int, block_p: int) -> int:
    """Blocks that the worst routing needs: every expert that is chosen may leave all but one slot of its last
    block empty."""
    num_slots = num_tokens * top_k
    num_chosen = min(num_experts, num_slots)
    return min(num_slots, (num_slots + num_chosen * (block_p - 1)) // block_p)


@functools.cache
def choose_tiles(
    num_tokens: int,
    *,
    num_experts: int,
    top_k: int,
    num_out: int,
    is_gate_up: bool,
    itemsize: int = 2,
    shared_bytes: int = HOPPER_SHARED_BYTES,
) -> ExpertTiles:
    """The tiles of a product for so many tokens, with elements of ``itemsize`` bytes, where a program has
    ``shared_bytes`` of shared memory."""
    tiles = _hopper_tiles(
        num_tokens,
        num_experts=num_experts,
        top_k=top_k,
        num_out=num_out,
        is_gate_up=is_gate_up,
        itemsize=itemsize,
    )
    rows = tiles.block_p + tiles.block_o * (2 if is_gate_up else 1)
    num_stages = stages_that_fit(
        tiles.num_stages,
        stage_bytes=rows * tiles.block_i * itemsize,
        other_bytes=0,
        shared_bytes=shared_bytes,
    )
    return replace(tiles, num_stages=max(num_stages, 1))


def _hopper_tiles(
    num_tokens: int, *, num_experts: int, top_k: int, num_out: int, is_gate_up: bool, itemsize: int
) -> ExpertTiles:
    block_p = block_slots(num_tokens, num_experts=num_experts, top_k=top_k)
    if block_p <= 32:
        # Bound by reading weights. They stand on the left, where tensor cores want 64 rows, and are read 256
        # bytes at a time. Where programs are many, two with three stages share a multiprocessor; else one
        # has it for itself. With Qwen3-30B-A3B on an H200 these are within 1% of the best of a sweep, for
        # 1, 8, 32 and 128 tokens.
        num_busy, block_o = min(num_tokens * top_k, num_experts), 64
        while block_o > 16 and num_busy * -(-num_out // block_o) < _MIN_PROGRAMS:
            block_o //= 2
        if not is_gate_up and num_busy * -(-num_out // 128) >= _CROWD:
            block_o = 128
        return ExpertTiles(
            block_p=block_p,
            block_o=block_o,
            block_i=256 // itemsize,
            weights_left=True,
            num_warps=4,
            num_stages=3 if num_busy * -(-num_out // block_o) >= _CROWD else 5,
        )
    # Bound by arithmetic, or nearly: wide tiles of weights. The best of a sweep with Qwen3-30B-A3B on an H200
    # at 2048 tokens (a third quicker than half as wide), within 1% of it at 512. float32 has room for half.
    is_wide, is_half = block_p == 128, itemsize == 2
    block_o = 64 if is_gate_up else 128  # gate and up are two tiles
    if is_half and (is_gate_up or is_wide):
        block_o *= 2
    return ExpertTiles(
        block_p=block_p,
        block_o=min(block_o, max(next_power_of_2(num_out), 64)),
        block_i=64,
        weights_left=False,
        num_warps=8 if is_wide or is_half else 4,
        num_stages=4 if is_wide or is_gate_up or not is_half else 3,
        group=_GROUP if num_tokens * top_k > num_experts * block_p else 1,
    )


_MIN_PROGRAMS = 64
"""A token's gate and up: 96 programs of 64 rows, which one instruction of the tensor cores takes, were faster
than 192 of 32, though a third of the multiprocessors has none."""
_CROWD = 512
_GROUP = 8
_MAX_TOP_K = 127
"""An expert's rank among those of a token is kept in 8 bits."""


def _fake_route(
    logits_TN: Tensor, query_start_loc: Tensor, top_k: int, renormalizes: bool, block_p: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_experts = logits_TN.shape
    num_blocks = max_blocks(num_tokens, num_experts=num_experts, top_k=top_k, block_p=block_p)
    return (
        logits_TN.new_empty((num_tokens, top_k), dtype=torch.float32),
        logits_TN.new_empty((num_tokens, top_k), dtype=torch.int32),
        logits_TN.new_empty((num_tokens * top_k,), dtype=torch.int32),
        logits_TN.new_empty((num_blocks, 3), dtype=torch.int32),
        logits_TN.new_empty((num_experts,), dtype=torch.int32),
    )


@register_custom_op(fake=_fake_route, is_fresh=True)
def route_tokens(
    logits_TN: Tensor, query_start_loc: Tensor, top_k: int, renormalizes: bool, block_p: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``[T, N]`` logits to ``weights [T, K]`` float32, ``experts [T, K]``, ``slots [P]`` sorted by expert,
    ``blocks [B, 3]`` and ``counts [N]``, all int32 but the weights.

    Softmax in float32; of equal probabilities the lower expert wins. Rows of padding have expert ``N`` and
    weight 0; places in ``slots`` behind the sum of ``counts`` are undefined. Raises ``ConfigError`` for more
    experts of a token than ranks have bits for.
    """
    results = _fake_route(logits_TN, query_start_loc, top_k, renormalizes, block_p)
    weights_TK, experts_TK, slots_P, blocks_B3, counts_N = results
    num_tokens, num_experts = logits_TN.shape
    if num_tokens == 0:
        counts_N.zero_()
        return results
    assert logits_TN.stride(1) == 1
    assert num_experts >= top_k
    if top_k > _MAX_TOP_K:
        raise ConfigError(f"a token may have at most {_MAX_TOP_K} experts here, not {top_k}")
    chunk = _chunk_of(num_tokens, num_experts)
    num_chunks = -(-num_tokens // chunk)
    is_alone, num_blocks = num_chunks == 1, blocks_B3.shape[0]
    assert chunk <= block_p
    if is_alone:
        ranks_TN = chunk_counts = counts_N  # not written
    else:
        shape, device = (num_chunks, next_power_of_2(num_experts)), logits_TN.device
        ranks_TN = torch.empty((chunk * shape[0], shape[1]), dtype=torch.int8, device=device)
        chunk_counts = torch.empty(shape, dtype=torch.int32, device=device)
    # At least a warp's worth: then nearly all sizes share a kernel.
    fill = max(next_power_of_2(-(-num_blocks // num_chunks)), 32)
    sizes = (num_experts, top_k, chunk, fill, logits_TN.device)
    launch(
        _kernels().route_kernel,
        (num_chunks,),
        (
            logits_TN, query_start_loc, weights_TK, experts_TK, slots_P, blocks_B3, counts_N, ranks_TN,
            chunk_counts, logits_TN.stride(0), num_tokens, query_start_loc.shape[0] - 1, num_blocks, block_p,
        ),
        _grouping_constants(*sizes, RENORMALIZES=renormalizes, IS_ALONE=is_alone),
    )  # fmt: skip
    if not is_alone:
        args = (ranks_TN, chunk_counts, slots_P, blocks_B3, counts_N, num_chunks, num_blocks, block_p)
        constants = _grouping_constants(*sizes, CHUNK_TILE=_chunks_at_once(chunk, num_experts))
        launch(_kernels().group_kernel, (num_chunks,), args, constants)
    return results


def _chunk_of(num_tokens: int, num_experts: int) -> int:
    """Tokens of a program: few, so that many multiprocessors route, but enough for the counts of all chunks
    to be read at once."""
    if num_tokens <= _MAX_ALONE:
        return next_power_of_2(num_tokens)
    chunk = _MIN_CHUNK
    while chunk < _MAX_CHUNK and chunk * _chunks_at_once(chunk, num_experts) < num_tokens:
        chunk *= 2
    return chunk


def _chunks_at_once(chunk: int, num_experts: int) -> int:
    """Chunks of which a program adds the counts in one go: 32 numbers a thread, or fewer."""
    return chunk * min(max(1024 // next_power_of_2(num_experts), 1), 8)


def _fake_gate_up(
    x_TE: Tensor, gate_up_NOE: Tensor, slots_P: Tensor, blocks_B3: Tensor, top_k: int
) -> Tensor:
    return x_TE.new_empty((slots_P.shape[0], gate_up_NOE.shape[1] // 2))


@register_custom_op(fake=_fake_gate_up, is_fresh=True)
def expert_gate_up(
    x_TE: Tensor, gate_up_NOE: Tensor, slots_P: Tensor, blocks_B3: Tensor, top_k: int
) -> Tensor:
    """``[T, E], [N, 2F, E] -> [P, F]``: ``silu(gate(x)) * up(x)`` of each slot by its expert, in the order of
    places; gate is the first half of the rows. Places that no block covers are undefined."""
    out_PF = _fake_gate_up(x_TE, gate_up_NOE, slots_P, blocks_B3, top_k)
    num_experts = gate_up_NOE.shape[0]
    tiles = choose_tiles(
        x_TE.shape[0],
        num_experts=num_experts,
        top_k=top_k,
        num_out=out_PF.shape[1],
        is_gate_up=True,
        itemsize=x_TE.itemsize,
        shared_bytes=shared_memory_bytes(x_TE.device),
    )
    launch_expert_product(x_TE, gate_up_NOE, slots_P, blocks_B3, None, out_PF, tiles, top_k=top_k)
    return out_PF


def _fake_down(
    act_PF: Tensor, down_NEF: Tensor, slots_P: Tensor, blocks_B3: Tensor, weights_TK: Tensor
) -> Tensor:
    return act_PF.new_empty((act_PF.shape[0], down_NEF.shape[1]))


@register_custom_op(fake=_fake_down, is_fresh=True)
def expert_down(
    act_PF: Tensor, down_NEF: Tensor, slots_P: Tensor, blocks_B3: Tensor, weights_TK: Tensor
) -> Tensor:
    """``[P, F], [N, E, F] -> [P, E]``: each place times its expert's matrix and its slot's weight, in the
    order of slots (``t * K + k``). Slots that no block covers are undefined."""
    out_PE = _fake_down(act_PF, down_NEF, slots_P, blocks_B3, weights_TK)
    num_tokens, top_k = weights_TK.shape
    tiles = choose_tiles(
        num_tokens,
        num_experts=down_NEF.shape[0],
        top_k=top_k,
        num_out=out_PE.shape[1],
        is_gate_up=False,
        itemsize=act_PF.itemsize,
        shared_bytes=shared_memory_bytes(act_PF.device),
    )
    launch_expert_product(act_PF, down_NEF, slots_P, blocks_B3, weights_TK, out_PE, tiles, top_k=top_k)
    return out_PE


def launch_expert_product(
    x: Tensor,
    weight_NOI: Tensor,
    slots_P: Tensor,
    blocks_B3: Tensor,
    scales_TK: Tensor | None,
    out: Tensor,
    tiles: ExpertTiles,
    *,
    top_k: int,
) -> None:
    """One of the two products with given tiles: for the operators above, and for timing them. Without scales
    it is the one of gate and up. ``blocks`` must have been made for ``tiles.block_p`` slots."""
    if out.numel() == 0:
        return
    assert x.stride(1) == weight_NOI.stride(2) == 1
    num_out = out.shape[1]
    is_gate_up = scales_TK is None
    args = (
        x, weight_NOI, slots_P, blocks_B3, weight_NOI if scales_TK is None else scales_TK, out,
        x.stride(0), weight_NOI.stride(0), weight_NOI.stride(1), num_out, blocks_B3.shape[0],
    )  # fmt: skip
    grid = (blocks_B3.shape[0] * -(-num_out // tiles.block_o),)
    constants = _product_constants(tiles, x.shape[1], top_k, is_gate_up, x.device)
    launch(_product_kernels().expert_product_kernel, grid, args, constants)


@functools.cache
def _grouping_constants(
    num_experts: int, top_k: int, chunk: int, fill: int, device: torch.device, **more: int
) -> Constants:
    return Constants(
        NUM_EXPERTS=num_experts,
        EXPERTS_PAD=next_power_of_2(num_experts),
        TOP_K=top_k,
        CHUNK=chunk,
        FILL=fill,
        num_warps=chunk,
        **more,
        **launch_options(device),
    )


@functools.cache
def _product_constants(
    tiles: ExpertTiles, num_in: int, top_k: int, is_gate_up: bool, device: torch.device
) -> Constants:
    return Constants(
        NUM_IN=num_in,
        TOP_K=top_k,
        BLOCK_P=tiles.block_p,
        BLOCK_O=tiles.block_o,
        BLOCK_I=min(tiles.block_i, max(next_power_of_2(num_in), 16)),
        GROUP=tiles.group,
        IS_GATE_UP=is_gate_up,
        WEIGHTS_LEFT=tiles.weights_left,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch_options(device),
    )


@functools.cache
def _kernels() -> ModuleType:
    from gapless.kernels import moe_jit

    return moe_jit


@functools.cache
def _product_kernels() -> ModuleType:
    from gapless.kernels import moe_product_jit

    return moe_product_jit

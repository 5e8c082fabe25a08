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
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from gapless.graphs.ops import register_custom_op
from gapless.kernels.launch import Constants, launch
from gapless.kernels.select import launch_options, next_power_of_2

_MAX_CHUNK = 32
"""Tokens that one program routes; up to so many need no second kernel."""
_CHUNK_ELEMENTS = 4096
_WARP_ELEMENTS = 256
"""Logits that a warp routes: more would be one long chain of instructions."""
_MAX_COUNTED = 128
"""Experts of which the best are found by comparing each with each, for a single token."""
_CHUNK_TILE = 32


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
    return min(max(next_power_of_2(wanted), 16), 128)


def max_blocks(num_tokens: int, *, num_experts: int, top_k: int, block_p: int) -> int:
    """Blocks that the worst routing needs: every expert that is chosen may leave all but one slot of its last
    block empty."""
    num_slots = num_tokens * top_k
    num_chosen = min(num_experts, num_slots)
    return min(num_slots, (num_slots + num_chosen * (block_p - 1)) // block_p)


@functools.cache
def choose_tiles(
    num_tokens: int, *, num_experts: int, top_k: int, num_out: int, is_gate_up: bool, itemsize: int = 2
) -> ExpertTiles:
    """The tiles of a product for so many tokens, with elements of ``itemsize`` bytes."""
    block_p = block_slots(num_tokens, num_experts=num_experts, top_k=top_k)
    if block_p <= 32:
        # Bound by reading weights: enough programs to keep every multiprocessor of a large GPU loading, and
        # small enough for several on each. Gate and up are two tiles, and rows are read 256 bytes at a time.
        num_busy, block_o = min(num_tokens * top_k, num_experts), 32 if is_gate_up else 64
        while block_o > 16 and num_busy * -(-num_out // block_o) < _MIN_PROGRAMS:
            block_o //= 2
        return ExpertTiles(
            block_p=block_p,
            block_o=block_o,
            block_i=256 // itemsize,
            weights_left=True,
            num_warps=4,
            num_stages=4,
        )
    wide = block_p == 128
    return ExpertTiles(
        block_p=block_p,
        block_o=64 if is_gate_up else 128,  # gate and up are two tiles
        block_i=64,
        weights_left=False,
        num_warps=8 if wide else 4,
        num_stages=4,
        group=_GROUP if num_tokens * top_k > num_experts * block_p else 1,
    )


_MIN_PROGRAMS = 256
_GROUP = 8


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
    weight 0; places in ``slots`` behind the sum of ``counts`` are undefined.
    """
    results = _fake_route(logits_TN, query_start_loc, top_k, renormalizes, block_p)
    weights_TK, experts_TK, slots_P, blocks_B3, counts_N = results
    num_tokens, num_experts = logits_TN.shape
    if num_tokens == 0:
        counts_N.zero_()
        return results
    assert logits_TN.stride(1) == 1
    assert num_experts >= top_k
    experts_pad = next_power_of_2(num_experts)
    most = min(_MAX_CHUNK, max(_CHUNK_ELEMENTS // experts_pad, 1))
    chunk = min(next_power_of_2(num_tokens), most)
    num_chunks = -(-num_tokens // chunk)
    is_alone, num_blocks = num_chunks == 1, blocks_B3.shape[0]
    if is_alone:
        chunk_counts = counts_N  # not written
    else:
        chunk_counts = torch.empty((num_chunks, experts_pad), dtype=torch.int32, device=logits_TN.device)
    # At least a warp's worth: then nearly all sizes share a kernel.
    fill = max(next_power_of_2(-(-num_blocks // num_chunks)), 32)
    sizes = (num_experts, top_k, chunk, block_p, fill, logits_TN.device)
    launch(
        _kernels().route_kernel,
        (num_chunks,),
        (
            logits_TN, query_start_loc, weights_TK, experts_TK, slots_P, blocks_B3, counts_N, chunk_counts,
            logits_TN.stride(0), num_tokens, query_start_loc.shape[0] - 1, num_blocks,
        ),
        _grouping_constants(
            *sizes,
            RENORMALIZES=renormalizes,
            COUNTS_BETTER=chunk == 1 and experts_pad <= _MAX_COUNTED,
            IS_ALONE=is_alone,
        ),
    )  # fmt: skip
    if not is_alone:
        args = (experts_TK, chunk_counts, slots_P, blocks_B3, counts_N, num_tokens, num_chunks, num_blocks)
        constants = _grouping_constants(*sizes, CHUNK_TILE=_CHUNK_TILE)
        launch(_kernels().group_kernel, (num_chunks,), args, constants)
    return results


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
    num_experts: int, top_k: int, chunk: int, block_p: int, fill: int, device: torch.device, **more: int
) -> Constants:
    return Constants(
        NUM_EXPERTS=num_experts,
        EXPERTS_PAD=next_power_of_2(num_experts),
        TOP_K=top_k,
        CHUNK=chunk,
        BLOCK_P=block_p,
        BLOCKS_EACH=-(-chunk // block_p),
        FILL=fill,
        num_warps=min(max(chunk * next_power_of_2(num_experts) // _WARP_ELEMENTS, 4), 16),
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

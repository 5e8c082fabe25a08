"""Paged attention by Triton: the default on CUDA, for decode, prefill and mixed batches alike.

All lengths and tables stay on the device. A launch depends only on tensor shapes and on ``max_query_len`` (a
host upper bound), never on data, so a captured launch serves every batch of its bucket
(``AttentionSupport.ALWAYS``). Tile sizes come from a small rule, not from an autotuner: nothing may be
compiled, timed or synchronised while a stream is capturing.

Invariants: cache slots past a request's length reach no result, whatever they hold (Triton's kernels do not
read them; the one for Hopper copies whole pages and clears their tails); pad rows of the output become zeros.
The kernels and their numbering of tiles are in ``triton_kernels.py``; long prefill on Hopper has its own
(``hopper_prefill.py``); the oracle is ``torch_reference.py``.
"""

from __future__ import annotations

from torch import Tensor

from gapless.attention.base import AttentionMetadata, Rotation
from gapless.attention.hopper_prefill import can_run_hopper, prefill_hopper
from gapless.attention.tile_rules import DecodeTile, PrefillTile, decode_tile, hopper_tile, prefill_tile
from gapless.attention.triton_launch import Fixed, launch_decode, paged_kernels, prefill_constants
from gapless.env import read_env
from gapless.errors import ConfigError
from gapless.graphs.modes import AttentionSupport, GraphMode
from gapless.graphs.ops import direct, register_custom_op
from gapless.kernels.launch import launch
from gapless.kernels.select import next_power_of_2, shared_memory_bytes

MAX_HEAD_SIZE = 256
_SPARE_TILES = 16
"""Requests of a prefill step that may begin a tile of their own before programs take more than one tile."""
_MOST_TILES = 65535
"""What CUDA allows in the second dimension of a grid."""


class TritonPagedBackend:
    """See the module docstring. Raises ``ConfigError`` when Triton is not installed."""

    name = "triton_paged"
    support = AttentionSupport.ALWAYS
    preferred: GraphMode | None = GraphMode.FULL

    def __init__(self) -> None:
        paged_kernels()

    def write_kv(
        self, key_TKD: Tensor, value_TKD: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        _write_kv(key_TKD, value_TKD, k_cache, v_cache, slot_mapping)

    def attend(
        self,
        query_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out_THD: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
    ) -> None:
        _paged_attention(
            query_THD,
            k_cache,
            v_cache,
            out_THD,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            metadata.max_query_len,
            scale,
            window,
        )

    def can_rotate(self, qkv_TC: Tensor, k_cache: Tensor, metadata: AttentionMetadata) -> bool:
        if metadata.max_query_len != 1:
            return False
        return _rotating_tile(qkv_TC, k_cache, metadata.seq_lens, metadata.block_table) is not None

    def attend_rotating(
        self,
        qkv_TC: Tensor,
        rotation: Rotation,
        k_cache: Tensor,
        v_cache: Tensor,
        out_THD: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
    ) -> None:
        _rotating_attention(
            qkv_TC,
            rotation.norm_weight_GD,
            rotation.eps,
            rotation.rope_P2F,
            rotation.positions_T,
            k_cache,
            v_cache,
            out_THD,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            scale,
            window,
        )


@register_custom_op(mutates_args=["k_cache", "v_cache"])
def triton_write_kv(
    key_TKD: Tensor, value_TKD: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store row ``t`` at cache slot ``slot_mapping[t]``."""
    _check_layout(key_TKD, value_TKD, k_cache, v_cache)
    num_tokens, num_kv_heads, head_size = key_TKD.shape
    if num_tokens == 0:
        return
    args = (
        key_TKD,
        value_TKD,
        k_cache,
        v_cache,
        slot_mapping,
        *key_TKD.stride()[:2],
        *value_TKD.stride()[:2],
        *k_cache.stride()[:3],
    )
    constants = {
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_SIZE": head_size,
        "BLOCK_SIZE": k_cache.shape[1],
        "ROW_PAD": next_power_of_2(num_kv_heads * head_size),
    }
    launch(paged_kernels().write_kv_kernel, (num_tokens,), args, constants)


@register_custom_op(mutates_args=["out_THD"])
def triton_paged_attention(
    query_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_THD: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    scale: float,
    window: int | None,
) -> None:
    """Causal attention over the paged cache; the contract is ``AttentionBackend.attend``."""
    _check(query_THD, out_THD, k_cache, v_cache, scale)
    num_tokens, num_heads, head_size = query_THD.shape
    num_reqs, num_kv_heads = seq_lens.shape[0], k_cache.shape[2]
    if num_tokens == 0:
        return
    group = num_heads // num_kv_heads
    arguments = _arguments(query_THD, k_cache, out_THD, seq_lens, block_table, scale)
    fixed = _fixed(query_THD, k_cache, window)
    tensors = (query_THD, k_cache, v_cache, out_THD)
    batch = (query_start_loc, seq_lens, block_table)
    shared_bytes = shared_memory_bytes(query_THD.device)
    decode = decode_tile(
        group=group,
        head_size=head_size,
        itemsize=query_THD.element_size(),
        max_query_len=max_query_len,
        num_programs=num_reqs * num_kv_heads,
        max_keys=block_table.shape[1] * k_cache.shape[1],
        rotates=False,
        shared_bytes=shared_bytes,
    )
    # A small prefill bucket has a slot per token; nearly all of them are empty.
    if decode is not None and num_reqs * max_query_len <= num_tokens <= num_reqs * decode.block_q:
        launch_decode(decode, max_query_len, tensors, batch, arguments, fixed)
        return
    size = {"group": group, "head_size": head_size, "itemsize": query_THD.element_size()}
    hopper = hopper_tile(
        **size,
        num_heads=num_heads,
        num_tokens=num_tokens,
        block_size=fixed.block_size,
        window=fixed.window,
    )
    if hopper is not None and can_run_hopper(query_THD, k_cache, v_cache):
        grid = _prefill_grid(hopper, query_THD, seq_lens)
        prefill_hopper(hopper, grid, (*tensors, *batch), arguments, group=group)
    else:
        tile = prefill_tile(**size, num_tokens=num_tokens, shared_bytes=shared_bytes)
        _prefill(tile, tensors, batch, arguments, fixed)


@register_custom_op(mutates_args=["k_cache", "v_cache", "out_THD"])
def triton_rotating_attention(
    qkv_TC: Tensor,
    norm_weight_GD: Tensor | None,
    eps: float,
    rope_P2F: Tensor,
    positions_T: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    out_THD: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int | None,
) -> None:
    """``rotate_into_cache`` and ``triton_paged_attention`` in one kernel, for batches of one token a request
    (``TritonPagedBackend.can_rotate``). Pad tokens are stored nowhere."""
    query_THD = qkv_TC.unflatten(1, (-1, k_cache.shape[3]))[:, : out_THD.shape[1]]
    _check(query_THD, out_THD, k_cache, v_cache, scale)
    if qkv_TC.shape[0] == 0:
        return
    tile = _rotating_tile(qkv_TC, k_cache, seq_lens, block_table)
    if tile is None or not rope_P2F.is_contiguous():
        raise ConfigError("rotating attention needs one token a request, heads of an even size and one dtype")
    launch_decode(
        tile,
        1,
        (query_THD, k_cache, v_cache, out_THD),
        (query_start_loc, seq_lens, block_table),
        _arguments(query_THD, k_cache, out_THD, seq_lens, block_table, scale),
        _fixed(query_THD, k_cache, window),
        Rotation(norm_weight_GD, eps, rope_P2F, positions_T),
    )


_write_kv, _paged_attention = direct(triton_write_kv), direct(triton_paged_attention)
_rotating_attention = direct(triton_rotating_attention)


def _rotating_tile(
    qkv_TC: Tensor, k_cache: Tensor, seq_lens: Tensor, block_table: Tensor
) -> DecodeTile | None:
    """Of a batch with one token a request; None where heads are rotated by a kernel of their own."""
    (num_tokens, num_columns), num_reqs = qkv_TC.shape, seq_lens.shape[0]
    _, block_size, num_kv_heads, head_size = k_cache.shape
    tile = decode_tile(
        group=(num_columns // head_size - 2 * num_kv_heads) // num_kv_heads,
        head_size=head_size,
        itemsize=qkv_TC.element_size(),
        max_query_len=1,
        num_programs=num_reqs * num_kv_heads,
        max_keys=block_table.shape[1] * block_size,
        rotates=True,
        shared_bytes=shared_memory_bytes(qkv_TC.device),
    )
    is_even = head_size % 2 == 0 and qkv_TC.dtype == k_cache.dtype
    if tile is None or not is_even or not num_reqs <= num_tokens <= num_reqs * tile.block_q:
        return None
    return tile


def _arguments(
    query_THD: Tensor, k_cache: Tensor, out_THD: Tensor, seq_lens: Tensor, block_table: Tensor, scale: float
) -> tuple[int | float, ...]:
    return (
        seq_lens.shape[0],
        query_THD.shape[0],
        scale,
        *query_THD.stride()[:2],
        *out_THD.stride()[:2],
        *k_cache.stride()[1:3],
        *block_table.stride(),
    )


def _fixed(query_THD: Tensor, k_cache: Tensor, window: int | None) -> Fixed:
    return Fixed(
        head_size=query_THD.shape[2],
        group=query_THD.shape[1] // k_cache.shape[2],
        block_size=k_cache.shape[1],
        window=window or 0,
        dtype=query_THD.dtype,
        device=query_THD.device,
    )


def _prefill(
    tile: PrefillTile,
    tensors: tuple[Tensor, ...],
    batch: tuple[Tensor, ...],
    arguments: tuple[int | float, ...],
    fixed: Fixed,
) -> None:
    args = (*tensors, *batch, *arguments)
    grid = _prefill_grid(tile, tensors[0], batch[1])
    launch(paged_kernels().prefill_attention_kernel, grid, args, prefill_constants(tile, fixed))


def _prefill_grid(tile: PrefillTile, query_THD: Tensor, seq_lens: Tensor) -> tuple[int, int]:
    num_tokens, num_heads, _ = query_THD.shape
    # Each request may end with a tile of its own. Programs take several tiles, so there need not be one for
    # every request slot of the bucket: most slots are empty.
    num_tiles = -(-num_tokens // tile.block_q) + min(seq_lens.shape[0], _SPARE_TILES)
    return num_heads // tile.pack, min(max(num_tiles, 1), _MOST_TILES)


def _check(query_THD: Tensor, out_THD: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> None:
    _check_layout(query_THD, out_THD, k_cache, v_cache)
    if not scale > 0:
        raise ConfigError(f"triton_paged needs a positive scale, not {scale}")


def _check_layout(new_THD: Tensor, other_THD: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    if new_THD.device.type == "cpu" and not _is_interpreted():
        raise ConfigError(
            "attention backend triton_paged needs a CUDA device, but got tensors on the CPU; on a CPU "
            "use --attention-backend torch_reference"
        )
    if new_THD.shape[2] > MAX_HEAD_SIZE:
        raise ConfigError(f"triton_paged handles head sizes up to {MAX_HEAD_SIZE}, not {new_THD.shape[2]}")
    num_blocks, block_size, _, _ = k_cache.shape
    strides = k_cache.stride()
    stride_n, stride_s, _, stride_d = strides
    if strides != v_cache.stride() or stride_d != 1 or stride_n != block_size * stride_s:
        raise ConfigError(
            "triton_paged needs key and value caches of one layout, with contiguous heads and no gaps "
            f"between blocks, not strides {k_cache.stride()} and {v_cache.stride()}"
        )
    if num_blocks * block_size >= 1 << 31:
        raise ConfigError(
            f"triton_paged counts cache slots in 32 bits: {num_blocks * block_size} are too many"
        )
    if new_THD.stride(2) != 1 or other_THD.stride(2) != 1:
        raise ConfigError("triton_paged needs contiguous heads (last stride 1)")


def _is_interpreted() -> bool:
    return read_env().triton_interpret

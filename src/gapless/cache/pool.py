"""The tensors of the paged KV cache: one key and one value tensor per layer, allocated once.

Graphs hold their addresses, so they are static: written in place, never rebound, never resized. Block ids are
shared by all layers: block 7 is row 7 of every layer's tensors. Who owns which block is ``blocks.py``'s
business; here block 0 (``SINK_BLOCK``) only counts as one that no request can use.

Invariant: memory starts as zeros, so that an attention kernel with a masking fault shows a wrong number
rather than whatever the allocator left behind. Read ``attention/base.py`` next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gapless.attention.base import Attention, AttentionBackend
from gapless.errors import ConfigError, MemoryLimitError

MIN_BLOCKS = 2
"""The sink and one block for a request."""


def bytes_per_block(
    *, block_size: int, num_layers: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> int:
    """Bytes that one block takes in all layers, keys and values together."""
    return 2 * num_layers * block_size * num_kv_heads * head_size * dtype.itemsize


class KVCachePool:
    """``k_caches[layer]`` and ``v_caches[layer]`` are ``[num_blocks, block_size, num_kv_heads, head_size]``.

    Raises ``MemoryLimitError`` for fewer than two blocks, and when the device has not enough memory for them.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        for name, value in (
            ("block_size", block_size),
            ("num_layers", num_layers),
            ("num_kv_heads", num_kv_heads),
            ("head_size", head_size),
        ):
            if value < 1:
                raise ConfigError(f"{name}={value} of the KV cache must be at least 1")
        per_block = bytes_per_block(
            block_size=block_size,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype=dtype,
        )
        if num_blocks < MIN_BLOCKS:
            raise MemoryLimitError(
                f"the KV cache has room for {num_blocks} blocks of {block_size} tokens, but needs at least "
                f"{MIN_BLOCKS} (one is reserved for padding), that is {MIN_BLOCKS * per_block} bytes; raise "
                "--kv-cache-tokens or --gpu-memory-utilization, or lower --block-size"
            )
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_bytes = num_blocks * per_block
        shape = (num_blocks, block_size, num_kv_heads, head_size)
        try:
            self.k_caches: tuple[Tensor, ...] = _zeros(num_layers, shape, dtype, device)
            self.v_caches: tuple[Tensor, ...] = _zeros(num_layers, shape, dtype, device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one, and so is the CPU allocator's error
            raise MemoryLimitError(
                f"cannot allocate a KV cache of {num_blocks} blocks ({self.num_bytes} bytes) on {device}; "
                "lower --kv-cache-tokens or --gpu-memory-utilization"
            ) from error

    @property
    def num_usable_tokens(self) -> int:
        """Tokens that requests can hold: every block but the sink."""
        return (self.num_blocks - 1) * self.block_size

    def bind(self, layers: Sequence[Attention], backend: AttentionBackend) -> None:
        """Give each attention layer the backend and its own part of the cache, in the order of the
        sequence. Raises ``ConfigError`` when there are not as many layers as parts."""
        if len(layers) != len(self.k_caches):
            raise ConfigError(
                f"the model has {len(layers)} attention layers, "
                f"the KV cache was made for {len(self.k_caches)}"
            )
        for layer, k_cache, v_cache in zip(layers, self.k_caches, self.v_caches, strict=True):
            if k_cache.shape[2:] != (layer.num_kv_heads, layer.head_size):
                raise ConfigError(
                    f"attention layer {layer.layer_index} has {layer.num_kv_heads} key/value heads of size "
                    f"{layer.head_size}, the KV cache holds {k_cache.shape[2]} of size {k_cache.shape[3]}"
                )
            layer.bind(backend, k_cache, v_cache)


def _zeros(
    num_layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers))

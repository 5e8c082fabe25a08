"""The KV cache tensors: layout, zero start, size arithmetic, binding, and clear refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gapless.attention.base import Attention
from gapless.attention.torch_reference import TorchReferenceBackend
from gapless.cache import pool as pool_module
from gapless.cache.pool import KVCachePool, bytes_per_block
from gapless.errors import ConfigError, MemoryLimitError

SHAPE: dict[str, Any] = {"block_size": 16, "num_layers": 3, "num_kv_heads": 2, "head_size": 8}


def make_pool(**changes: Any) -> KVCachePool:
    options = {"num_blocks": 5, "dtype": torch.float32, "device": "cpu", **SHAPE, **changes}
    return KVCachePool(**options)


def make_layers(count: int, *, num_kv_heads: int = 2, head_size: int = 8) -> list[Attention]:
    return [
        Attention(
            num_heads=4,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=1.0,
            window=None,
            layer_index=index,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_layer_gets_its_own_zeroed_tensors(dtype: torch.dtype) -> None:
    pool = make_pool(dtype=dtype)
    tensors = [*pool.k_caches, *pool.v_caches]
    assert len({t.data_ptr() for t in tensors}) == 6
    for tensor in tensors:
        assert tensor.shape == (5, 16, 2, 8)
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert not tensor.any()


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("num_blocks", [2, 9])
def test_bytes_are_those_of_the_tensors(dtype: torch.dtype, itemsize: int, num_blocks: int) -> None:
    pool = make_pool(dtype=dtype, num_blocks=num_blocks)
    held = sum(t.numel() * itemsize for t in (*pool.k_caches, *pool.v_caches))
    assert pool.num_bytes == held
    assert bytes_per_block(dtype=dtype, **SHAPE) * num_blocks == held


def test_the_sink_block_counts_for_no_request() -> None:
    assert make_pool(num_blocks=5).num_usable_tokens == 4 * 16


def test_bind_gives_layer_i_the_tensors_of_layer_i() -> None:
    pool, layers, backend = make_pool(), make_layers(3), TorchReferenceBackend()
    pool.bind(layers, backend)
    for index, layer in enumerate(layers):
        assert layer.backend is backend
        assert layer.k_cache is pool.k_caches[index]
        assert layer.v_cache is pool.v_caches[index]


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_too_few_blocks_is_a_memory_error_that_says_how_much_is_needed(num_blocks: int) -> None:
    with pytest.raises(MemoryLimitError, match=rf"room for {num_blocks} blocks of 16 tokens.*12288 bytes"):
        make_pool(num_blocks=num_blocks)


def test_an_allocation_that_fails_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(pool_module.torch, "zeros", fail)
    with pytest.raises(MemoryLimitError, match=r"cannot allocate a KV cache of 5 blocks.*--kv-cache-tokens"):
        make_pool()


def test_an_absurd_size_is_refused_before_the_machine_swaps() -> None:
    with pytest.raises(MemoryLimitError, match="cannot allocate"):
        make_pool(num_blocks=2**50)


@pytest.mark.parametrize("field", ["block_size", "num_layers", "num_kv_heads", "head_size"])
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_below_one_are_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{field}={value}"):
        make_pool(**{field: value})


@pytest.mark.parametrize("count", [0, 2, 4])
def test_binding_another_number_of_layers_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"{count} attention layers.*made for 3"):
        make_pool().bind(make_layers(count), TorchReferenceBackend())


@pytest.mark.parametrize("changes", [{"num_kv_heads": 4}, {"head_size": 16}])
def test_binding_layers_of_another_shape_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="the KV cache holds 2 of size 8"):
        make_pool().bind(make_layers(3, **changes), TorchReferenceBackend())

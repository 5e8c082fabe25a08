"""Head norm, rotation and cache write in one kernel, under Triton's interpreter, against the decoder's
steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.errors import ConfigError
from gapless.kernels import rope_cache
from gapless.kernels.rope_cache import rotate_heads, rotate_into_cache
from kernel_oracles import (
    DTYPES,
    assert_close_to,
    make_rope,
    poisoned_caches,
    rotate_oracle,
    written_caches,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)
NUM_POSITIONS = 50


def check(
    *,
    num_tokens: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 32,
    block_size: int = 16,
    has_norm: bool = True,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    seed: int = 0,
) -> None:
    """Both operators on random rows whose last one is padding: NaN, with a slot of the sink block."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    qkv = draw(num_tokens, (num_heads + 2 * num_kv_heads) * head_size)
    qkv[-1] = float("nan")
    weight = draw(num_heads + num_kv_heads, head_size) if has_norm else None
    rope = make_rope(head_size, num_positions=NUM_POSITIONS, dtype=dtype)
    positions = torch.randint(NUM_POSITIONS, (num_tokens,), generator=generator).to(index_dtype)
    slots = torch.randperm(3 * block_size, generator=generator)[:num_tokens].to(torch.int32) + block_size
    slots[-1] = 1
    k_cache, v_cache = poisoned_caches(4, block_size, num_kv_heads, head_size, dtype=dtype)

    query, key, value = rotate_oracle(qkv, weight, 1e-6, rope, positions, num_kv_heads)
    expected_k, expected_v = written_caches(key, value, slots, k_cache, v_cache)
    rotated = rotate_heads(qkv, weight, 1e-6, rope, positions, num_kv_heads)
    out = rotate_into_cache(qkv, weight, 1e-6, rope, positions, slots, k_cache, v_cache)

    assert_close_to(out, query)
    assert out.is_contiguous()
    assert_close_to(k_cache, expected_k)
    torch.testing.assert_close(v_cache, expected_v, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(rotated[:, :num_heads], out, atol=0, rtol=0, equal_nan=True)
    assert_close_to(rotated[:, num_heads:], key)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("head_size", [8, 64, 80, 96, 128, 256])
def test_every_head_size_and_dtype(head_size: int, has_norm: bool, dtype: torch.dtype) -> None:
    check(head_size=head_size, has_norm=has_norm, dtype=dtype)


@interpreted
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (9, 3), (8, 2), (7, 1), (16, 8)])
def test_every_head_layout(num_heads: int, num_kv_heads: int, has_norm: bool) -> None:
    check(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=16, has_norm=has_norm)


@interpreted
@pytest.mark.parametrize("block_size", [16, 24, 128])
@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_every_block_size(num_tokens: int, block_size: int) -> None:
    check(block_size=block_size, num_tokens=num_tokens, head_size=8, num_heads=2, num_kv_heads=1)


@interpreted
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_positions_of_both_index_types(index_dtype: torch.dtype) -> None:
    check(index_dtype=index_dtype)


@interpreted
@settings(max_examples=20, deadline=None)
@given(
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (5, 5)]),
    half=st.integers(1, 40),
    num_tokens=st.integers(1, 6),
    has_norm=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_any_shape(
    heads: tuple[int, int], half: int, num_tokens: int, has_norm: bool, dtype: torch.dtype, seed: int
) -> None:
    check(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=2 * half,
        num_tokens=num_tokens,
        has_norm=has_norm,
        dtype=dtype,
        seed=seed,
    )


@interpreted
def test_slots_and_positions_are_read_when_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch is the same for every batch, so a captured one serves them all."""
    launches: list[tuple[tuple[int, ...], dict[str, object]]] = []

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *args, **constants: launches.append(
                (grid, {**constants, "numbers": [a for a in args if not isinstance(a, torch.Tensor)]})
            )

    class Kernels:
        rotate_heads_kernel = Launch()

    monkeypatch.setattr(rope_cache, "kernels", lambda: Kernels)
    for seed in range(3):
        torch.manual_seed(seed)
        qkv, rope = torch.randn(4, 8 * 16), make_rope(16, num_positions=9, dtype=torch.float32)
        positions, slots = torch.randint(9, (4,)), torch.randint(32, (4,)).to(torch.int32)
        caches = poisoned_caches(2, 16, 2, 16, dtype=torch.float32)
        rotate_into_cache(qkv, None, 0.0, rope, positions, slots, *caches)
    assert launches == [launches[0]] * 3


def test_no_rows_launch_nothing() -> None:
    rope, none = make_rope(16, num_positions=4, dtype=torch.float32), torch.empty(0, dtype=torch.int32)
    caches = poisoned_caches(2, 16, 2, 16, dtype=torch.float32)
    qkv = torch.empty(0, 8 * 16)
    assert rotate_into_cache(qkv, None, 0.0, rope, none, none, *caches).shape == (0, 4, 16)
    assert rotate_heads(qkv, None, 0.0, rope, none, 2).shape == (0, 6, 16)
    assert all(cache.isnan().all() for cache in caches)


def test_caches_of_two_layouts_are_refused() -> None:
    rope, one = make_rope(16, num_positions=4, dtype=torch.float32), torch.zeros(1, dtype=torch.int32)
    k_cache, _ = poisoned_caches(2, 16, 2, 16, dtype=torch.float32)
    v_cache = torch.empty(2, 2, 16, 16).transpose(1, 2)
    with pytest.raises(ConfigError, match="caches of one layout"):
        rotate_into_cache(torch.empty(1, 8 * 16), None, 0.0, rope, one, one, k_cache, v_cache)


@pytest.mark.parametrize(("is_many", "most"), [(False, 512), (True, 1024)], ids=["few", "many"])
@pytest.mark.parametrize("half_pad", [4, 32, 64, 128])
@pytest.mark.parametrize("num_heads", [3, 15, 32, 48, 96])
def test_tiles_are_powers_of_two_and_small(num_heads: int, half_pad: int, is_many: bool, most: int) -> None:
    tile = rope_cache._tile_heads(num_heads, half_pad=half_pad, is_many=is_many)
    assert tile & (tile - 1) == 0
    assert tile * half_pad <= most
    assert tile < 2 * num_heads


def test_many_tokens_give_what_few_give(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, rope = torch.randn(40, (24 + 2 * 3) * 16), make_rope(16, num_positions=64, dtype=torch.float32)
    positions, weight = torch.randint(0, 64, (40,), dtype=torch.int32), torch.rand(27, 16)
    few = rotate_heads(qkv, weight, 1e-6, rope, positions, 3)
    monkeypatch.setattr(rope_cache, "_MANY_TOKENS", 1)
    monkeypatch.setattr(rope_cache, "_WIDE_TILE_ELEMENTS", 64)
    torch.testing.assert_close(rotate_heads(qkv, weight, 1e-6, rope, positions, 3), few)

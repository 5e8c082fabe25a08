"""The fused kernels' torch counterparts, exactly as the decoder's own forward computes them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.models.rope import RopeConfig, rope_table, rotate

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def assert_close_to(actual: Tensor, expected: Tensor, *, ulps: int = 1, fraction: float = 0.02) -> None:
    """Float32: equal up to the order of sums. Half precision: equal bits in all but ``fraction`` of the
    elements (a sum may fall on the other side of a rounding boundary), and those near.
    """
    assert actual.dtype == expected.dtype
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=4e-6, equal_nan=True)
        return
    step = torch.finfo(actual.dtype).eps * ulps
    torch.testing.assert_close(actual, expected, atol=step * 4, rtol=step, equal_nan=True)
    differing = (actual != expected) & ~(actual.isnan() & expected.isnan())
    assert differing.sum() <= max(1, fraction * differing.numel())


def norm_oracle(hidden_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    return F.rms_norm(hidden_TE, weight_E.shape, weight_E, eps)


def silu_mul_oracle(gate_up_TI: Tensor) -> Tensor:
    gate, up = gate_up_TI.chunk(2, dim=-1)
    return F.silu(gate) * up


def make_rope(head_size: int, *, num_positions: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    config = RopeConfig(rope_type="default", head_size=head_size, theta=10000.0)
    return rope_table(config, max_positions=num_positions, dtype=dtype, device=torch.device(device))


def rotate_oracle(
    qkv_TC: Tensor,
    norm_weight_GD: Tensor | None,
    eps: float,
    rope_P2F: Tensor,
    positions_T: Tensor,
    num_kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[T, heads, D]``."""
    head_size = 2 * rope_P2F.shape[2]
    heads_TGD = qkv_TC.unflatten(1, (-1, head_size))
    num_rotated = heads_TGD.shape[1] - num_kv_heads
    rotated_TGD = heads_TGD[:, :num_rotated]
    if norm_weight_GD is not None:
        rotated_TGD = F.rms_norm(rotated_TGD, (head_size,), None, eps) * norm_weight_GD
    cos_T1F, sin_T1F = rope_P2F.index_select(0, positions_T).split(1, dim=1)
    rotated_TGD = rotate(rotated_TGD, cos_T1F, sin_T1F)
    num_heads = num_rotated - num_kv_heads
    return rotated_TGD[:, :num_heads], rotated_TGD[:, num_heads:], heads_TGD[:, num_rotated:]


def poisoned_caches(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
) -> tuple[Tensor, Tensor]:
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    k_cache = torch.full(shape, math.nan, dtype=dtype, device=device)
    return k_cache, k_cache.clone()


def written_caches(
    key_TKD: Tensor, value_TKD: Tensor, slots_T: Tensor, k_cache: Tensor, v_cache: Tensor
) -> tuple[Tensor, Tensor]:
    """Copies of the caches after a row-by-row write."""
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    for row, slot in enumerate(slots_T.tolist()):
        k_cache[slot // k_cache.shape[1], slot % k_cache.shape[1]] = key_TKD[row]
        v_cache[slot // v_cache.shape[1], slot % v_cache.shape[1]] = value_TKD[row]
    return k_cache, v_cache

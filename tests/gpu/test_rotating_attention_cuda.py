"""Decode attention that norms, rotates and stores this step's heads itself, in the tiles the rule gives.

Expected: ``rotate_into_cache``, which has tests of its own, then attention in float64.
"""

from __future__ import annotations

import random

import pytest
import torch

from gapless.attention.triton_paged import TritonPagedBackend
from ragged_batches import naive_attention
from rotating_cases import Case, make_case

pytestmark = pytest.mark.gpu

SHAPES = [(16, 8, 128), (32, 8, 128), (8, 8, 64), (14, 2, 64), (12, 4, 96), (16, 2, 256), (10, 5, 80)]
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5}


def check(case: Case, *, window: int | None = None) -> None:
    expected = case.rotated_apart()
    case.attend(TritonPagedBackend(), scale=0.1, window=window)
    tolerance = TOLERANCE[case.qkv.dtype]
    close = {"atol": tolerance, "rtol": tolerance, "equal_nan": True}
    attended = naive_attention(expected, scale=0.1, window=window)
    torch.testing.assert_close(case.batch.out.cpu().double(), attended, **close)
    assert (case.batch.out[case.batch.num_real_tokens :] == 0).all()
    torch.testing.assert_close(case.batch.k_cache[1:], expected.k_cache[1:], **close)
    torch.testing.assert_close(case.batch.v_cache[1:], expected.v_cache[1:], atol=0, rtol=0, equal_nan=True)


def requests_of(num_reqs: int, *, longest: int) -> list[tuple[int, int]]:
    """Every seventh slot is empty; the first request has nothing cached, the last the most."""
    rng = random.Random(num_reqs)
    lengths = [0, *(rng.randrange(longest) for _ in range(num_reqs - 2)), longest][-num_reqs:]
    return [(length, 0 if index % 7 == 5 else 1) for index, length in enumerate(lengths)]


@pytest.mark.parametrize("num_reqs", [1, 2, 7, 16, 33, 64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_every_batch_size(num_reqs: int, shape: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, head_size = shape
    longest = 900 if num_reqs < 16 else 70
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size}
    check(make_case(requests_of(num_reqs, longest=longest), dtype=torch.bfloat16, device="cuda", **sizes))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("has_norm", "has_positions"), [(True, True), (False, True), (True, False)])
def test_every_head_size_and_group(
    shape: tuple[int, int, int], dtype: torch.dtype, has_norm: bool, has_positions: bool
) -> None:
    num_heads, num_kv_heads, head_size = shape
    case = make_case(
        requests_of(9, longest=200), dtype=dtype, device="cuda", num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_size=head_size, has_norm=has_norm, has_positions=has_positions,
    )  # fmt: skip
    check(case)


@pytest.mark.parametrize("window", [1, 17, 100])
@pytest.mark.parametrize("num_reqs", [3, 40])
def test_a_window(num_reqs: int, window: int) -> None:
    check(
        make_case(
            requests_of(num_reqs, longest=300), dtype=torch.bfloat16, device="cuda", head_size=128,
            num_heads=16, num_kv_heads=8,
        ),
        window=window,
    )  # fmt: skip

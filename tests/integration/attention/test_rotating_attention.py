"""Decode attention that norms, rotates and stores this step's heads itself (under Triton's interpreter).

Expected: ``rotate_into_cache``, which has tests of its own, then attention in float64.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gapless.attention import base, triton_paged
from gapless.attention.base import Attention
from gapless.attention.tile_rules import DecodeTile
from gapless.attention.torch_reference import TorchReferenceBackend
from gapless.attention.triton_paged import TritonPagedBackend
from gapless.errors import ConfigError
from gapless.graphs.context import ForwardContext, use_forward_context
from ragged_batches import make_batch, naive_attention
from rotating_cases import Case, make_case, qkv_of

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)
SCALE = 0.3
TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}
REQUESTS = [(15, 1), (0, 1), (16, 1), (0, 0), (97, 1), (50, 1)]
"""Nothing of an earlier step, no request, new keys at both sides of a border between tiles and splits."""


@pytest.fixture(params=[False, True], ids=["behind the wait", "early"])
def loads_early(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(autouse=True)
def poisoned_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    new_empty = Tensor.new_empty

    def poisoned(self: Tensor, *size: Any, **options: Any) -> Tensor:
        fresh = new_empty(self, *size, **options)
        return fresh.fill_(math.nan) if fresh.is_floating_point() else fresh

    monkeypatch.setattr(Tensor, "new_empty", poisoned)


def use_tile(
    monkeypatch: pytest.MonkeyPatch, *, group: int, num_splits: int, loads_early: bool, num_warps: int = 4
) -> None:
    """``num_warps`` decides how many rows the tile has in which queries are rotated."""
    tile = DecodeTile(
        block_q=max(16 >> (group - 1).bit_length(), 1), block_n=16, num_warps=num_warps, num_stages=2,
        num_splits=num_splits, min_keys=16, called_ahead=16, loads_early=loads_early,
    )  # fmt: skip
    monkeypatch.setattr(triton_paged, "decode_tile", lambda **_: tile)


def check(case: Case, *, window: int | None = None) -> None:
    """Output and caches, of which slots that no request has stay as they were."""
    expected = case.rotated_apart()
    case.attend(TritonPagedBackend(), scale=SCALE, window=window)
    tolerance = TOLERANCE[case.qkv.dtype]
    close = {"atol": tolerance, "rtol": tolerance, "equal_nan": True}
    attended = naive_attention(expected, scale=SCALE, window=window)
    torch.testing.assert_close(case.batch.out.double(), attended, **close)
    assert (case.batch.out[case.batch.num_real_tokens :] == 0).all()
    torch.testing.assert_close(case.batch.k_cache[1:], expected.k_cache[1:], **close)
    torch.testing.assert_close(case.batch.v_cache[1:], expected.v_cache[1:], atol=0, rtol=0, equal_nan=True)
    assert case.batch.k_cache[0].isnan().all(), "pad tokens are stored nowhere"


@pytest.mark.parametrize("window", [None, 1, 7, 50])
@pytest.mark.parametrize("num_splits", [1, 3, 7])
def test_any_number_of_splits_and_any_window(
    monkeypatch: pytest.MonkeyPatch, loads_early: bool, num_splits: int, window: int | None
) -> None:
    use_tile(monkeypatch, group=2, num_splits=num_splits, loads_early=loads_early)
    check(make_case(REQUESTS, head_size=16), window=window)


@pytest.mark.parametrize("num_warps", [1, 4])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (6, 2), (7, 1), (20, 1)])
def test_any_group(
    monkeypatch: pytest.MonkeyPatch, loads_early: bool, num_heads: int, num_kv_heads: int, num_warps: int
) -> None:
    group = num_heads // num_kv_heads
    use_tile(monkeypatch, group=group, num_splits=2, loads_early=loads_early, num_warps=num_warps)
    check(make_case(REQUESTS, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=16))


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("has_positions", [True, False])
@pytest.mark.parametrize(
    ("head_size", "block_size", "dtype"),
    [(64, 16, torch.float16), (80, 32, torch.bfloat16), (96, 48, torch.float32), (18, 16, torch.float32)],
)
def test_any_head_size_norm_and_table(
    monkeypatch: pytest.MonkeyPatch,
    loads_early: bool,
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    has_positions: bool,
    has_norm: bool,
) -> None:
    use_tile(monkeypatch, group=2, num_splits=2, loads_early=loads_early, num_warps=1)
    kinds = {"has_norm": has_norm, "has_positions": has_positions}
    check(make_case(REQUESTS, head_size=head_size, block_size=block_size, dtype=dtype, **kinds))


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    "part", [slice(0, 64), slice(64, 96), slice(96, None)], ids=["query", "key", "value"]
)
def test_what_is_no_number_reaches_its_own_request_and_no_other(
    monkeypatch: pytest.MonkeyPatch, loads_early: bool, part: slice, num_splits: int
) -> None:
    """Also where the new key is the only one, and its weight would be 1 whatever its score is."""
    use_tile(monkeypatch, group=2, num_splits=num_splits, loads_early=loads_early)
    for bad in range(4):
        case = make_case([(0, 1), (1, 1), (16, 1), (50, 1)], head_size=16)
        case.qkv[bad, part] = math.nan
        expected = naive_attention(case.rotated_apart(), scale=SCALE, window=None)
        case.attend(TritonPagedBackend(), scale=SCALE, window=None)
        assert case.batch.out[bad].isnan().all()
        others = [row for row in range(4) if row != bad]
        torch.testing.assert_close(case.batch.out[others].double(), expected[others], atol=5e-6, rtol=5e-6)


def test_a_batch_without_a_request_is_padding(monkeypatch: pytest.MonkeyPatch, loads_early: bool) -> None:
    use_tile(monkeypatch, group=2, num_splits=2, loads_early=loads_early)
    check(make_case([(0, 0), (0, 0)], head_size=16))


def test_only_batches_of_one_token_a_request_are_rotated_in_attention() -> None:
    backend = TritonPagedBackend()
    one, two = (
        make_batch([(5, length)] * 3, head_size=32, max_query_len=length, dtype=torch.bfloat16)
        for length in (1, 2)
    )
    assert backend.can_rotate(qkv_of(one), one.k_cache, one.metadata)
    assert not backend.can_rotate(qkv_of(two), two.k_cache, two.metadata)
    assert not backend.can_rotate(qkv_of(one).float(), one.k_cache, one.metadata), "rounded on their way"
    odd = make_batch([(5, 1)] * 3, head_size=33, max_query_len=1)
    assert not backend.can_rotate(qkv_of(odd), odd.k_cache, odd.metadata)


def test_an_operator_that_cannot_rotate_says_so() -> None:
    case = make_case([(5, 1)] * 2, head_size=16)
    table = case.rotation.rope_P2F.transpose(0, 2).contiguous().transpose(0, 2)
    with pytest.raises(ConfigError, match="rotating attention needs"):
        replace(case, rotation=case.rotation._replace(rope_P2F=table)).attend(
            TritonPagedBackend(), scale=SCALE, window=None
        )
    with pytest.raises(ConfigError, match="positive scale"):
        case.attend(TritonPagedBackend(), scale=0.0, window=None)


def test_a_layer_asks_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(REQUESTS, head_size=16)
    batch = case.batch
    layer = Attention(num_heads=4, num_kv_heads=2, head_size=16, scale=SCALE, window=None, layer_index=0)
    with use_forward_context(ForwardContext(batch=batch.metadata)):
        assert not layer.can_rotate(case.qkv), "no backend yet"
        layer.bind(TorchReferenceBackend(), batch.k_cache, batch.v_cache)
        assert not layer.can_rotate(case.qkv)
        layer.bind(TritonPagedBackend(), batch.k_cache, batch.v_cache)
        # Whether a backend has a protocol's methods takes Python longer than a launch: no step asks again.
        monkeypatch.setattr(base, "RotatingBackend", None)
        assert layer.can_rotate(case.qkv)
        expected = naive_attention(case.rotated_apart(), scale=SCALE, window=None)
        out = layer.attend_rotating(case.qkv, case.rotation)
        layer.unbind()
        assert not layer.can_rotate(case.qkv)
    torch.testing.assert_close(out.double(), expected, atol=5e-6, rtol=5e-6)

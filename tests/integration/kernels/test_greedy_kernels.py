"""The best token, and float32 logits where they are needed, in two kernels, under Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gapless.engine.graph_set import INVALID_TOKEN, greedy_or_invalid
from gapless.engine.inputs import logits_flag
from gapless.errors import ConfigError
from gapless.kernels.head import finish_greedy
from kernel_oracles import DTYPES

pytestmark = pytest.mark.usefixtures("poisoned_memory")
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)


NEEDED, NOT_NEEDED = (torch.tensor(logits_flag(is_needed=needed)) for needed in (True, False))


def finish(raw_RV: Tensor, needs_logits: Tensor = NEEDED) -> tuple[Tensor, Tensor]:
    logits_RV = torch.full(raw_RV.shape, 7.0)
    tokens_R = torch.full((raw_RV.shape[0],), 99, dtype=torch.int64)
    finish_greedy(raw_RV, logits_RV, tokens_R, needs_logits, INVALID_TOKEN)
    return logits_RV, tokens_R


def assert_finishes(raw_RV: Tensor) -> None:
    expected_R = greedy_or_invalid(raw_RV.float())
    logits_RV, tokens_R = finish(raw_RV)
    torch.testing.assert_close(logits_RV, raw_RV.float(), atol=0, rtol=0, equal_nan=True)
    assert torch.equal(tokens_R, expected_R)
    logits_RV, tokens_R = finish(raw_RV, NOT_NEEDED)
    assert (logits_RV == 7.0).all(), "nothing is written that nobody reads"
    assert torch.equal(tokens_R, expected_R)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 97, 1024, 1025, 5000, 9000])
@pytest.mark.parametrize("num_rows", [1, 3, 9])
def test_equals_float_and_max(num_rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    assert_finishes(torch.randn(num_rows, size).to(dtype))


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("first", "second"), [(0, 1), (5, 4999), (1023, 1024), (2047, 2048), (3, 9)])
def test_the_lowest_of_equal_logits_wins(first: int, second: int, dtype: torch.dtype) -> None:
    raw = torch.zeros(1, 5000, dtype=dtype)
    raw[0, second] = raw[0, first] = 2.0
    assert finish(raw)[1].item() == first
    assert finish(torch.full_like(raw, -3.0))[1].item() == 0


@interpreted
@pytest.mark.parametrize("place", [0, 1023, 1024, 4095, 4999])
def test_a_nan_makes_its_row_invalid_and_no_other(place: int) -> None:
    raw = torch.randn(3, 5000).to(torch.bfloat16)
    raw[1, place] = math.nan
    assert_finishes(raw)
    assert (finish(raw)[1] == INVALID_TOKEN).tolist() == [False, True, False]


@interpreted
def test_rows_of_nothing_but_infinity_or_nan() -> None:
    raw = torch.tensor([[-math.inf], [math.inf], [math.nan]]).expand(3, 3000).contiguous()
    assert finish(raw)[1].tolist() == [0, 0, INVALID_TOKEN]


@interpreted
def test_buffers_may_be_larger_than_the_step() -> None:
    raw = torch.randn(2, 1500)
    logits, tokens = torch.full((5, 1500), 7.0), torch.full((5,), 99)
    finish_greedy(raw, logits[:2], tokens[:2], NEEDED, INVALID_TOKEN)
    assert torch.equal(logits[:2], raw)
    assert torch.equal(tokens[:2], raw.argmax(-1))
    assert (logits[2:] == 7.0).all()
    assert tokens[2:].tolist() == [99, 99, 99]


@interpreted
def test_the_flag_is_read_at_every_launch() -> None:
    raw, logits, tokens = torch.randn(2, 1500), torch.full((2, 1500), 7.0), torch.full((2,), 99)
    flag = NOT_NEEDED.clone()
    for value, expected in ((0, torch.full_like(raw, 7.0)), (1, raw), (0, raw)):
        flag.fill_(value)
        finish_greedy(raw if value else -raw, logits, tokens, flag, INVALID_TOKEN)
        assert torch.equal(logits, expected)
        assert torch.equal(tokens, (raw if value else -raw).argmax(-1))


@interpreted
@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(
        st.lists(st.sampled_from([-1.0, 0.0, 0.5, math.inf, -math.inf, math.nan]), min_size=7, max_size=7),
        min_size=1,
        max_size=10,
    ),
    repeats=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
)
def test_rows_full_of_ties_and_odd_values(
    values: list[list[float]], repeats: int, dtype: torch.dtype
) -> None:
    assert_finishes(torch.tensor(values, dtype=dtype).repeat(1, repeats))


def test_no_rows_launch_nothing() -> None:
    finish_greedy(torch.empty(0, 50), torch.empty(0, 50), torch.empty(0, dtype=torch.int64), NEEDED, -1)


def test_a_vocabulary_beyond_the_limit_is_refused() -> None:
    size = (1 << 24) + 1
    raw = torch.empty(1).expand(1, size)
    with pytest.raises(ConfigError, match=f"up to 16777216, not {size}"):
        finish_greedy(raw, raw.clone(), torch.empty(1, dtype=torch.int64), NEEDED, -1)

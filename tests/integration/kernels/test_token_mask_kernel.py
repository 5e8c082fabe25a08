"""Bit masks of the kernel, under Triton's interpreter, are those of the tensor operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gapless.kernels import token_mask
from gapless.sampling import token_masks

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)


def random_bits(num_rows: int, size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, -(-size // 32))
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).to(torch.int32)


def expected(logits_RV: Tensor, bits_KW: Tensor, rows: list[int]) -> Tensor:
    """Token by token."""
    result = logits_RV.clone()
    for place, row in enumerate(rows):
        for token in range(logits_RV.shape[1]):
            if not (int(bits_KW[place, token // 32]) >> (token % 32)) & 1:
                result[row, token] = -torch.inf
    return result


@pytest.mark.parametrize("size", [1, 31, 32, 33, 97, 340])
@pytest.mark.parametrize("rows", [[0], [2], [3, 0], [0, 1, 2, 3]], ids=str)
def test_the_tensor_operations_mask_token_by_token(size: int, rows: list[int]) -> None:
    logits = torch.randn(4, size)
    bits = random_bits(len(rows), size, seed=size)
    wanted = expected(logits, bits, rows)
    token_masks.mask_rows(logits, bits, torch.tensor(rows, dtype=torch.int32))
    assert torch.equal(logits, wanted)


@interpreted
@pytest.mark.parametrize("size", [1, 31, 32, 33, 4095, 4096, 4097, 9000])
@pytest.mark.parametrize("rows", [[0], [2], [3, 0], [0, 1, 2, 3]], ids=str)
def test_the_kernel_equals_the_tensor_operations(size: int, rows: list[int]) -> None:
    logits = torch.randn(4, size)
    wanted = logits.clone()
    bits, index = random_bits(len(rows), size, seed=size), torch.tensor(rows, dtype=torch.int32)
    token_masks.mask_rows(wanted, bits, index)
    token_mask.mask_rows(logits, bits, index)
    assert torch.equal(logits, wanted)


@interpreted
@pytest.mark.parametrize("word", [0, -1, 1, -(2**31), 2**31 - 1])
def test_extreme_words(word: int) -> None:
    logits = torch.zeros(1, 32)
    token_mask.mask_rows(logits, torch.tensor([[word]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    allowed = [bool(word >> bit & 1) for bit in range(32)]
    assert (logits[0] == 0).tolist() == allowed


@interpreted
def test_nan_is_masked_too_and_kept_where_it_is_allowed() -> None:
    logits = torch.full((1, 2), torch.nan)
    token_mask.mask_rows(logits, torch.tensor([[1]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    assert logits[0, 0].isnan()
    assert logits[0, 1] == -torch.inf


@interpreted
@given(st.integers(1, 300), st.integers(1, 5), st.data())
@settings(max_examples=25, deadline=None)
def test_rows_without_a_mask_are_untouched(size: int, num_rows: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, unique=True))
    logits = torch.randn(num_rows, size)
    before = logits.clone()
    bits, index = random_bits(len(rows), size, seed=size), torch.tensor(rows, dtype=torch.int32)
    token_mask.mask_rows(logits, bits, index)
    others = [row for row in range(num_rows) if row not in rows]
    assert torch.equal(logits[others], before[others])
    token_masks.mask_rows(before, bits, index)
    assert torch.equal(logits, before)

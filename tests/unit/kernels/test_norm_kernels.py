"""RMS norm with and without the residual addition, under Triton's interpreter, against the decoder's norm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gapless.engine.graph_set import INVALID_TOKEN
from gapless.errors import ConfigError
from gapless.kernels import norm
from gapless.kernels.norm import fused_add_rms_norm, fused_embed_rms_norm, fused_rms_norm
from kernel_oracles import DTYPES, assert_close_to, norm_oracle

pytestmark = pytest.mark.usefixtures("poisoned_memory")
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)


def rows(num_tokens: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_tokens, size, generator=generator) * 3).to(dtype)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 100, 576, 1024, 2560])
def test_norm_equals_torch(size: int, dtype: torch.dtype) -> None:
    hidden, weight = rows(3, size, dtype), rows(1, size, dtype, seed=1)[0]
    assert_close_to(fused_rms_norm(hidden, weight, 1e-5), norm_oracle(hidden, weight, 1e-5))


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 100, 576, 1024, 2560])
def test_norm_with_residual_equals_addition_then_norm(size: int, dtype: torch.dtype) -> None:
    update, residual = rows(3, size, dtype), rows(3, size, dtype, seed=1)
    weight = rows(1, size, dtype, seed=2)[0]
    before = residual.clone()
    total, normed = fused_add_rms_norm(update, residual, weight, 1e-6)
    assert torch.equal(total, residual + update), "the residual stream is bit-equal"
    assert_close_to(normed, norm_oracle(residual + update, weight, 1e-6))
    assert torch.equal(residual, before), "the residual may be a static input"


@interpreted
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
def test_eps_is_inside_the_root(eps: float) -> None:
    hidden, weight = torch.full((2, 16), 1e-3), torch.ones(16)
    assert_close_to(fused_rms_norm(hidden, weight, eps), norm_oracle(hidden, weight, eps))


@interpreted
def test_large_half_precision_values_do_not_overflow_the_sum() -> None:
    hidden, weight = torch.full((1, 64), 60000.0, dtype=torch.float16), torch.ones(64, dtype=torch.float16)
    assert_close_to(fused_rms_norm(hidden, weight, 1e-5), torch.ones(1, 64, dtype=torch.float16))


@interpreted
@pytest.mark.parametrize("with_update", [False, True])
def test_rows_of_wider_tensors(with_update: bool) -> None:
    wide, weight = rows(4, 96, torch.float32), rows(1, 32, torch.float32)[0]
    hidden, update = wide[:, :32], wide[:, 32:64]
    if with_update:
        total, normed = fused_add_rms_norm(update, hidden, weight, 1e-5)
        assert torch.equal(total, hidden + update)
        assert_close_to(normed, norm_oracle(total, weight, 1e-5))
    else:
        assert_close_to(fused_rms_norm(hidden, weight, 1e-5), norm_oracle(hidden, weight, 1e-5))


@interpreted
def test_a_row_of_nan_stays_alone() -> None:
    hidden, weight = rows(3, 48, torch.bfloat16), torch.ones(48, dtype=torch.bfloat16)
    hidden[1] = float("nan")
    normed = fused_rms_norm(hidden, weight, 1e-5)
    assert normed[1].isnan().all()
    assert_close_to(normed[[0, 2]], norm_oracle(hidden[[0, 2]], weight, 1e-5))


@interpreted
@settings(max_examples=20, deadline=None)
@given(
    num_tokens=st.integers(1, 5),
    size=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_any_shape(num_tokens: int, size: int, dtype: torch.dtype, seed: int) -> None:
    update, residual = rows(num_tokens, size, dtype, seed), rows(num_tokens, size, dtype, seed + 1)
    weight = rows(1, size, dtype, seed + 2)[0]
    total, normed = fused_add_rms_norm(update, residual, weight, 1e-5)
    assert torch.equal(total, residual + update)
    assert_close_to(normed, norm_oracle(total, weight, 1e-5), fraction=0.5)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_embedding_takes_ids_from_the_host_or_from_the_step_before(
    id_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    embedding, weight = rows(50, 40, dtype), rows(1, 40, dtype, seed=1)[0]
    drawn = torch.tensor([7, 49, INVALID_TOKEN, 0])  # the last row is the one of known tokens
    ids = torch.tensor([3, 0, 0, 0, 48], dtype=id_dtype)
    drawn_rows = torch.tensor([3, 1, 0, 2, 3], dtype=torch.int32)
    hidden, normed = fused_embed_rms_norm(ids, drawn_rows, drawn, embedding, weight, 1e-5)
    expected = embedding[[3, 49, 7, 0, 48]]
    assert torch.equal(hidden, expected)
    assert_close_to(normed, norm_oracle(expected, weight, 1e-5))


def test_no_rows_launch_nothing() -> None:
    empty, weight = torch.empty(0, 16), torch.ones(16)
    assert fused_rms_norm(empty, weight, 1e-5).shape == (0, 16)
    nothing = torch.empty(0, dtype=torch.int32)
    embedded = fused_embed_rms_norm(nothing, nothing, torch.zeros(1), torch.ones(5, 16), weight, 1e-5)
    assert [t.shape for t in embedded] == [(0, 16), (0, 16)]
    assert [t.shape for t in fused_add_rms_norm(empty, empty, weight, 1e-5)] == [(0, 16), (0, 16)]


def test_rows_that_do_not_fit_a_program_are_refused() -> None:
    with pytest.raises(ConfigError, match="up to 65536 elements, not 65537"):
        fused_rms_norm(torch.ones(1, 65537), torch.ones(65537), 1e-5)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("size", [1, 64, 576, 1024, 4096, 8192, 65536])
def test_a_launch_has_a_legal_number_of_warps(
    monkeypatch: pytest.MonkeyPatch, size: int, itemsize: int
) -> None:
    seen: list[tuple[Any, dict[str, Any]]] = []

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **constants: seen.append((grid, constants))

    monkeypatch.setattr(norm, "kernels", lambda: SimpleNamespace(rms_norm_kernel=Launch()))
    dtype = torch.float32 if itemsize == 4 else torch.bfloat16
    fused_rms_norm(torch.empty(5, size, dtype=dtype), torch.empty(size, dtype=dtype), 1e-5)
    ((grid, constants),) = seen
    assert grid == (5,)
    assert constants["num_warps"] in (1, 2, 4, 8, 16)
    assert size <= constants["SIZE_PAD"] < 2 * size

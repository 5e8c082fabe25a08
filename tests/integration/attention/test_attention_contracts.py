"""The operators of attention keep the contract that tracers rely on, as ``torch.library.opcheck`` sees it:
what the schema does not name is not written, and the fake implementation tells what the real one returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gapless.attention.torch_reference import torch_paged_attention, torch_write_kv
from gapless.attention.triton_paged import triton_paged_attention, triton_rotating_attention, triton_write_kv

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU kernels are not interpreted")

UTILITIES = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 16, 4


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def caches() -> tuple[Tensor, Tensor]:
    shape = (6, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    return torch.randn(shape), torch.randn(shape)


def paged(num_tokens: int) -> tuple[Any, ...]:
    """One request whose ``num_tokens`` are its last, with three before them; its queries are cut out of
    merged rows."""
    merged = torch.randn(num_tokens, 2 * HEADS, HEAD_SIZE)
    query = merged[:, :HEADS] if num_tokens else torch.randn(0, HEADS, HEAD_SIZE)
    out = torch.full((num_tokens, HEADS, HEAD_SIZE), 7.0)
    return query, *caches(), out, int32(0, num_tokens), int32(num_tokens + 3), int32(2, 4, 1, 3).view(1, 4)


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
@pytest.mark.parametrize("op", [triton_write_kv, torch_write_kv], ids=lambda op: op.name())
def test_writes_to_the_cache(op: Any, num_tokens: int) -> None:
    new = torch.randn(2, num_tokens, KV_HEADS, HEAD_SIZE)
    slots = torch.arange(num_tokens, dtype=torch.int32) + BLOCK_SIZE
    with torch.no_grad():
        torch.library.opcheck(op, (new[0], new[1], *caches(), slots), test_utils=UTILITIES)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(("num_tokens", "max_query_len"), [(0, 1), (1, 1), (3, 64), (3, 4)])
def test_triton_attention(num_tokens: int, max_query_len: int, window: int | None) -> None:
    arguments = (*paged(num_tokens), max_query_len, 0.25, window)
    with torch.no_grad():
        torch.library.opcheck(triton_paged_attention, arguments, test_utils=UTILITIES)


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("num_reqs", [0, 2])
def test_rotating_attention(num_reqs: int, has_norm: bool) -> None:
    qkv = torch.randn(num_reqs, (HEADS + 2 * KV_HEADS) * HEAD_SIZE)
    weight = torch.randn(HEADS + KV_HEADS, HEAD_SIZE) if has_norm else None
    rope, positions = torch.randn(9, 2, HEAD_SIZE // 2), torch.arange(num_reqs) + 3
    out = torch.full((num_reqs, HEADS, HEAD_SIZE), 7.0)
    starts = torch.arange(num_reqs + 1, dtype=torch.int32)
    table = torch.arange(num_reqs * 2, dtype=torch.int32).view(num_reqs, 2)
    batch = starts, positions.int() + 1, table
    arguments = (qkv, weight, 1e-6, rope, positions, *caches(), out, *batch, 0.25, None)
    with torch.no_grad():
        torch.library.opcheck(triton_rotating_attention, arguments, test_utils=UTILITIES)


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_reference_attention(num_tokens: int) -> None:
    with torch.no_grad():
        torch.library.opcheck(torch_paged_attention, (*paged(num_tokens), 0.25, None), test_utils=UTILITIES)

"""Every operator keeps the contract that tracers rely on, as ``torch.library.opcheck`` understands it.

What the schema does not name is not written, no result shares memory with an argument or with another
result, and the fake implementation tells shapes, strides, dtypes and devices of the real one. Checked with
one row, several rows and none, and with rows cut out of a wider tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gapless.graphs.op_schema import NAMESPACE
from gapless.kernels import sample
from gapless.kernels.activation import fused_silu_mul
from gapless.kernels.head import finish_greedy
from gapless.kernels.head_product import head_greedy
from gapless.kernels.layer_norm import fused_add_layer_norm
from gapless.kernels.linear import gate_up_silu, small_linear
from gapless.kernels.media import embed_media, fused_add_media_rms_norm
from gapless.kernels.moe import expert_down, expert_gate_up, route_tokens
from gapless.kernels.moe_sum import combine_add_rms_norm, combine_experts
from gapless.kernels.mrope import axis_rows, write_axis_rows
from gapless.kernels.norm import fused_add_rms_norm, fused_embed_rms_norm, fused_rms_norm
from gapless.kernels.positions import add_interpolated
from gapless.kernels.rope_cache import rotate_heads, rotate_into_cache
from gapless.kernels.sample import draw_tokens
from gapless.kernels.step_arrays import write_step_arrays
from gapless.kernels.summed_product import linear_add_rms_norm
from gapless.models.packed_linear import PackedWeight, can_pack, packed_linear

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU kernels are not interpreted")

UTILITIES = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 16, 4

Rows = Callable[..., Tensor]


def contiguous(*shape: int) -> Tensor:
    return torch.randn(shape)


def cut_out(*shape: int) -> Tensor:
    """Rows of a wider tensor."""
    return torch.randn(shape[0], 2, *shape[1:])[:, 1]


def caches() -> tuple[Tensor, Tensor]:
    shape = (6, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    return torch.randn(shape), torch.randn(shape)


def count(num_tokens: int) -> Tensor:
    return torch.arange(num_tokens, dtype=torch.int32)


LIMITS = torch.tensor([0, 1, 3], dtype=torch.int32)


def blocks(num_tokens: int) -> Tensor:
    """One of all slots, one empty."""
    return torch.tensor([[1, 0, 2 * num_tokens], [0, 0, 0]], dtype=torch.int32)


def qkv(rows: Rows, num_tokens: int) -> Tensor:
    return rows(num_tokens, (HEADS + 2 * KV_HEADS) * HEAD_SIZE)


def filters(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.full((num_rows,), 3, dtype=torch.int32), torch.full((num_rows,), 0.9), torch.zeros(num_rows)


def sampling(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.full((num_rows,), 0.8), torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.int32)


def tokens(num_rows: int) -> Tensor:
    return torch.zeros(num_rows, dtype=torch.int64)


CASES: dict[str, tuple[Any, Callable[[Rows, int], tuple[Any, ...]]]] = {
    "fused_rms_norm": (fused_rms_norm, lambda rows, t: (rows(t, 24), torch.randn(24), 1e-5)),
    "fused_add_rms_norm": (
        fused_add_rms_norm,
        lambda rows, t: (rows(t, 24), rows(t, 24), torch.randn(24), 1e-5),
    ),
    "fused_add_layer_norm": (
        fused_add_layer_norm,
        lambda rows, t: (rows(t, 24), rows(t, 24), torch.randn(24), torch.randn(24), 1e-5),
    ),
    "fused_embed_rms_norm": (
        fused_embed_rms_norm,
        lambda rows, t: (count(t), count(t), tokens(t + 1), torch.randn(9, 24), torch.randn(24), 1e-5),
    ),
    "fused_silu_mul": (fused_silu_mul, lambda rows, t: (rows(t, 20),)),
    "small_linear": (small_linear, lambda rows, t: (rows(t, 12), torch.randn(6, 12), torch.randn(6))),
    "small_linear without bias": (small_linear, lambda rows, t: (rows(t, 12), torch.randn(6, 12), None)),
    "gate_up_silu": (gate_up_silu, lambda rows, t: (rows(t, 12), torch.randn(8, 12), None)),
    "linear_add_rms_norm": (
        linear_add_rms_norm,
        lambda rows, t: (rows(t, 12), torch.randn(24, 12), rows(t, 24), torch.randn(24), 1e-5),
    ),
    "route_tokens": (route_tokens, lambda rows, t: (rows(t, 5), LIMITS, 2, True, 16)),
    "expert_gate_up": (
        expert_gate_up,
        lambda rows, t: (rows(t, 16), torch.randn(3, 8, 16), count(2 * t), blocks(t), 2),
    ),
    "expert_down": (
        expert_down,
        lambda rows, t: (rows(2 * t, 16), torch.randn(3, 8, 16), count(2 * t), blocks(t), torch.ones(t, 2)),
    ),
    "combine_experts": (
        combine_experts,
        lambda rows, t: (
            torch.randn(2 * t, 16), LIMITS, torch.randn(t, 16), torch.randn(t, 1), torch.zeros(t, 16),
        ),
    ),
    "combine_add_rms_norm": (
        combine_add_rms_norm,
        lambda rows, t: (
            torch.randn(2 * t, 16), LIMITS, torch.randn(t, 16), torch.randn(t, 1), rows(t, 16),
            torch.randn(16), 1e-5,
        ),
    ),
    "add_interpolated": (
        add_interpolated,
        lambda rows, t: (
            torch.randn(t, 24), torch.randn(9, 24), count(4 * t).view(t, 4) % 9, torch.rand(t, 4),
            torch.zeros(t, 24),
        ),
    ),
    "axis_rows": (
        axis_rows,
        lambda rows, t: (
            count(3 * t).view(3, t), torch.rand(8), torch.tensor([0, 1, 2, 0, 0, 0, 0, 0], dtype=torch.int32),
            1.5, torch.bfloat16,
        ),
    ),
    "write_axis_rows": (
        write_axis_rows,
        lambda rows, t: (
            count(2 * t).view(t, 2).t(), torch.rand(4), count(4) % 2, 1.0, torch.zeros(t, 2, 4),
        ),
    ),
    "write_step_arrays": (
        write_step_arrays,
        lambda rows, t: (
            torch.tensor([0, t, t], dtype=torch.int32), torch.tensor([t, 0], dtype=torch.int32), count(6),
            count(t), count(t), torch.zeros(3, 2, dtype=torch.int32).t(), 16,
        ),
    ),
    "embed_media": (embed_media, lambda rows, t: (count(t), torch.randn(9, 24), rows(t, 24), count(t) % 2)),
    "fused_add_media_rms_norm": (
        fused_add_media_rms_norm,
        lambda rows, t: (rows(t, 24), rows(t, 24), rows(t, 24), count(t) % 2, torch.randn(24), 1e-5),
    ),
    "fused_add_media_rms_norm everywhere": (
        fused_add_media_rms_norm,
        lambda rows, t: (rows(t, 24), rows(t, 24), rows(t, 24), None, torch.randn(24), 1e-5),
    ),
    "finish_greedy": (
        finish_greedy,
        lambda rows, t: (rows(t, 50), torch.zeros(t, 50), tokens(t), torch.ones(1, dtype=torch.int32), -1),
    ),
    "finish_greedy without logits": (
        finish_greedy,
        lambda rows, t: (rows(t, 50), torch.zeros(t, 50), tokens(t), torch.zeros(1, dtype=torch.int32), -1),
    ),
    "head_greedy": (
        head_greedy,
        lambda rows, t: (
            rows(t, 12), torch.randn(50, 12), torch.zeros(t, 50), tokens(t),
            torch.ones(1, dtype=torch.int32), -1,
        ),
    ),
    "draw_tokens": (
        draw_tokens,
        lambda rows, t: (rows(t, 40), tokens(t), -1, *sampling(t), None, None, None),
    ),
    "draw_tokens filtered": (
        draw_tokens,
        lambda rows, t: (rows(t, 40), tokens(t), -1, *sampling(t), *filters(t)),
    ),
    "rotate_heads": (
        rotate_heads,
        lambda rows, t: (
            qkv(rows, t), torch.randn(HEADS + KV_HEADS, HEAD_SIZE), 1e-5, torch.randn(9, 2, 8), count(t),
            KV_HEADS,
        ),
    ),
    "rotate_heads by a table of the step": (
        rotate_heads,
        lambda rows, t: (qkv(rows, t), None, 0.0, torch.randn(t, 2, 8), None, KV_HEADS),
    ),
    "rotate_into_cache": (
        rotate_into_cache,
        lambda rows, t: (
            qkv(rows, t), None, 0.0, torch.randn(9, 2, 8), count(t), count(t) + BLOCK_SIZE, *caches(),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_operators_keep_their_contract(name: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for constant, small in (("_CHUNK", 32), ("_SAMPLES", 16), ("_SEARCH_TILE", 32), ("LIST_SIZE", 32)):
        monkeypatch.setattr(sample, constant, small)  # the interpreter is slow
    monkeypatch.setattr(sample, "NUM_SPLITTERS", 4)
    op, make = CASES[name]
    torch.manual_seed(0)
    utilities = UTILITIES[: 2 if op is draw_tokens else 3]
    with torch.no_grad():
        torch.library.opcheck(op, make(contiguous, num_tokens), test_utils=utilities)
        if num_tokens:  # the checker itself cannot copy rows cut out of nothing
            torch.library.opcheck(op, make(cut_out, num_tokens), test_utils=utilities[:2])


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 5])
def test_a_product_with_packed_weights_keeps_its_contract(num_tokens: int) -> None:
    weight = torch.randn(6, 12)
    if not can_pack(weight):
        pytest.skip("this PyTorch does not pack")
    packed = PackedWeight(weight, None)
    with torch.no_grad():
        arguments = (torch.randn(num_tokens, 12), packed._handle, 6)
        torch.library.opcheck(packed_linear, arguments, test_utils=UTILITIES)


def test_no_operator_is_left_out() -> None:
    kernels = {op.name() for op, _ in CASES.values()}
    for path in Path(sample.__file__).parent.glob("*.py"):
        for name in re.findall(r"@register_custom_op.*\ndef (\w+)", path.read_text()):
            assert f"{NAMESPACE}::{name}" in kernels

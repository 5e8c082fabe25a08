"""Operators whose author promises fresh results, which nobody checks at run time, keep that promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from gapless.graphs import ops
from gapless.kernels import (
    activation,
    layer_norm,
    linear,
    media,
    moe,
    moe_sum,
    mrope,
    norm,
    rope_cache,
    summed_product,
)
from gapless.models import grouped_experts, packed_linear

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter was not chosen")

HIDDEN, WEIGHT = torch.randn(3, 16), torch.randn(16)
IDS = torch.arange(3, dtype=torch.int32)
QKV, ROPE = torch.randn(3, 32), torch.randn(5, 2, 4)
LIMITS = torch.tensor([0, 3], dtype=torch.int32)
BLOCKS = torch.tensor([[1, 0, 3], [0, 0, 0]], dtype=torch.int32)
CACHE = torch.zeros(2, 4, 1, 8)

CALLS: dict[Any, tuple[Any, ...]] = {
    norm.fused_rms_norm: (HIDDEN, WEIGHT, 1e-6),
    norm.fused_add_rms_norm: (HIDDEN, HIDDEN, WEIGHT, 1e-6),
    norm.fused_embed_rms_norm: (IDS, IDS, IDS, HIDDEN, WEIGHT, 1e-6),
    activation.fused_silu_mul: (HIDDEN,),
    rope_cache.rotate_into_cache: (QKV, None, 0.0, ROPE, IDS, IDS, CACHE, CACHE.clone()),
    rope_cache.rotate_heads: (QKV, None, 0.0, ROPE, IDS, 1),
    layer_norm.fused_add_layer_norm: (HIDDEN, HIDDEN, WEIGHT, WEIGHT, 1e-6),
    mrope.axis_rows: (IDS, torch.rand(4), torch.zeros(4, dtype=torch.int32), 1.0, torch.float32),
    media.embed_media: (IDS, torch.randn(5, 16), HIDDEN, IDS),
    media.fused_add_media_rms_norm: (HIDDEN, HIDDEN, HIDDEN, IDS, WEIGHT, 1e-6),
    moe_sum.combine_add_rms_norm: (HIDDEN, LIMITS, None, None, HIDDEN, WEIGHT, 1e-6),
    moe.route_tokens: (HIDDEN, LIMITS, 2, True, 16),
    moe.expert_gate_up: (HIDDEN, torch.randn(2, 8, 16), IDS, BLOCKS, 1),
    moe.expert_down: (HIDDEN, torch.randn(2, 8, 16), IDS, BLOCKS, torch.ones(3, 1)),
    grouped_experts.grouped_linear: (HIDDEN, torch.randn(2, 8, 16), LIMITS),
    linear.small_linear: (HIDDEN, torch.randn(8, 16), None),
    linear.gate_up_silu: (HIDDEN, torch.randn(8, 16), torch.randn(8)),
    summed_product.linear_add_rms_norm: (HIDDEN, torch.randn(16, 16), HIDDEN, WEIGHT, 1e-6),
}
PACKED = packed_linear.PackedWeight(torch.randn(8, 16), None) if packed_linear.can_pack(HIDDEN) else None
if PACKED is not None:
    CALLS[packed_linear.packed_linear] = (HIDDEN, PACKED._handle, 8)


def results(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else value


def test_every_promise_is_held_to() -> None:
    areas = ("gapless.kernels.", "gapless.models.")  # sums over ranks want a group: tests/unit/parallel
    promised = {
        op.overload for op in ops._by_name.values() if op.is_fresh and op.fn.__module__.startswith(areas)
    }
    if PACKED is None:  # this PyTorch cannot pack
        promised.discard(packed_linear.packed_linear)
    assert promised == set(CALLS)


@pytest.mark.parametrize("num_tokens", [3, 0])
@pytest.mark.parametrize("op", CALLS, ids=str)
def test_results_are_new_tensors_of_the_declared_shape(op: Any, num_tokens: int) -> None:
    args = tuple(a[:num_tokens] if a is HIDDEN or a is IDS or a is QKV else a for a in CALLS[op])
    tensors = [a for a in args if isinstance(a, Tensor)]
    with torch.no_grad():
        once, again = results(ops.direct(op)(*args)), results(op(*args))
    with FakeTensorMode() as mode:
        fake = results(op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args)))
    storages = {tensor.untyped_storage()._cdata for tensor in (*tensors, *once, *again)}
    assert len(storages) == len({t.untyped_storage()._cdata for t in tensors}) + len(once) + len(again)
    for real, same, like in zip(once, again, fake, strict=True):
        assert (real.shape, real.dtype, real.stride()) == (like.shape, like.dtype, like.stride())
        assert torch.equal(real, same)

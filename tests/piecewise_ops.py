"""Split ops and models of the piecewise tests: attention-like, routing, fresh results, handles."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.graphs.modes import RuntimeMode
from gapless.graphs.ops import register_custom_op

ATTEND, ROUTE, FRESH = "gapless::pw_attend", "gapless::pw_route", "gapless::pw_fresh"
RUNS: Counter[str] = Counter()
"""How often each op really ran."""
SCALES = {7: 2.0, 8: 3.0, 9: 5.0}


@register_custom_op(mutates_args=["out"])
def pw_attend(x: Tensor, out: Tensor, name: str) -> None:
    """Writes into the caller's buffer, as attention does."""
    RUNS["attend"] += 1
    out.copy_(x * 2 + x.mean(-1, keepdim=True))


def _like_two(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[0], 1)


@register_custom_op(fake=_like_two)
def pw_route(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two new tensors, as a MoE dispatch does."""
    RUNS["route"] += 1
    return x.flip(-1).contiguous(), x.sum(-1, keepdim=True)


@register_custom_op(out_shape=0)
def pw_fresh(x: Tensor) -> Tensor:
    """Returns a new tensor."""
    RUNS["fresh"] += 1
    return torch.sin(x) + 1


@register_custom_op(out_shape=0)
def pw_scale(x: Tensor, handle: int) -> Tensor:
    """Finds its weight by a number, as a packed matrix product does."""
    return x * SCALES[handle]


class Layer(nn.Module):
    def __init__(self, size: int, index: int, op: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) / size**0.5, requires_grad=False)
        self.gain = nn.Parameter(torch.rand(size) + 0.5, requires_grad=False)
        self.index, self.op = index, op

    def forward(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.rms_norm(x, x.shape[-1:], self.gain, 1e-5) @ self.weight
        if self.op == FRESH:
            return x + pw_fresh(h)
        if self.op == ROUTE:
            routed, weight = pw_route(h)
            return x + routed * torch.sigmoid(weight)
        out = torch.empty_like(h)
        pw_attend(h, out, f"layer{self.index}")
        return x + out


class Stack(nn.Module):
    """An embedding and layers whose op is cut out."""

    def __init__(self, *, num_layers: int = 3, size: int = 8, op: str = ATTEND, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Parameter(torch.randn(16, size), requires_grad=False)
        self.layers = nn.ModuleList(Layer(size, i, op) for i in range(num_layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.nn.functional.embedding(ids, self.table)
        for layer in self.layers:
            x = layer(x)
        return x


def step(mode: RuntimeMode, rows: int, *, compiled: bool = True) -> Any:
    """The forward context of a step over ``rows`` tokens."""
    descriptor = BatchDescriptor(num_tokens=rows, num_reqs=1)
    return use_forward_context(ForwardContext(mode=mode, descriptor=descriptor, use_compiled=compiled))

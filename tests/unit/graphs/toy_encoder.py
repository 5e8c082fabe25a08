"""An encoder of one attention and one linear map, runners for it, and items to give them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from gapless.attention.varlen import Segments, TorchReferenceVarlen
from gapless.graphs.device import get_device
from gapless.graphs.encoder import (
    EncoderMode,
    EncoderOptions,
    EncoderRunner,
)
from gapless.graphs.encoder_adapter import Bounds, EncoderRun, Values, Workspace
from gapless.graphs.encoder_budgets import Sizes
from gapless.graphs.input_field import InputField
from gapless.graphs.runner import OutputField

CPU = get_device("cpu")
WIDTH = 8


class ToyEncoder:
    """Items are ``[n, WIDTH]`` tensors; one attention over each, and a linear map. Nothing merges."""

    symbol, granule = "tokens", 1
    fields = (
        InputField(
            name="rows", dims=("tokens", WIDTH), dtype=torch.float32, poison=float("nan"), on_device=True
        ),
        InputField(name="cu", dims=("segments+1",), pad="last"),
        InputField(name="lens", dims=("segments",)),
    )
    outputs = (OutputField(name="block_output", dim="tokens", row_shape=(WIDTH,)),)
    workspaces = (Workspace(name="block_ws", dims=("tokens", 2, WIDTH // 2), dtype=torch.float32),)

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.backend = TorchReferenceVarlen()
        self.num_forwards = 0

    def sizes_of(self, item: Tensor) -> Sizes:
        return {"tokens": len(item), "segments": 1}

    def most(self, count: int) -> Sizes:
        return {"tokens": count, "segments": count}

    def bounds_of(self, items: Sequence[Tensor]) -> Bounds:
        return Bounds(limits={"max_len": max(map(len, items))})

    def worst_bounds(self, count: int) -> Bounds:
        return Bounds(limits={"max_len": count})

    def prepare(self, items: Sequence[Tensor]) -> Values:
        lens = np.array([len(item) for item in items], np.int32)
        return {"rows": torch.cat(list(items)), "cu": np.cumsum([0, *lens], dtype=np.int32), "lens": lens}

    def dummy(self, sizes: Sizes) -> Values:
        return self.prepare([torch.ones(sizes["tokens"], WIDTH)])

    def forward(self, run: EncoderRun) -> tuple[Tensor, ...]:
        self.num_forwards += 1
        heads = run["rows"].view(-1, 2, WIDTH // 2)
        limit = run.bounds.limits["max_len"]
        segments = Segments(cu_seqlens=run["cu"], cu_seqlens_kk=run["lens"], max_len=limit)
        arguments = self.backend.arguments(segments)
        self.backend.attend(heads, heads, heads, run["block_ws"], arguments, scale=1.0)
        return (self.linear(run["block_ws"].view(-1, WIDTH)),)


def runner_of(encoder: ToyEncoder | None = None, mode: str = "budget", **options) -> EncoderRunner:
    options = {"max_tokens": 32, "smallest_budget": 8, **options}
    chosen = EncoderOptions(mode=EncoderMode(mode), **options)
    return EncoderRunner(encoder or ToyEncoder(), device=CPU, options=chosen)


def rows(*lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, WIDTH, generator=generator) for n in lengths]


def assert_same(got, expected, *, atol: float = 0.0) -> None:
    for (mine,), (theirs,) in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=atol, rtol=0)

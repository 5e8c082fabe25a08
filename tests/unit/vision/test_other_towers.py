"""A tower that the engine does not know, called whole with precomputed inputs: an adapter suffices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gapless.attention.encoder_interface import attach_varlen
from gapless.attention.varlen import create_varlen_backend
from gapless.graphs.buffers import InputField
from gapless.graphs.encoder import encoder_graphs
from gapless.graphs.encoder_adapter import Bounds, EncoderRun, Values
from gapless.graphs.encoder_budgets import Sizes
from gapless.graphs.runner import OutputField
from gapless.models.vision.grids import cumulative, full_lens, positions

Item = tuple[Tensor, tuple[int, int, int]]
"""Patches and their grid."""
PATCH_VALUES, GRANULE, WIDTH = 3 * 2 * 4 * 4, 4, 24


class WholeQwen2:
    """The tower of Qwen2-VL: ``module(patches, grid_thw, ...)`` is captured as it is."""

    symbol, granule, workspaces = "tokens", GRANULE, ()
    fields = (
        InputField(
            name="patches", dims=("tokens", PATCH_VALUES), dtype=torch.float32, poison=np.nan, on_device=True
        ),
        InputField(name="position_ids", dims=("tokens", 2)),
        InputField(name="cu_seqlens", dims=("segments+1",), pad="last"),
    )
    outputs = (OutputField(name="block_output", dim="merged", row_shape=(WIDTH,)),)

    def __init__(self) -> None:
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

        torch.manual_seed(0)
        config = Qwen2VLVisionConfig(depth=2, embed_dim=32, hidden_size=WIDTH, num_heads=2, patch_size=4)
        self.module = Qwen2VisionTransformerPretrainedModel(config).eval().requires_grad_(False)
        attach_varlen(self.module, create_varlen_backend("auto", device_type="cpu"))
        self.no_grid = torch.zeros(0, 3, dtype=torch.int64)

    def sizes_of(self, item: Item) -> Sizes:
        count = len(item[0])
        return {"tokens": count, "merged": count // GRANULE, "segments": item[1][0]}

    def most(self, count: int) -> Sizes:
        return {"tokens": count, "merged": count // GRANULE, "segments": count // GRANULE}

    def bounds_of(self, items: Sequence[Item]) -> Bounds:
        return Bounds(limits={"max_seqlen": max(int(full_lens(grid).max()) for _, grid in items)})

    def worst_bounds(self, count: int) -> Bounds:
        return Bounds(limits={"max_seqlen": count})

    def prepare(self, items: Sequence[Item]) -> Values:
        return {
            "patches": torch.cat([patches for patches, _ in items]),
            "position_ids": np.concatenate([positions(grid, 2) for _, grid in items]),
            "cu_seqlens": cumulative(np.concatenate([full_lens(grid) for _, grid in items])),
        }

    def dummy(self, sizes: Sizes) -> Values:
        return self.prepare([(torch.zeros(sizes["tokens"], PATCH_VALUES), (1, 2, sizes["tokens"] // 2))])

    def forward(self, run: EncoderRun) -> tuple[Tensor, ...]:
        result = self.module(
            run["patches"],
            grid_thw=self.no_grid,  # what follows from it is given
            position_ids=run["position_ids"],
            cu_seqlens=run["cu_seqlens"],
            max_seqlen=run.bounds.limits["max_seqlen"],
        )
        return (result.pooler_output,)


@pytest.fixture(scope="module")
def adapter() -> WholeQwen2:
    return WholeQwen2()


@pytest.mark.parametrize("mode", ["budget", "exact"])
def test_a_whole_transformers_tower_runs_as_graphs(adapter: WholeQwen2, mode: str) -> None:
    options: dict[str, Any] = {"smallest_budget": 32} if mode == "budget" else {}
    runner = encoder_graphs(adapter, mode=mode, max_tokens=64, **options)
    grids = [(1, 4, 4), (2, 2, 4), (1, 2, 2), (1, 6, 6)]
    items: list[Item] = [(torch.randn(int(np.prod(grid)), PATCH_VALUES), grid) for grid in grids]
    got = [rows[0] for rows in runner.run(items)]
    adapter.module.config._attn_implementation = "sdpa"
    with torch.no_grad():
        expected = [adapter.module(p, grid_thw=torch.tensor([grid])).pooler_output for p, grid in items]
    attach_varlen(adapter.module, create_varlen_backend("auto", device_type="cpu"))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
    for mine, (same,) in zip(got, runner.padded_eager(items), strict=True):
        assert torch.equal(mine, same)

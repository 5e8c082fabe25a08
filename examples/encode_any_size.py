"""A vision tower for images and videos of any size (Qwen2-VL's, as Transformers has it) as encoder graphs.

The tower is called whole and is not changed. What it would compute from the grid on the host is computed
before and given to it (positions, boundaries), and its attention reads boundaries on the device, so a graph
serves whatever fits into its size; the adapter below is all that takes. A video's frames are segments of
their own. Weights are random. Run it: ``python examples/encode_any_size.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from gapless import encoder_graphs
from gapless.attention.encoder_interface import attach_varlen
from gapless.attention.varlen import create_varlen_backend
from gapless.graphs.encoder_adapter import Bounds, EncoderRun, Values
from gapless.graphs.encoder_budgets import Sizes
from gapless.graphs.input_field import InputField
from gapless.graphs.runner import OutputField
from gapless.models.vision.grids import cumulative, full_lens, positions

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Item = tuple[Tensor, tuple[int, int, int]]
"""Patches of one image or video, and its grid: temporal, vertical, horizontal."""
PATCH_VALUES, MERGE, WIDTH = 3 * 2 * 4 * 4, 2, 24
GRANULE = MERGE**2
"""Patches that become one row."""


class WholeTower:
    """The adapter: ``module(patches, grid_thw, ...)`` is captured as it is."""

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
        torch.manual_seed(0)
        config = Qwen2VLVisionConfig(depth=2, embed_dim=32, hidden_size=WIDTH, num_heads=2, patch_size=4)
        module = Qwen2VisionTransformerPretrainedModel(config).eval().requires_grad_(False)
        self.module: Any = module.to(DEVICE)
        attach_varlen(self.module, create_varlen_backend("auto", device_type=DEVICE.type))
        self.no_grid = torch.zeros(0, 3, dtype=torch.int64, device=DEVICE)

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
            "position_ids": np.concatenate([positions(grid, MERGE) for _, grid in items]),
            "cu_seqlens": cumulative(np.concatenate([full_lens(grid) for _, grid in items])),
        }

    def dummy(self, sizes: Sizes) -> Values:
        count = sizes["tokens"]
        patches = torch.zeros(count, PATCH_VALUES, device=DEVICE)
        return self.prepare([(patches, (1, MERGE, count // MERGE))])

    def forward(self, run: EncoderRun) -> tuple[Tensor, ...]:
        result = self.module(
            run["patches"],
            grid_thw=self.no_grid,  # what follows from it is given
            position_ids=run["position_ids"],
            cu_seqlens=run["cu_seqlens"],
            max_seqlen=run.bounds.limits["max_seqlen"],
        )
        return (result.pooler_output,)


def make_items(*grids: tuple[int, int, int]) -> list[Item]:
    return [(torch.randn(int(np.prod(grid)), PATCH_VALUES, device=DEVICE), grid) for grid in grids]


def main() -> dict[str, Any]:
    with encoder_graphs(WholeTower(), device=DEVICE, max_tokens=64, smallest_budget=16) as encoder:
        for grids in ([(1, 4, 4)], [(1, 2, 2), (2, 2, 4), (1, 2, 6)], [(1, 6, 6), (1, 4, 6)], [(3, 4, 4)]):
            items = make_items(*grids)
            for (mine,), (padded,), (alone,) in zip(
                encoder.run(items), encoder.padded_eager(items), encoder.eager(items), strict=True
            ):
                assert torch.equal(mine, padded)
                torch.testing.assert_close(mine, alone, atol=1e-4, rtol=1e-4)
        report = encoder.report()
    runs = ", ".join(f"{step['count']} of {step['bucket']}" for step in report["steps"])
    print(f"replays {runs}; padding {report['encoder']['padding_share']:.0%}")
    return report


if __name__ == "__main__":
    main()

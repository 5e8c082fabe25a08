"""Tiny vision towers, random images for them, and what must hold of their graphs on any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gapless.graphs.device.base import GraphDevice
from gapless.graphs.encoder import EncoderMode, EncoderOptions, EncoderRunner
from gapless.models.vision.tower import VisionTower, make_tower
from gapless.multimodal.items import MediaItem

Grid = tuple[int, int, int]

_SHARED: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 24,
    "patch_size": 4,
    "spatial_merge_size": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {**_SHARED, "fullatt_block_indexes": [1], "window_size": 16},
    "qwen3_vl": {**_SHARED, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}
GRIDS: tuple[Grid, ...] = (
    (1, 2, 2),
    (1, 2, 4),
    (1, 4, 4),
    (2, 2, 4),
    (1, 8, 2),
    (1, 4, 6),
    (3, 2, 4),
    (1, 10, 6),
    (1, 2, 14),
    (2, 4, 6),
)
"""Images and videos; several have the same number of patches in other segments."""


def tiny_tower(
    model_type: str, *, device: GraphDevice, dtype: torch.dtype = torch.float32, **options: Any
) -> VisionTower:
    """``options`` are those of ``make_tower``."""
    tower = make_tower(model_type, CONFIGS[model_type], dtype=dtype, device=device.torch_device, **options)
    fill(tower)
    return tower


def fill(tower: VisionTower) -> None:
    """Weights large enough that a wrong neighbour shows."""
    generator = torch.Generator().manual_seed(0)
    for parameter in tower.module.parameters():
        values = torch.empty(parameter.shape).normal_(0.0, 0.2, generator=generator)
        parameter.data.copy_(values)


def media(tower: VisionTower, grid: Grid, *, seed: int = 0, is_pixels: bool = False) -> MediaItem:
    """Random values, or as a processor makes it."""
    if is_pixels:
        return tower.blank(grid, pixels=np.random.default_rng((seed, *grid)))
    frames, height, width = grid
    count, merged = frames * height * width, frames * height * width // tower.granule
    values = np.random.default_rng((seed, *grid)).standard_normal((count, tower.patch_values), np.float32)
    return MediaItem(
        kind="image" if frames == 1 else "video",
        patches_PC=values,
        grid_thw=grid,
        known_hash=repr((seed, grid)).encode(),
        ranges=((0, merged),),
    )


def runner_of(tower: VisionTower, mode: str, *, device: GraphDevice, **options: Any) -> EncoderRunner:
    options = {"max_tokens": 128, "smallest_budget": 32, **options}
    chosen = EncoderOptions(mode=EncoderMode(mode), **options)
    return EncoderRunner(tower, device=device, options=chosen).capture()


def of_transformers(tower: VisionTower, item: MediaItem) -> tuple[Tensor, ...]:
    """What Transformers' own forward makes of one item, boundaries and all: ``[U, E]`` and ``[U, L, E]``."""
    module: Any = tower.module
    patches = torch.from_numpy(item.values_PC()).to(tower.device)
    with torch.no_grad(), _own_attention(module):
        out = module(patches, grid_thw=torch.tensor([item.grid_thw], device=tower.device))
    features = getattr(out, "deepstack_features", None)
    return (out.pooler_output, torch.stack(features, 1)) if features else (out.pooler_output,)


def assert_equal(got: Sequence[tuple[Tensor, ...]], expected: Sequence[tuple[Tensor, ...]]) -> None:
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)


def assert_close(got: Sequence[tuple[Tensor, ...]], expected: Sequence[tuple[Tensor, ...]]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def check_random_sets(runner: EncoderRunner, *, count: int, seed: int, most: int = 5) -> int:
    """Random sets of up to ``most`` images, some of them pixels, in exact mode bit-equal to eager, in
    budgets to padded eager (and close to each image alone). Returns how many images there were."""
    tower = runner.adapter
    random = np.random.default_rng(seed)
    num_items = 0
    for number in range(count):
        chosen = [GRIDS[i] for i in random.integers(0, len(GRIDS), random.integers(1, most + 1))]
        share = random.integers(0, 3) / 2  # all values, both, all pixels
        items = [
            media(tower, grid, seed=int(random.integers(1 << 30)), is_pixels=random.random() < share)
            for grid in chosen
        ]
        got = runner.run(items)
        if runner.mode is EncoderMode.EXACT:
            assert_equal(got, runner.eager(items))
        else:
            assert_equal(got, runner.padded_eager(items))
            if number % 8 == 0:
                assert_close(got, runner.eager(items))
        num_items += len(items)
    return num_items


@contextmanager
def _own_attention(module: Any) -> Iterator[None]:
    name, module.config._attn_implementation = module.config._attn_implementation, "sdpa"
    try:
        yield
    finally:
        module.config._attn_implementation = name

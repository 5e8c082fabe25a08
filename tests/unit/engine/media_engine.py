"""Tiny vision-language engines for tests, with an encoder that makes rows out of an item's name.

``NamedEncoder`` needs no tower: an item's rows are random numbers seeded by its content, so whatever rows end
up in a step can be told apart, and every call is on record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gapless.config import EngineConfig
from gapless.engine.build import OpenedEngine, build_runner
from gapless.models.base import ModelInfo
from gapless.models.registry import load_model
from gapless.models.vision.base import EncodedMedia
from gapless.multimodal.items import MediaItem, MediaPrompt
from gapless.multimodal.positions import MediaBlock, rope_positions
from vl_checkpoints import IMAGE_ID, VISION_END, VISION_START, write_vl_folder

BLOCK_SIZE = 16


class NamedEncoder:
    """See the module. ``fails`` names contents that cannot be encoded."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.calls: list[list[bytes]] = []
        self.fails: set[bytes] = set()
        self.is_released = False

    def encode(self, items: Sequence[MediaItem]) -> list[EncodedMedia]:
        self.calls.append([item.content_hash for item in items])
        for item in items:
            if item.content_hash in self.fails:
                raise ValueError(f"no image: {item.content_hash!r}")
        return [self.rows_of(item) for item in items]

    def rows_of(self, item: MediaItem) -> EncodedMedia:
        generator = torch.Generator().manual_seed(int.from_bytes(item.content_hash[:4]))
        size, layers = self.info.hidden_size, self.info.num_deepstack
        made = torch.randn((1 + layers, item.num_tokens, size), generator=generator, dtype=self.info.dtype)
        return EncodedMedia(embeds_NE=made[0], deepstack_LNE=made[1:] if layers else None)

    def capture(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        pass

    def report(self) -> dict[str, Any]:
        memory = {"pool_bytes": 0, "driver_bytes": 0, "capture_s": 0.0}
        return {"graphs": [], "failures": [], "memory": memory, "encoder": {"calls": len(self.calls)}}

    def release(self) -> None:
        self.is_released = True


def open_media_engine(
    folder: Path, family: str = "qwen3_vl", **options: Any
) -> tuple[OpenedEngine, NamedEncoder]:
    """The decoder of a tiny checkpoint: 4 requests, 32 tokens a step, 64 blocks."""
    source = str(write_vl_folder(folder, family, has_weights=False))
    defaults: dict[str, Any] = {
        "max_running_requests": 4,
        "chunked_prefill_size": 32,
        "kv_cache_tokens": 64 * BLOCK_SIZE,
        "cuda_graph_bs_prefill": [8, 32],
        "cuda_graph_bs_decode": [1, 2, 4],
    }
    values = {"model": source, "load_format": "dummy", "device": "cpu", **defaults, **options}
    config = EngineConfig.from_sources(python=values).with_device_defaults("cpu")
    device = torch.device("cpu")
    loaded = load_model(source, device=device, load_format="dummy")
    encoder = NamedEncoder(loaded.info)
    runner = build_runner(config, loaded, torch_device=device, encoder=encoder)
    return OpenedEngine(runner=runner, loaded=loaded, config=config), encoder


def media_prompt(*parts: list[int] | tuple[bytes, int, int]) -> MediaPrompt:
    """Text as token ids, and images as (content, rows, columns) between their marks."""
    token_ids: list[int] = []
    items: list[MediaItem] = []
    blocks: list[MediaBlock] = []
    for part in parts:
        if isinstance(part, list):
            token_ids += part
            continue
        content, rows, columns = part
        block = MediaBlock(start=len(token_ids) + 1, steps=1, rows=rows, columns=columns)
        blocks.append(block)
        token_ids += [VISION_START, *[IMAGE_ID] * block.num_tokens, VISION_END]
        items.append(
            MediaItem(
                kind="image",
                patches_PC=np.zeros((4 * rows * columns, 1), dtype=np.float32),
                grid_thw=(1, 2 * rows, 2 * columns),
                known_hash=content,
                ranges=((block.start, block.num_tokens),),
            )
        )
    positions_3T, delta = rope_positions(len(token_ids), blocks)
    return MediaPrompt(
        token_ids=tuple(token_ids),
        items=tuple(items),
        rope_positions_3T=positions_3T,
        rope_delta=delta,
    )

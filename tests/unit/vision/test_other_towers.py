"""A tower that the engine does not know, called whole with precomputed inputs: an adapter suffices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gapless.attention.encoder_interface import attach_varlen
from gapless.attention.varlen import create_varlen_backend
from gapless.graphs.encoder import encoder_graphs
from loaded_scripts import load_script

EXAMPLE = Path(__file__).parents[3] / "examples" / "encode_any_size.py"
GRIDS = [(1, 4, 4), (2, 2, 4), (1, 2, 2), (1, 6, 6)]


@pytest.fixture(scope="module")
def example() -> Any:
    return load_script(EXAMPLE)


@pytest.mark.parametrize("mode", ["budget", "exact"])
def test_a_whole_transformers_tower_runs_as_graphs(example: Any, mode: str) -> None:
    options: dict[str, Any] = {"smallest_budget": 32} if mode == "budget" else {}
    adapter = example.WholeTower()
    runner = encoder_graphs(adapter, device=example.DEVICE, mode=mode, max_tokens=64, **options)
    items = example.make_items(*GRIDS)
    got = [rows[0] for rows in runner.run(items)]
    adapter.module.config._attn_implementation = "sdpa"
    with torch.no_grad():
        expected = [
            adapter.module(p, grid_thw=torch.tensor([grid], device=example.DEVICE)).pooler_output
            for p, grid in items
        ]
    attach_varlen(adapter.module, create_varlen_backend("auto", device_type=example.DEVICE.type))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
    for mine, (same,) in zip(got, runner.padded_eager(items), strict=True):
        assert torch.equal(mine, same)

"""The short form of ``tests/soak/test_graph_soak_long.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from graph_soak import GraphSoak
from tiny_model import BLOCK_SIZE, open_tiny


@pytest.mark.parametrize(
    ("seed", "strategies"),
    [
        (0, {"cuda_graph_backend_prefill": "full", "cuda_graph_backend_decode": "full"}),
        (1, {"cuda_graph_backend_prefill": "breakable", "cuda_graph_backend_decode": "breakable"}),
    ],
    ids=["full", "breakable"],
)
def test_random_requests_with_aborts_and_preemption_run_as_if_alone(
    tmp_path: Path, seed: int, strategies: dict[str, Any]
) -> None:
    runner = open_tiny(
        tmp_path, kv_cache_tokens=7 * BLOCK_SIZE, cuda_graph_bs_prefill=[8, 32], **strategies
    ).runner
    summary = GraphSoak(runner, num_requests=24, seed=seed).run()
    assert summary.differing == ()
    assert min(summary.num_aborted, summary.num_preemptions) > 0
    assert runner.report()["failures"] == []
    eager = {row["phase"] for row in runner.report()["eager"]}
    assert not eager & {"prefill", "decode", "head"}, "every forward was a graph"
    runner.shutdown()

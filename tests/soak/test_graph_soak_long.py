"""The long version of the engine's random life on real graphs; ``tests/integration`` has a short one."""

from __future__ import annotations

from pathlib import Path

import pytest
from graph_soak import GraphSoak
from tiny_model import BLOCK_SIZE, open_tiny

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("prefill", ["full", "breakable", "tc_piecewise"])
def test_four_hundred_random_requests_run_as_if_alone(tmp_path: Path, seed: int, prefill: str) -> None:
    runner = open_tiny(tmp_path, kv_cache_tokens=7 * BLOCK_SIZE, cuda_graph_backend_prefill=prefill).runner
    summary = GraphSoak(runner, num_requests=400, seed=seed).run()
    print(summary)
    # Products of matrices with other numbers of rows differ in last bits, which may decide between equals.
    assert len(summary.differing) <= 1
    assert min(summary.num_aborted, summary.num_preemptions) > 5
    runner.shutdown()

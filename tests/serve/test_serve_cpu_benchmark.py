"""``benchmarks/serve_cpu.py``: its part with a model, short; nothing may be lost, mixed or left."""

from __future__ import annotations

from pathlib import Path

from loaded_scripts import load_script

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve_streams.py"
FEW_SIZES = ("--cuda-graph-bs-prefill", "16,64,256,1024,2048", "--cuda-graph-bs-decode", "1,4,8,16,24")
"""Of the hundred that the script captures; twenty streams need no more."""


def test_a_short_run_knows_its_answers_and_leaves_nothing() -> None:
    script = load_script(SCRIPT)
    script.OPTIONS += FEW_SIZES
    found = script.measure_streams(num_requests=60, num_streams=20, num_tokens=24)
    assert (found["wrong_answers"], found["ended_well"], found["different_answers"]) == (0, 60, 20)
    assert not any(found["left"].values()), found["left"]
    assert [row["requests"] for row in found["memory_mb"]] == list(range(3, 61, 3))

"""``benchmarks/tensor_parallel.py``: one short run of one and two ranks on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from forked_ranks import write_model

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "tensor_parallel.py"


def test_the_script_compares_ranks_and_says_what_is_noise(tmp_path: Path) -> None:
    source, output = write_model(tmp_path / "tiny", max_position_embeddings=256), tmp_path / "out.json"
    words = [source, "--device", "cpu", "--dtype", "bfloat16", "--prompt", "32", "--repeats", "1"]
    command = [sys.executable, str(SCRIPT), *words, "--limit", "100", "--output", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(output.read_text())
    assert json.loads(run.stdout.splitlines()[-1]) == result
    one, two = result["rows"]
    assert (one["ranks"], two["ranks"]) == (1, 2)
    for row in (one, two):
        assert "error" not in row
        assert row["decode_ms"] > 0
        assert row["num_graphs"] > 0
        assert not row["failures"]
        assert 0 <= row["logits_rms_between_batches"] < 0.05
        assert len(row["gaps_of_first_tokens"]) == 3
    assert one["logits_rms_difference"] == 0
    assert one["tokens_before_first_difference"] == [32] * 3
    assert 0 < two["logits_rms_difference"] < 0.05
    assert two["sums_by"] == "gloo"

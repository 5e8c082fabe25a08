"""``benchmarks/replicas.py``: one short run over engines that only wait."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "replicas.py"


def test_the_script_compares_and_loses_nothing_that_had_not_begun(tmp_path):
    output = tmp_path / "out.json"
    words = ["--step-ms", "4", "--tokens", "24", "--rounds", "1", "--batch", "4", "--output", str(output)]
    run = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    result = json.loads(output.read_text())
    assert json.loads(run.stdout.splitlines()[-1]) == result
    assert result["ratio"]["median"] > 0  # how large it is depends on who else uses the machine
    killed = result["killed"]
    assert killed["requests"] == 24 == killed["whole"] + killed["lost_while_streaming"]
    assert killed["lost_before_streaming"] == 0
    assert killed["sent_again"] >= 1

"""``benchmarks/replicas.py``: one short run over engines that only wait."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "replicas.py"


def test_the_script_compares_and_loses_nothing_that_had_not_begun(tmp_path):
    output = tmp_path / "out.json"
    # Steps that wait long, so that the ratio shows through whoever else uses the cores.
    words = ["--step-ms", "20", "--tokens", "24", "--rounds", "1", "--batch", "4", "--output", str(output)]
    run = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    result = json.loads(output.read_text())
    assert json.loads(run.stdout.splitlines()[-1]) == result
    assert result["ratio"]["median"] > 1.2
    rates = result["tokens_per_s"]
    assert result["ratio"]["median"] == pytest.approx(
        rates["two"]["median"] / rates["one"]["median"], rel=0.01
    )
    killed = result["killed"]
    assert killed["requests"] == 24 == killed["whole"] + killed["lost_while_streaming"]
    assert killed["lost_before_streaming"] == 0
    assert killed["sent_again"] >= 1

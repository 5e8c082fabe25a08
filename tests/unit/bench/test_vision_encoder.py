"""``benchmarks/vision_encoder.py`` runs on small towers and says everything that its figures are about."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "vision_encoder.py"


def test_a_tiny_run_measures_both_towers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("vision_encoder", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    words = ["--tiny", "--device", "cpu", "--sides", "56", "--repeats", "1", "--max-tokens", "256"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    script.main()
    result = json.loads(capsys.readouterr().out)
    assert len(result["towers"]) == 2
    for tower in result["towers"].values():
        row = tower["images"]["56"]
        assert {"transformers", "eager", "budget", "exact", "speedup", "exact_over_graph"} <= set(row)
        assert row["exact_over_graph"]["ratio"] > 0
        assert tower["packed"]["speedup"] > 0
        assert tower["captures_while_serving"] == 0
        assert tower["start_up"]["failures"] == 0
        assert tower["exact"]["captures"] == 1

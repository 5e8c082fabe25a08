"""``benchmarks/vision_encoder.py`` runs on small towers and says everything that its figures are about."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loaded_scripts import load_script

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "vision_encoder.py"


WORDS = ["--tiny", "--device", "cpu", "--sides", "56", "--repeats", "1", "--max-tokens", "256"]


@pytest.fixture
def script() -> ModuleType:
    return load_script(SCRIPT)


def test_a_tiny_run_measures_both_towers(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *WORDS])
    assert script.main() == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["towers"]) == 2
    for tower in result["towers"].values():
        row = tower["images"]["56"]
        assert {"transformers", "eager", "budget", "exact", "speedup", "exact_over_graph"} <= set(row)
        assert row["exact_over_graph"]["ratio"] > 0
        packed = tower["packed"]["56"]
        assert (packed["images"], packed["patches"]) == (8, row["patches"])
        assert min(packed["speedup"]["apart"], packed["speedup"]["transformers"]) > 0
        assert tower["captures_while_serving"] == 0
        assert tower["start_up"]["failures"] == 0
        assert tower["tower_s"] > 0
        assert tower["exact"]["captures"] == 1


def test_one_tower_may_be_chosen_and_must_exist(script: ModuleType) -> None:
    chosen = script.parse_arguments([*WORDS, "--towers", "tiny Qwen3-VL"])
    assert chosen.towers == ["tiny Qwen3-VL"]
    assert script.parse_arguments([]).towers == ("Qwen2.5-VL-7B", "Qwen3-VL-8B")
    with pytest.raises(SystemExit):
        script.parse_arguments(["--towers", "tiny Qwen3-VL"])


def test_a_tower_that_fails_loses_no_figures(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure, failed = script.measure_packed, []

    def fails_once(*args: Any) -> Any:
        if not failed:
            failed.append(True)
            raise RuntimeError("illegal")
        return measure(*args)

    output = tmp_path / "result.json"
    monkeypatch.setattr(script, "measure_packed", fails_once)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *WORDS, "--output", str(output)])
    assert script.main() == 1
    result = json.loads(output.read_text())
    first, second = result["towers"].values()
    assert first["error"] == "RuntimeError: illegal"
    assert first["images"]["56"]["budget"]["ms"] > 0
    assert "error" not in second
    assert second["packed"]["56"]["together"]["ms"] > 0
    assert json.loads(capsys.readouterr().out) == result

"""One run of ``benchmarks/profile_step.py`` on a CPU; the arithmetic has tests with the package."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "profile_step.py"


def test_a_run_ends_in_one_line_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 50,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = "--device cpu --batch 2 9 --prompt-tokens 8 99 --steps 3 --max-running-requests 2"
    words = ["--model", str(tmp_path), *arguments.split(), "--kv-cache-tokens", "256"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    said = capsys.readouterr()
    result = json.loads(said.out.splitlines()[-1])
    assert list(result["decode"]) == ["2"], "9 requests do not fit"
    assert list(result["prefill"]) == ["8"], "99 tokens do not fit"
    assert result["decode"]["2"]["wall_us"] > 0
    assert "decode, batch 2" in said.err

"""``benchmarks/vision_ttft.py``: a tiny part of ours, a made-up vLLM, and what becomes of the parts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gapless.models.registry import read_model_info
from gapless.models.tokenizer import load_tokenizer
from gapless.multimodal.opening import open_processor
from loaded_scripts import load_script

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "vision_ttft.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.append(str(SCRIPT.parent))
    return load_script(SCRIPT)


def test_a_tiny_run_replays_graphs_of_encoder_and_decoder(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    words = ["--tiny", "--only", "graphs", "--repeats", "2", "--warmups", "0", "--output"]
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *words, str(output)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(output.read_text())
    assert json.loads(run.stdout) == result
    part = result["parts"]["graphs"]
    assert part["eager"] == []
    assert {row["phase"] for row in part["steps"]} == {"encoder", "prefill", "head"}
    assert part["ttft_ms"]["repeats"] == part["text_ms"]["repeats"] == 2
    assert result["ratios"] == []


@pytest.mark.parametrize("name", ["vllm", "vllm-encoder"])
def test_vllm_is_asked_for_the_same_prompts(
    name: str, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class FakeLLM:
        def __init__(self, **options: Any) -> None:
            asked.append(options)

        def generate(self, prompts: list[dict[str, Any]], params: Any, use_tqdm: bool) -> None:
            asked.extend(prompts)

    fake = SimpleNamespace(__version__="0.0.fake", LLM=FakeLLM, SamplingParams=lambda **options: options)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    arguments = script.parse_arguments(["--repeats", "2", "--warmups", "1", "--side", "64"])
    arguments.part, arguments.folder = name, tmp_path
    found = script.run_vllm(arguments)
    options, *prompts = asked
    assert options["compilation_config"].get("cudagraph_mm_encoder", False) == (name == "vllm-encoder")
    assert [len(prompt["prompt_token_ids"]) for prompt in prompts] == [67] * 3 + [64] * 3
    assert [prompt["multi_modal_data"]["image"].size for prompt in prompts[:3]] == [(64, 64)] * 3
    assert len({prompt["multi_modal_data"]["image"].tobytes() for prompt in prompts[:3]}) == 3
    assert found["ttft_ms"]["repeats"] == 2


def test_ratios_have_their_targets(script: ModuleType) -> None:
    parts = {
        name: {"ttft_ms": {"median": median}}
        for name, median in (("graphs", 8.0), ("eager", 20.0), ("vllm", 9.0))
    }
    rows = {(row["of"], row["over"]): row for row in script.ratios(parts)}
    assert rows["graphs", "eager"] == {
        "of": "graphs", "over": "eager", "value": 0.4, "target": 0.5, "met": True,
    }  # fmt: skip
    assert rows["graphs", "vllm"]["met"] is False
    assert len(rows) == 2


def test_parts_follow_from_the_options(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.parse_arguments([]).only == ["graphs", "decoder", "eager"]
    assert script.parse_arguments(["--vllm-site", "x"]).only[-2:] == ["vllm", "vllm-encoder"]
    with pytest.raises(SystemExit):
        script.parse_arguments(["--tiny", "--only", "vllm"])
    assert "need a GPU" in capsys.readouterr().err


def test_the_folder_is_one_of_the_real_size(script: ModuleType, tmp_path: Path) -> None:
    folder = script.write_model(tmp_path / "model", is_tiny=False)
    info = read_model_info(str(folder))
    assert info.architecture == "Qwen3VLForConditionalGeneration"
    assert (info.num_layers, info.hidden_size, info.num_deepstack, info.rope_axes) == (36, 4096, 3, 3)
    processor = open_processor(str(folder), load_tokenizer(folder))
    assert processor is not None
    (prompt,) = script.prompts(script.parse_arguments([]), 1)
    image = prompt["multi_modal_data"]["image"]
    made = processor.prompt(prompt["prompt_token_ids"], images=[image])
    assert len(made.token_ids) == 64 + 2 + 196
    assert made.items[0].num_patches == 784

"""``benchmarks/against_vllm.py`` with a real engine of ours and a made-up vLLM: parts, resuming, merging.

The made-up package has the names that the scripts use; the made-up latency script does what the real one
does with them. What is tested is that one engine start serves both, and what becomes of the results.
"""

from __future__ import annotations

import io
import json
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "against_vllm.py"
SHAPE = "--dtype float32 --max-len 64 --prefill 8 --decode 1 --out-len 4 --repeats 1 --requests 2"
FAKE_VLLM = """
from types import SimpleNamespace
__version__ = "0.0.fake"
class SamplingParams:
    def __init__(self, **options):
        self.max_tokens = options["max_tokens"]
class LLM:
    made = 0
    def __init__(self, **options):
        LLM.made += 1
        assert LLM.made == 1, "one start is enough"
    def generate(self, prompts, params, use_tqdm):
        assert not use_tqdm
        answer = SimpleNamespace(token_ids=[0] * params.max_tokens)
        return [SimpleNamespace(outputs=[answer]) for _ in prompts]
"""
FAKE_SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
def main():
    llm = LLM(model=sys.argv[1])
    llm.generate([{"prompt_token_ids": [1]}], SamplingParams(max_tokens=1), use_tqdm=False)
    sys.stdout.fileno()
    print("noise")
    print(json.dumps({"engine": "vllm", "arguments": sys.argv[1:], "start_s": 9.0, "prefill_ms": {"8": 50.0},
                      "decode_ms": {"1": 60.0}}), flush=True)
if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("against")
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
    for name, text in {
        "tiny/config.json": json.dumps(config),
        "site/vllm/__init__.py": FAKE_VLLM,
        "peers/vllm_bench.py": FAKE_SCRIPT,
        "broken/vllm_bench.py": "raise SystemExit('no GPU here')",
    }.items():
        (made / name).parent.mkdir(exist_ok=True, parents=True)
        (made / name).write_text(text)
    return made


def run(folder: Path, *words: str, peers: str = "peers", results: str = "results") -> Any:
    command = ["--models", str(folder / "tiny"), "--peers", str(folder / peers)]
    command += ["--vllm-site", str(folder / "site"), "--results", str(folder / results), *words]
    shape = [*SHAPE.split(), "--lengths", "4:10", "--output-tokens", "2", "--throughput-repeats", "1"]
    return call(*command, "--", *shape)


def call(*words: str) -> subprocess.CompletedProcess[str]:
    """The script, in this process: engines have their own anyway, and imports take seconds."""
    said, told = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(told):
        patch.setattr(sys, "argv", [str(SCRIPT), *words])
        patch.syspath_prepend(str(SCRIPT.parent))
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPT), run_name="__main__")
    code = end.value.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(words, code, said.getvalue(), told.getvalue())


@pytest.fixture(scope="module")
def first(folder: Path) -> Any:
    return run(folder, "--output", str(folder / "first.json"))


def test_both_engines_are_measured_and_compared(first: Any) -> None:
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout.splitlines()[-1])
    assert result["versions"] == {"gapless": "0.1.0", "vllm": "0.0.fake"}
    shapes = {row["shape"] for row in result["ratios"] if row["peer"] == "vllm"}
    assert shapes == {"prefill 8", "decode 1", "start", "throughput"}
    for row in result["ratios"]:
        assert row["ratio"] == pytest.approx(row["ours"] / row["theirs"], abs=1e-4)
    assert result["notes"] == []
    assert "throughput" in first.stderr


def test_the_latency_script_gets_the_shape(first: Any) -> None:
    parts = {part["engine"]: part for part in json.loads(first.stdout.splitlines()[-1])["parts"]}
    words = parts["vllm"]["arguments"]
    assert words[1] == "FULL_AND_PIECEWISE"
    assert words[2:] == "--prefill 8 --decode 1 --repeats 1 --out-len 4 --max-len 64".split()  # noqa: SIM905
    assert parts["vllm"]["mode"] == "FULL_AND_PIECEWISE"
    assert parts["vllm"]["meta"]["seconds"] >= 0


def test_both_engines_got_prompts_of_the_same_lengths(first: Any) -> None:
    parts = {part["engine"]: part for part in json.loads(first.stdout.splitlines()[-1])["parts"]}
    tokens = [
        [row["input_tokens"] for row in parts[name]["throughput"]["rows"]] for name in ("gapless", "vllm")
    ]
    assert tokens[0] == tokens[1]


def test_parts_that_are_there_are_not_run_again(folder: Path, first: Any) -> None:
    again = run(folder, "--only", "vllm", "ours", peers="broken")
    assert again.returncode == 0
    assert "…" not in again.stderr, "nothing was started"
    assert len(json.loads(again.stdout.splitlines()[-1])["parts"]) == 2


def test_fresh_runs_again_and_a_failure_is_a_note(folder: Path, first: Any) -> None:
    again = run(folder, "--only", "vllm", "--fresh", peers="broken", results="other")
    assert again.returncode == 1
    result = json.loads(again.stdout.splitlines()[-1])
    assert result["parts"] == []
    assert "no GPU here" in result["notes"][0]


def test_without_time_nothing_starts_and_the_note_says_so(folder: Path) -> None:
    late = run(folder, "--time-limit", "0", results="late")
    notes = json.loads(late.stdout.splitlines()[-1])["notes"]
    assert [note.split(":")[0] for note in notes] == ["gapless, tiny", "vllm, tiny"]
    assert all("run again to go on" in note for note in notes)


def test_results_are_merged(folder: Path, first: Any) -> None:
    one = json.loads((folder / "first.json").read_text())
    for name, engine in (("ours.json", "gapless"), ("theirs.json", "vllm")):
        parts = [part for part in one["parts"] if part["engine"] == engine]
        (folder / name).write_text(json.dumps({"parts": parts}))
    files = [str(folder / name) for name in ("ours.json", "theirs.json")]
    done = call("--merge", *files)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["ratios"] == one["ratios"]


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "--models"), (["--models", "/none", "--results", "x"], "config.json"), (["--only", "trt"], "trt")],
)
def test_mistakes_are_explained(words: list[str], message: str) -> None:
    done = call(*words)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]

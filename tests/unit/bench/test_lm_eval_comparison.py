"""``benchmarks/lm_eval_cpu.py`` without lm-eval: what it reads, the differences it finds, its tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from loaded_scripts import load_script

ROOT = Path(__file__).parents[3]
TASK_FILES = sorted((ROOT / "examples" / "lm_eval").glob("*.yaml"))


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script(ROOT / "benchmarks" / "lm_eval_cpu.py")


def write_run(folder: Path, *, total: float = -2.5, is_greedy: bool = True, text: str = " Rome") -> Path:
    """What lm-eval 0.4.13 writes, as far as it is read; samples in another order than asked."""
    asked = {"gen_args_0": {"arg_0": "Q", "arg_1": " A"}}
    generated = {"gen_args_0": {"arg_0": "Q", "arg_1": {"until": ["\n"]}}}
    likelihoods = [[[str(total), str(is_greedy)]], [["-7.0", "False"]]]
    samples: dict[str, list[dict[str, Any]]] = {
        "gapless_choices": [
            {"doc_id": 1, "arguments": asked, "resps": [[["-1.0", "False"]]]},
            {"doc_id": 0, "arguments": asked, "resps": likelihoods},
        ],
        "gapless_answers": [{"doc_id": 0, "arguments": generated, "resps": [[text]]}],
        "gapless_passages": [
            {"doc_id": 0, "arguments": {"gen_args_0": {"arg_0": "T"}}, "resps": [["-100.5"]]}
        ],
    }
    place = folder / "model"
    place.mkdir(parents=True)
    for task, rows in samples.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (place / f"samples_{task}_2026-11-30T12-00-00.jsonl").write_text(lines)
    scores = {"gapless_choices": {"alias": "gapless_choices", "acc,none": 0.5, "acc_stderr,none": "N/A"}}
    (place / "results_2026-11-30T12-00-00.json").write_text(json.dumps({"results": scores}))
    return folder


def run_of(script: Any, folder: Path, *, repeated_requests: int = 0, **fields: Any) -> dict[str, Any]:
    read = script.read_output(write_run(folder, **fields))
    return {**read, "seconds": 1.0, "repeated_requests": repeated_requests}


def test_equal_runs_are_the_same(script, tmp_path):
    found = script.compared(run_of(script, tmp_path / "a"), run_of(script, tmp_path / "b"))
    assert (found["log_likelihoods"], found["texts"], found["largest_difference"]) == (4, 1, 0.0)
    assert found["scores"] == {"gapless_choices": {"acc,none": 0.5}}
    assert script.is_the_same(found)


@pytest.mark.parametrize(
    "fields", [{"total": -2.4}, {"is_greedy": False}, {"text": " Milan"}, {"repeated_requests": 1}], ids=str
)
def test_a_difference_is_found(script, tmp_path, fields):
    found = script.compared(run_of(script, tmp_path / "a", **fields), run_of(script, tmp_path / "b"))
    assert not script.is_the_same(found)


def test_another_score_is_found(script, tmp_path):
    ours, theirs = run_of(script, tmp_path / "a"), run_of(script, tmp_path / "b")
    ours["scores"]["gapless_choices"]["acc,none"] = 0.75
    assert not script.is_the_same(script.compared(ours, theirs))


def test_commands_name_no_folders(script):
    command = ["lm_eval", "--model_args", "pretrained=/a/b/model,url=http://h:1/v1,dtype=float32"]
    assert script.readable(command) == "lm_eval --model_args pretrained=model,url=http://h:1/v1,dtype=float32"


def test_tasks_are_those_of_the_script(script):
    assert sorted(yaml.safe_load(file.read_text())["task"] for file in TASK_FILES) == sorted(script.TASKS)


@pytest.mark.parametrize("file", TASK_FILES, ids=lambda file: file.stem)
def test_every_sample_has_the_fields_of_its_task(file):
    task = yaml.safe_load(file.read_text())
    lines = (file.parent / task["dataset_kwargs"]["data_files"]["test"]).read_text(encoding="utf-8")
    for sample in map(json.loads, lines.splitlines()):
        for name in ("question", "choices", "text"):
            if f"{{{name}}}" in task["doc_to_text"] + task.get("doc_to_choice", "") + str(
                task["doc_to_target"]
            ):
                assert sample[name]
        if "choices" in sample:
            assert len(set(sample["choices"])) == 4
            assert 0 <= sample["answer"] < 4

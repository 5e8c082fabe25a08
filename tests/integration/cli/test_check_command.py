"""``gapless check``: table or JSON on standard output, and an exit code for CI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gapless.cli.check import _check_model
from gapless.cli.main import main
from gapless.cli.options import EngineOptions

MODULE = """
import torch
from gapless import Input, graphed

ROWS = {"x": Input(dims={0: "rows"})}


def make_example(sizes, generator):
    return {"x": torch.randn(sizes["rows"], 4, generator=generator)}


good = graphed(lambda x: x * 2, inputs=ROWS, sizes=[2, 4], make_inputs=make_example)
uncaptured = graphed(lambda x: x * 2, inputs=ROWS, sizes=[2, 4])
number = 3


def make_good():
    return graphed(lambda x: x * 2, inputs=ROWS, sizes=[2, 4]).capture(torch.randn(3, 4))


def make_bad():
    made = graphed(lambda x: x - x.mean(0), inputs=ROWS, sizes=[2, 4], check_padding=False)
    return made.capture(torch.randn(3, 4))
"""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 16,
    "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "vocab_size": 31, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "checked_module.py"
    path.write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return path


@pytest.mark.parametrize("name", ["good", "make_good"])
@pytest.mark.parametrize("form", ["module", "file"])
def test_a_callable_that_is_right_ends_with_0(
    module: Path, name: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "checked_module" if form == "module" else str(module)
    assert main(["check", f"{source}:{name}"]) == 0
    assert "all checks passed" in capsys.readouterr().out


def test_a_callable_that_is_wrong_ends_with_1_and_says_where(
    module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"{module}:make_bad", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["type"] == "check"
    assert found["ok"] is False
    failed = {result["check"] for result in found["results"] if result["status"] == "failed"}
    assert failed == {"close to plain eager", "ignores padding"}


def test_a_wider_bound_is_passed_on(module: Path) -> None:
    assert main(["check", f"{module}:make_good", "--tolerance", "0.5", "--seed", "3"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --model or a callable"),
        (["checked_module:good", "--model", "smollm2"], "give either --model or a callable"),
        (["checked_module:good", "--few-sizes"], "--few-sizes goes with --model"),
        (["checked_module"], "is not MODULE:NAME"),
        (["checked_module:"], "is not MODULE:NAME"),
        (["no_such_module:x"], "there is no module 'no_such_module'"),
        (["no_such_file.py:x"], "there is no file no_such_file.py"),
        (["checked_module:nothing"], "checked_module has no 'nothing'"),
        (["checked_module:number"], "is a int; name a callable made by gapless.graphed"),
        (["checked_module:uncaptured"], "has not been captured and has no make_inputs"),
    ],
)
def test_mistakes_are_one_sentence_and_end_with_2(
    module: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def model_flags(folder: Path) -> list[str]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return [
        "--model", str(folder), "--load-format", "dummy", "--device", "cpu", "--max-running-requests", "2",
        "--chunked-prefill-size", "8", "--kv-cache-tokens", "128",
    ]  # fmt: skip


def test_a_model_is_checked_and_the_page_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    assert main(["check", *model_flags(tmp_path), "--few-sizes", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "prefill: equals padded eager" in out
    assert "engine: all checks passed" in out
    text = page.read_text()
    assert "Verification" in text
    assert "Ladder coverage" in text


def test_few_sizes_are_all_that_is_captured(tmp_path: Path) -> None:
    """Of four sizes of prefill the smallest, a middle and the largest."""
    flags = EngineOptions(
        model=str(tmp_path), load_format="dummy", device="cpu", max_running_requests=1,
        chunked_prefill_size=16, kv_cache_tokens=128, cuda_graph_backend_prefill="full",
    )  # fmt: skip
    model_flags(tmp_path)
    found, report = _check_model(flags, few_sizes=True, seed=0, tolerance=None)
    assert found.is_ok
    captured = {
        phase: sorted(g["num_tokens"] for g in report["graphs"] if g["phase"] == phase)
        for phase in ("prefill", "decode")
    }
    assert captured == {"prefill": [4, 12, 16], "decode": [1]}


def test_a_model_without_graphs_is_checked_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *model_flags(tmp_path), "--enforce-eager"]) == 2
    assert "nothing to check" in capsys.readouterr().err

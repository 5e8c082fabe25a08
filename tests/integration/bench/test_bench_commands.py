"""``gapless bench`` on a model of one layer: schemas, last lines, files, notes, and what is refused.

Every command runs once; the tests look at what it left.
"""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gapless.bench.charts import charts_of
from gapless.cli.main import main

CONFIG = {
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
SIZES = "--cuda-graph-bs-prefill 8,32 --cuda-graph-bs-decode 1,4"
LIMITS = "--max-running-requests 4 --kv-cache-tokens 512"
ENGINE = f"--load-format dummy --device cpu {LIMITS} {SIZES}".split()
COMMANDS = {
    "latency": "--prefill 4,16,64,100 --decode 1,3,5 --repeats 2 --decode-repeats 2 --decode-tokens 6",
    "throughput": "--requests 5 --lengths 4:90 --output-tokens 4 --repeats 2",
    "serving": "--requests 5 --lengths 4:20 --output-tokens 4 --repeats 2 --request-rate 500 --json",
    "startup": "--repeats 1",
    "graphs": "--strategies full,disabled --requests 3 --lengths log:4:30 --output-tokens 3",
    "profile": "--batch 2,9 --prompt-tokens 8,99 --steps 2",
}
NAMES = {"serving": "throughput"}


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str
    folder: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]

    @property
    def result(self) -> dict[str, Any]:
        return self.lines[-1]


def run_main(*words: str) -> tuple[int, str, str]:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main(["bench", *words])
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="session")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    found = {}
    for name, words in COMMANDS.items():
        folder = tmp_path_factory.mktemp(name)
        files = ["--output", str(folder / "result.json"), "--html", str(folder / "page.html")]
        command = NAMES.get(name, name)
        code, out, err = run_main(command, "--model", str(model), *ENGINE, *words.split(), *files)
        found[name] = Run(code=code, out=out, err=err, folder=folder)
    return found


@pytest.fixture(params=list(COMMANDS))
def run(request: pytest.FixtureRequest, runs: dict[str, Run]) -> Run:
    return runs[request.param]


def test_command_ends_well_and_its_last_line_is_the_result(run: Run) -> None:
    assert run.code == 0, run.err
    assert json.loads(run.out.splitlines()[-1])["type"] == "bench"


def test_result_says_how_it_was_made(run: Run) -> None:
    result = run.result
    assert result["model"] == "tiny"
    assert {"command", "date", "commit", "device", "torch", "python", "gapless"} <= result["meta"].keys()
    assert result["meta"]["command"].split()[0] == "gapless"
    assert isinstance(result["notes"], list)


def test_no_path_of_the_machine_is_in_the_result(run: Run) -> None:
    text = json.dumps({**run.result, "report": None})
    assert str(run.folder.parent) not in text
    assert str(Path.home()) not in text


def test_result_carries_the_report_that_generate_prints_too(run: Run) -> None:
    if run.result["benchmark"] == "startup":
        assert run.result["report"]["graphs"], "of the process that started"
    assert {"plan", "graphs", "steps", "eager", "memory", "startup"} <= run.result["report"].keys()
    assert run.result["engine"]["device"] == "cpu"
    assert run.result["engine"]["prefill"] in ("full", "breakable")


def test_file_holds_the_last_line(run: Run) -> None:
    assert json.loads((run.folder / "result.json").read_text()) == run.result


def test_page_needs_nothing_outside_itself(run: Run) -> None:
    page = (run.folder / "page.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "<svg" in page
    assert not re.search(r"(src|href)\s*=|@import|url\(|<script|<link", page)
    assert run.result["meta"]["commit"] in page


def test_every_chart_has_a_value_for_every_category(run: Run) -> None:
    charts = charts_of(run.result)
    assert charts
    for chart in charts:
        assert all(len(series.values) == len(chart.categories) for series in chart.series), chart.title


def test_notes_are_on_standard_error(run: Run) -> None:
    for note in run.result["notes"]:
        assert f"note: {note}" in run.err


def test_latency_measures_what_fits_and_says_what_does_not(runs: dict[str, Run]) -> None:
    result = runs["latency"].result
    assert list(result["prefill_ms"]) == ["4", "16"]
    assert list(result["decode_ms"]) == ["1", "3"]
    notes = " ".join(result["notes"])
    assert "prefill of 64 tokens left out" in notes
    assert "prefill of 100 tokens left out" in notes
    assert "decode of 5 requests left out: a step holds 4 (--max-running-requests)" in notes


def test_latency_rows_have_a_spread(runs: dict[str, Run]) -> None:
    for row in runs["latency"].result["rows"]:
        assert set(row["ms"]) == {"median", "min", "max", "iqr", "repeats"}
        assert row["ms"]["repeats"] == 2
        assert row["ms"]["min"] <= row["ms"]["median"] <= row["ms"]["max"]
        assert row["phase"] == "decode" or row["ms"]["min"] > 0


def test_latency_prints_a_table_for_people(runs: dict[str, Run]) -> None:
    out = runs["latency"].out
    assert "tokens/s" in out
    assert "graph replays" in out


def test_throughput_counts_every_token(runs: dict[str, Run]) -> None:
    result = runs["throughput"].result
    assert [row["output_tokens"] for row in result["rows"]] == [20, 20]
    for row in result["rows"]:
        assert row["output_tokens_per_s"] == pytest.approx(20 / row["seconds"], rel=0.02)
        assert row["total_tokens_per_s"] > row["output_tokens_per_s"]
    assert result["output_tokens_per_s"]["repeats"] == 2
    assert result["lengths"] == "4:60"
    assert any("4:90 cut to 4:60" in note for note in result["notes"])


@pytest.mark.parametrize("name", ["throughput", "serving"])
@pytest.mark.parametrize("kind", ["ttft_ms", "itl_ms", "e2e_ms"])
def test_latencies_have_percentiles(runs: dict[str, Run], name: str, kind: str) -> None:
    found = runs[name].result["latency"][kind]
    assert 0 <= found["p50"] <= found["p90"] <= found["p99"] <= found["max"]


def test_serving_load_arrives_over_time(runs: dict[str, Run]) -> None:
    result = runs["serving"].result
    assert result["request_rate"] == 500
    assert result["latency"]["e2e_ms"]["max"] < 1e3 * max(row["seconds"] for row in result["rows"]) + 1


def test_with_json_there_are_only_json_lines(runs: dict[str, Run]) -> None:
    lines = runs["serving"].out.splitlines()
    assert [json.loads(line)["type"] for line in lines] == ["row", "row", "bench"]


def test_startup_stages_add_up(runs: dict[str, Run]) -> None:
    result = runs["startup"].result
    (row,) = result["rows"]
    assert {"interpreter", "import torch", "import gapless", "load", "capture"} <= row["stages"].keys()
    assert sum(row["stages"].values()) == pytest.approx(row["ready_s"], abs=0.3)
    assert 0 < row["start_s"] < row["ready_s"]
    assert result["stages"].keys() == row["stages"].keys()


def test_graphs_compares_strategies_on_the_same_requests(runs: dict[str, Run]) -> None:
    full, disabled = runs["graphs"].result["rows"]
    assert (full["strategy"], disabled["strategy"]) == ("full", "disabled")
    assert full["plan"] == {"prefill": "full", "decode": "full"}
    assert full["graphs"] > 0
    assert full["replays"] > 0
    assert full["padding"]["decode"] > 0, "three requests in a graph of four"
    assert (disabled["graphs"], disabled["replays"]) == (0, 0)
    assert disabled["eager_steps"] > 0


def test_profile_has_wall_time_lanes_and_operators(runs: dict[str, Run]) -> None:
    result = runs["profile"].result
    assert list(result["decode"]) == ["2"]
    assert list(result["prefill"]) == ["8"]
    figures = result["decode"]["2"]
    assert figures["wall_us"] > 0
    assert figures["cpu_lanes"][0]["busy_us"] > 0
    assert figures["operators"]
    assert "decode, batch 2 (per step)" in runs["profile"].out
    assert len(result["notes"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("latency", "--model"),
        ("startup", "--model"),
        ("graphs", "--model"),
        ("throughput --model {model} --lengths 9:3", "--lengths"),
        ("latency --model {model} --prefill 0", "--prefill"),
        ("latency --model {model} --decode two", "two"),
        ("latency --model {model} --prefill= --decode=", "nothing to measure"),
        ("profile --model {model} --batch= --prompt-tokens=", "nothing to measure"),
        ("latency --model {model} --repeats 0", "--repeats"),
        ("throughput --model {model} --request-rate 0", "--request-rate"),
        ("graphs --model {model} --strategies full,quick", "'quick'"),
        ("graphs --model {model} --enforce-eager", "--strategies"),
        ("graphs --model {model} --cuda-graph-backend-decode full", "--strategies"),
        ("latency --model {model} --output {model}/none/x.json", "no folder"),
        ("latency --model {model} --html {model}/none/x.html", "no folder"),
        ("latency --model {model}/none", "none"),
        ("startup --model {model}/none --repeats 1", "did not start"),
        ("latency --model {model} --no-such-option", "--no-such-option"),
        ("fastest", "fastest"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(model: Path, words: str, message: str) -> None:
    code, out, err = run_main(*words.format(model=model).split())
    assert code == 2
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("gapless: ")
    assert message in last


def test_answers_longer_than_the_model_are_refused(model: Path) -> None:
    code, _, err = run_main("throughput", "--model", str(model), *ENGINE, "--output-tokens", "64")
    assert code == 2
    assert "--output-tokens=64 leaves no room" in err


def test_png_without_matplotlib_is_refused_before_anything_runs(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gapless.bench.picture.util.find_spec", lambda name: None)
    code, out, err = run_main("latency", "--model", str(model), "--png", str(model / "x.png"))
    assert (code, out) == (2, "")
    assert "gapless[bench]" in err
    assert err.count("\n") == 1


def test_png_is_drawn(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from gapless.bench.picture import draw_png

    draw_png(run.result, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["latency", "throughput", "startup", "graphs", "profile"])
@pytest.mark.parametrize(
    "flag", ["--model", "--load-format", "--dtype", "--output", "--html", "--png", "--json"]
)
def test_common_options_are_in_every_help(command: str, flag: str) -> None:
    code, out, _ = run_main(command, "--help")
    assert code == 0
    assert flag in out

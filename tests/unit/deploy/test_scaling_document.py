"""docs/scaling.md: its flags exist, its numbers are those of the results, its configuration is accepted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer

from gapless.cli.main import app
from gapless.deploy.ray_options import split_options

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks/results"
OF_OTHERS = {"--nproc-per-node"}


def flags_of_commands() -> set[str]:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    every = [commands["serve"], commands["deploy"].commands["ray"], commands["check"]]
    return {name for command in every for parameter in command.params for name in parameter.opts}


def test_every_flag_exists():
    scripts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py"))
    known = flags_of_commands() | set(re.findall(r'"(--[a-z-]+)"', scripts)) | OF_OTHERS
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT)) <= known


@pytest.mark.parametrize(
    "row",
    [
        row
        for row in json.loads((RESULTS / "scale_sim.json").read_text())["rows"]
        if row["routing"] != "turns"
    ],
    ids=lambda row: f"{row['replicas']} {row['routing']}",
)
def test_simulated_numbers_are_those_of_the_result(row):
    ttft, itl = row["ttft_ms"], row["itl_ms"]
    routing = row["routing"] if row["replicas"] > 1 else "–"
    assert (
        f"| {row['replicas']} | {routing} | {ttft['p50']:.0f} / {ttft['p99']:.0f} "
        f"| {itl['p50']:.1f} / {itl['p99']:.1f} | {row['tokens_per_s']:.0f} | {row['cached_part']:.2f} |"
    ) in TEXT


@pytest.mark.parametrize(
    ("name", "words"), [("replicas_waiting", "two bring"), ("ray_waiting", "as Ray Serve deployments")]
)
def test_measured_numbers_are_those_of_the_result(name, words):
    result = json.loads((RESULTS / f"{name}.json").read_text())
    assert f"{words} {result['ratio']['median']:.2f} times" in TEXT
    assert f"of {result['killed']['requests']} requests, none that had" in TEXT
    assert result["killed"]["lost_before_streaming"] == 0


def test_what_a_split_model_was_measured_to_take_is_that_of_the_result():
    result = json.loads((RESULTS / "h200_tensor_parallel.json").read_text())
    one, two = (row for row in result["rows"] if row["strategy"] == "full")
    assert (one["ranks"], two["ranks"]) == (1, 2)
    decode, prefill = (two[name] / one[name] for name in ("decode_ms", "prefill_ms"))
    assert f"one stream ({decode:.2f}) and for a prompt of 2,048 tokens ({prefill:.2f})" in TEXT


def test_the_arguments_of_the_serve_config_file_are_accepted():
    (line,) = re.findall(r"args: \{(.+)\}", TEXT)
    args = {}
    for pair in line.split(", "):
        name, value = pair.split(": ")
        args[name] = int(value) if value.isdecimal() else value
    ours, options = split_options(args)
    assert (ours.bounds, ours.http_replicas) == ((1, 8), 2)
    assert (options.engine.tensor_parallel_size, options.engine.device) == (2, "cuda")

"""``gapless bench serve`` against a whole server in processes of its own, whose tokens can be predicted."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gapless.cli.main import main


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    port_file = tmp_path_factory.mktemp("server") / "address"
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "fake_server.py"), str(port_file)]
    )
    try:
        end = time.monotonic() + 60
        while not port_file.exists():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        yield port_file.read_text()
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture
def bench(url, capsys):
    """Exit code, the result, and everything that was printed."""

    def run(*flags: str) -> tuple[int, dict, str]:
        code = main(["bench", "serve", "--base-url", url, "--random-input-len", "8:64", *flags])
        captured = capsys.readouterr()
        lines = captured.out.splitlines()
        return code, json.loads(lines[-1]) if lines else {}, captured.out + captured.err

    return run


def test_closed_loop_loses_and_mixes_no_token(bench):
    code, result, _ = bench(
        *("--num-prompts", "200", "--random-output-len", "20", "--max-concurrency", "64", "--check", "--json")
    )
    assert code == 0
    assert (result["completed"], result["failed"]) == (200, 0)
    assert result["total_output_tokens"] == 4000
    assert result["check"]["ok"]
    assert result["check"]["answers"] == 200


def test_open_loop_takes_as_long_as_its_arrivals(bench):
    code, result, _ = bench(
        *("--num-prompts", "40", "--random-output-len", "4", "--request-rate", "80", "--json")
    )
    assert code == 0
    assert 0.2 < result["duration"] < 5.0
    assert result["request_rate"] == 80.0
    assert result["median_ttft_ms"] > 0


def test_the_table_and_a_file_have_what_the_last_line_has(bench, tmp_path):
    code, result, text = bench("--num-prompts", "5", "--output", str(tmp_path / "out.json"))
    assert code == 0
    assert "to the first token" in text
    assert json.loads((tmp_path / "out.json").read_text()) == result


def test_the_key_is_in_no_result(bench):
    _, result, text = bench("--num-prompts", "2", "--api-key", "very-secret")
    assert result["completed"] == 2
    assert "very-secret" not in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "other"), "does not exist here"),
        (("--random-input-len", "9000"), "9000"),
        (("--base-url", "http://127.0.0.1:9"), "127.0.0.1:9: no server listens there (yet)"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence_and_exit_code_1(bench, flags, message):
    code, _, text = bench("--num-prompts", "2", *flags)
    assert code == 1
    assert text.startswith("gapless: ")
    assert message in text


@pytest.mark.parametrize(
    "flags",
    [
        ("--burstiness", "0"),
        ("--check", "--temperature", "1"),
        ("--random-input-len", "64:8"),
        ("--output", "/nowhere/at/all.json"),
        ("--base-url", "nothing://x"),
    ],
)
def test_a_wrong_command_line_has_exit_code_2(bench, flags):
    assert bench(*flags)[0] == 2


@pytest.mark.soak
def test_a_thousand_streams_at_once_lose_and_mix_no_token(bench):
    code, result, _ = bench(
        *(
            "--num-prompts",
            "4000",
            "--random-output-len",
            "50",
            "--max-concurrency",
            "1000",
            "--check",
            "--json",
        )
    )
    assert code == 0
    assert result["total_output_tokens"] == 200_000

"""``gapless demo`` around a fake engine: what it prints and when it fails."""

import pytest
from cli_fakes import FakeLLM

from gapless.cli.demo import PROMPTS, first_difference
from gapless.cli.main import main
from gapless.engine.outputs import CompletionOutput, RequestOutput


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch):
    monkeypatch.setattr("gapless.llm.LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "made", [])


def output(*token_ids):
    choice = CompletionOutput(index=0, text="", token_ids=token_ids, finish_reason="stop")
    return RequestOutput(request_id="0", prompt=None, prompt_token_ids=(), outputs=[choice])


def test_demo_prints_every_text_the_table_and_the_verdict(capsys):
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    for prompt in PROMPTS:
        assert prompt.upper() in out
    assert "breakable graph" in out
    assert "eager: larger_than_largest_size" in out
    assert "identical" in out
    assert "DIFFER" not in out


def test_demo_runs_the_packaged_model_unless_told_otherwise():
    main(["demo"])
    main(["demo", "--model", "folder", "--device", "cpu"])
    assert [llm.options["model"] for llm in FakeLLM.made] == ["smollm2", "folder"]
    assert FakeLLM.made[1].options["device"] == "cpu"
    assert all(llm.is_shut_down for llm in FakeLLM.made)


def test_demo_prompts_are_many_and_of_different_lengths():
    lengths = [len(prompt) for prompt in PROMPTS]
    assert len(set(lengths)) == len(PROMPTS) >= 4
    assert max(lengths) > 8 * min(lengths)


def test_difference_is_exit_code_1_and_names_the_place(capsys, monkeypatch):
    monkeypatch.setattr(FakeLLM, "eager_differs_at", 3)
    assert main(["demo"]) == 1
    out = capsys.readouterr().out
    assert "DIFFER" in out
    assert "prompt 1, position 3" in out
    assert "identical" not in out


def test_failed_request_is_exit_code_1(capsys, monkeypatch):
    monkeypatch.setattr("gapless.cli.demo.PROMPTS", ["fine", "bad"])
    assert main(["demo"]) == 1
    out = capsys.readouterr().out
    assert "a bad prompt" in out
    assert "a request failed" in out
    assert "identical" not in out
    assert "again without graphs" not in out, "there is nothing to compare"


def test_counters_start_at_zero_for_the_run_that_is_shown():
    main(["demo"])
    assert FakeLLM.made[0].num_resets == 1


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([output(1, 2)], [output(1, 2)], None),
        ([output()], [output()], None),
        ([output(1, 2)], [output(1, 3)], "prompt 1, position 1: 2 with graphs, 3 without"),
        ([output(1), output(1, 2)], [output(1), output(1)], "prompt 2, position 1: 2 with graphs, the end"),
        ([output(1)], [output(1, 9)], "prompt 1, position 1: the end with graphs, 9 without"),
    ],
)
def test_first_difference(left, right, expected):
    found = first_difference(left, right)
    assert found is None if expected is None else found.startswith(expected)

"""``gapless generate --json-schema`` and ``--regex``: what reaches the engine, and what is refused."""

import io
import json

import pytest
from cli_fakes import FakeLLM

from gapless.cli.main import main


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch):
    monkeypatch.setattr("gapless.llm.LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "made", [])


def run(capsys, *args):
    code = main(["generate", "--model", "m", "--prompt", "hello", *args])
    return code, capsys.readouterr().err


def wanted():
    return FakeLLM.made[0].params.structured_outputs


def test_a_schema_comes_from_a_file(capsys, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object", "title": "é"}', encoding="utf-8")
    assert run(capsys, "--json-schema", str(file))[0] == 0
    assert (wanted().kind, json.loads(wanted().text)) == ("json_schema", {"type": "object", "title": "é"})


def test_a_schema_may_come_from_standard_input(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO('{"type": "null"}'))
    assert run(capsys, "--json-schema", "-")[0] == 0
    assert wanted().text == '{"type": "null"}'


def test_a_regular_expression(capsys):
    assert run(capsys, "--regex", "a{3}")[0] == 0
    assert (wanted().kind, wanted().text) == ("regex", "a{3}")


def test_without_either_text_is_free(capsys):
    assert run(capsys)[0] == 0
    assert wanted() is None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--json-schema", "no-such-file.json"], "cannot be read"),
        (["--regex", "a", "--json-schema", "x"], "one of them"),
        (["--regex", ""], "non-empty"),
    ],
)
def test_what_is_wrong_stops_the_command_before_a_model_loads(capsys, args, words):
    code, err = run(capsys, *args)
    assert code != 0
    assert words in err
    assert FakeLLM.made == []

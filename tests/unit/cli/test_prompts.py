"""Prompts from flags, plain files, JSON lines and standard input, and what mistakes in them say."""

import io

import pytest

from gapless.cli.prompts import collect_prompts, parse_prompts
from gapless.errors import ConfigError


def test_flags_come_before_the_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("three\n", encoding="utf-8")
    assert collect_prompts(["one", "two"], str(path)) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("one\r\ntwo", ["one", "two"]),
        ("\n\none\n   \ntwo\n\n", ["one", "two"]),
        ("  indented\n", ["  indented"]),
        ("plain first\n{not json}\n", ["plain first", "{not json}"]),
        ('{"prompt": "a"}\n\n{"prompt": "b"}\n', ["a", "b"]),
        ('{"token_ids": [1, 2]}\n', [[1, 2]]),
        ('{"prompt": "a"}\n{"token_ids": [3]}\n', ["a", [3]]),
        ('{"token_ids": []}\n', [[]]),
        ('{"prompt": ""}\n', [""]),
        ('{"prompt": "zwei\\nZeilen"}\n', ["zwei\nZeilen"]),
    ],
)
def test_file_is_read_as_lines_or_json_lines(text, expected):
    assert parse_prompts(text, "file") == expected


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{broken", "not JSON"),
        ('{"prompt": 3}', '"prompt" must be a string'),
        ('{"prompt": "a", "token_ids": [1]}', "one key"),
        ('{"text": "a"}', "one key"),
        ("{}", "one key"),
        ('{"token_ids": "12"}', "list of integers"),
        ('{"token_ids": [1, 2.5]}', "list of integers"),
        ('{"token_ids": [true]}', "list of integers"),
        ("[1, 2]", "one key"),
        ("plain text", "not JSON"),
    ],
)
def test_bad_json_line_is_named_by_file_and_line(line, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse_prompts(f'{{"prompt": "fine"}}\n\n{line}\n', "my.jsonl")
    assert str(caught.value).startswith("my.jsonl:3:")


@pytest.mark.parametrize("content", ["", "\n\n", "   \n"])
def test_file_without_prompts_is_an_error(tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="no prompt"):
        collect_prompts(None, str(path))


def test_no_source_at_all_is_an_error_that_says_what_to_give():
    with pytest.raises(ConfigError, match="--prompts-file"):
        collect_prompts(None, None)


def test_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"--prompts-file no/such\.txt: No such file"):
        collect_prompts(None, "no/such.txt")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('\ufeff{"prompt": "a"}\n', ["a"]),
        ("\ufefffirst\nsecond\n", ["first", "second"]),
        ('{"prompt": "a\u2028b"}\n{"prompt": "c\x85d"}\n', ["a\u2028b", "c\x85d"]),
        ("page\x0cbreak\r\nnext\r\n", ["page\x0cbreak", "next"]),
    ],
)
def test_marks_that_only_some_call_line_ends_are_part_of_the_prompt(tmp_path, text, expected):
    path = tmp_path / "prompts"
    path.write_bytes(text.encode())
    assert collect_prompts(None, str(path)) == expected


def test_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00abc")
    with pytest.raises(ConfigError, match="not UTF-8"):
        collect_prompts(None, str(path))


def test_dash_reads_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert collect_prompts(None, "-") == ["from a pipe"]


@pytest.mark.parametrize("closed", ["none", "closed"])
def test_closed_standard_input_is_an_error(monkeypatch, closed):
    stdin = io.StringIO("")
    stdin.close()
    monkeypatch.setattr("sys.stdin", None if closed == "none" else stdin)
    with pytest.raises(ConfigError, match="closed"):
        collect_prompts(None, "-")


def test_piped_mistake_is_named_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt": 1}\n'))
    with pytest.raises(ConfigError, match="standard input:1"):
        collect_prompts(None, "-")

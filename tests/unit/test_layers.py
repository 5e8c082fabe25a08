"""The shape of the package: imports go downward only, torch stays lazy, one reader of the environment, small
files.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import gapless

SRC = Path(gapless.__file__).parent
FILES = sorted(SRC.rglob("*.py"))

RANKS = {
    "errors": 0,
    "env": 0,
    "graphs": 1,
    "kernels": 2,
    "config": 2,
    "config_sources": 2,
    "config_media": 2,
    "models": 3,
    "multimodal": 3,
    "attention": 3,
    "cache": 3,
    "sampling": 3,
    "parallel": 3,
    "engine": 4,
    "llm": 5,
    "llm_inputs": 5,
    "llm_media": 5,
    "bench": 6,
    "cli": 7,
    "serve": 6,
    "deploy": 7,
    "launch_server": 7,
}
"""A part may import its own rank and below. ``gapless/__init__.py`` names everything, lazily."""

MAX_LINES = 500


def name_of(path: Path) -> str:
    parts = ["gapless", *path.relative_to(SRC).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    return module.split(".")[1]


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules named by any import statement below ``tree``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import on line {node.lineno}"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_on_load(tree: ast.Module) -> Iterator[str]:
    """Modules imported when the module itself is: not inside functions, not for type checkers."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(node)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


PATHS = {name_of(path): path for path in FILES}
PARTS: dict[str, list[str]] = {}
for name in PATHS:
    PARTS.setdefault(part_of(name) if "." in name else "gapless", []).append(name)
by_part = pytest.mark.parametrize("modules", PARTS.values(), ids=PARTS.keys())
"""A test for each part, not for each of its files: a test costs more than what it looks at."""


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(PATHS[module].read_text(), str(PATHS[module]))


@by_part
def test_imports_go_downward_only(modules):
    for module in modules:
        if module == "gapless":
            continue
        part = part_of(module)
        assert part in RANKS, f"{module}: give {part!r} a rank in this test"
        for imported in imports(tree_of(module)):
            if imported.startswith("gapless."):
                is_below = RANKS[part_of(imported)] <= RANKS[part]
                assert is_below, f"{module} imports {imported} from a layer above"


def test_the_graph_runtime_knows_torch_and_errors_only():
    allowed = {"torch", "numpy", "gapless.graphs", "gapless.errors", *sys.stdlib_module_names}
    for module in PARTS["graphs"]:
        for imported in imports(tree_of(module)):
            names = imported.split(".")
            top = ".".join(names[:2]) if names[0] == "gapless" else names[0]
            assert top in allowed, f"{module} imports {imported}"


@pytest.mark.parametrize(
    "root",
    [
        "gapless",
        "gapless.config",
        "gapless.env",
        "gapless.attention.registry",
        "gapless.engine.rules",
        "gapless.graphs.plan",
        "gapless.graphs.dispatcher",
        "gapless.sampling.params",
        "gapless.cli.main",
    ],
)
def test_what_must_start_fast_does_not_reach_torch(root):
    seen: set[str] = set()
    pending = [root]
    while pending:
        module = pending.pop()
        if module in seen or module not in PATHS:
            continue
        seen.add(module)
        pending.append(module.rpartition(".")[0])  # importing a.b imports a
        for imported in imports_on_load(tree_of(module)):
            assert imported.split(".")[0] not in ("torch", "transformers", "triton"), (
                f"{root}: {module} imports it"
            )
            pending.append(imported)


def test_importing_the_package_imports_no_torch():
    code = "import sys, gapless; sys.exit(any(name.split('.')[0] == 'torch' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@by_part
def test_only_env_reads_the_environment(modules):
    for module in modules:
        if module == "gapless.env":
            continue
        for node in ast.walk(tree_of(module)):
            is_read = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
            assert not is_read, f"{module}:{node.lineno} reads the environment; put it into gapless/env.py"


@by_part
def test_a_file_is_one_idea(modules):
    for module in modules:
        text = PATHS[module].read_text()
        assert len(text.splitlines()) <= MAX_LINES, module
        assert not text.strip() or ast.get_docstring(tree_of(module)), f"{module} says first what it is"


@by_part
def test_no_error_is_swallowed(modules):
    for module in modules:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ExceptHandler):
                is_pass = all(isinstance(statement, ast.Pass) for statement in node.body)
                is_broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
                assert not (is_pass and is_broad), f"{module}:{node.lineno} swallows every error"

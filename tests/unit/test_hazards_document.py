"""docs/hazards.md names tests for every kind of fault, and each of them exists."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "hazards.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d+) \| .*$", TEXT, flags=re.MULTILINE)
NAMED = sorted(set(re.findall(r"`([\w/*]+)::(test_[\w*]+)`", TEXT)))
KINDS = [
    *(1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 18, 20, 21, 23),
    *(24, 26, 27, 29, 30),
    *(31, 32, 33, 34, 35, 37, 39, 40, 41, 43, 45, 46),
    *(47, 48, 49, 50, 51, 53, 54, 55, 56, 57, 58, 60, 61),
    *(62, 65, 67, 70),
]


def test_every_kind_has_a_row() -> None:
    assert [int(number) for number in ROWS] == KINDS


@pytest.mark.parametrize(
    "line", re.findall(r"^\| \d+ \| .*$", TEXT, flags=re.MULTILINE), ids=lambda s: s.split()[1]
)
def test_every_kind_names_a_test(line: str) -> None:
    assert re.search(r"::test_", line)


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda part: part)
def test_a_named_test_exists(file: str, name: str) -> None:
    folders = [""] if file.startswith("gpu/") else ["unit", "integration"]
    found = [
        function
        for folder in folders
        for path in (ROOT / "tests" / folder).glob(f"{file}.py" if not file.endswith("*") else f"{file}")
        if path.suffix == ".py"
        for function in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    ]
    assert fnmatch.filter(found, name), f"no {name} in {file}"

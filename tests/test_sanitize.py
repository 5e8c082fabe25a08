"""Which cases ``benchmarks/sanitize.py`` runs, and how it reads what the sanitizer says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from sanitize import outcome_of, select


@pytest.mark.parametrize(
    ("per_test", "numbers"),
    [(1, [1]), (2, [1, 5]), (3, [1, 2, 5])],
)
def test_the_first_cases_and_the_last_of_each_test_are_run(per_test: int, numbers: list[int]) -> None:
    node_ids = [*(f"f::a[{i}]" for i in range(1, 6)), "f::b", "f::test_graphs_equal", "f::a[4096]"]
    assert select(node_ids, per_test=per_test) == [*(f"f::a[{i}]" for i in numbers), "f::b"]


@pytest.mark.parametrize(
    ("code", "output", "outcome"),
    [
        (0, "3 passed in 1s\n========= ERROR SUMMARY: 0 errors", "clean"),
        (0, "3 passed in 1s\n========= RACECHECK SUMMARY: 0 hazards displayed", "clean"),
        (9, "3 passed in 1s\n========= ERROR SUMMARY: 2 errors", "findings"),
        (0, "3 passed in 1s\n========= RACECHECK SUMMARY: 4 hazards displayed", "findings"),
        (1, "1 failed\n========= ERROR SUMMARY: 0 errors", "tests failed"),
        (0, "3 skipped in 1s\n========= ERROR SUMMARY: 0 errors", "tests failed"),
        (0, "3 passed in 1s", "tests failed"),
    ],
)
def test_nothing_but_passed_tests_without_findings_is_clean(code: int, output: str, outcome: str) -> None:
    assert outcome_of(code, output) == outcome

"""Medians, spread and percentiles."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.bench.stats import percentile, percentiles, spread

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(VALUES)
@settings(max_examples=50, deadline=None)
def test_the_median_is_the_median(values: list[float]) -> None:
    assert percentile(values, 50) == pytest.approx(statistics.median(values))


@given(VALUES)
@settings(max_examples=50, deadline=None)
def test_spread_is_ordered(values: list[float]) -> None:
    found = spread(values, digits=9)
    assert found["min"] <= found["median"] <= found["max"]
    assert found["iqr"] >= 0
    assert found["iqr"] <= found["max"] - found["min"] + 1e-6
    assert found["repeats"] == len(values)


@pytest.mark.parametrize(
    ("part", "value"), [(0, 1.0), (25, 2.0), (50, 3.0), (75, 4.0), (90, 4.6), (100, 5.0)]
)
def test_percentiles_are_interpolated(part: float, value: float) -> None:
    assert percentile([5.0, 3.0, 1.0, 4.0, 2.0], part) == pytest.approx(value)


def test_one_value_has_no_spread() -> None:
    assert spread([7.0]) == {"median": 7.0, "min": 7.0, "max": 7.0, "iqr": 0.0, "repeats": 1}


def test_percentiles_of_nothing_are_nothing() -> None:
    assert percentiles([]) is None
    assert percentiles([2.0, 4.0]) == {"mean": 3.0, "p50": 3.0, "p90": 3.8, "p99": 3.98, "max": 4.0}

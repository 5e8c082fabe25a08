"""Repeated measurements as a few numbers: the median, and how far apart the repeats lie.

A median alone hides a noisy machine, so no benchmark reports one without its spread. Percentiles are for
latencies of many requests, where the slow ones are the point.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def spread(values: Sequence[float], *, digits: int = 3) -> dict[str, Any]:
    """``median``, ``min``, ``max``, ``iqr`` (between the quartiles) and ``repeats`` of at least one value."""
    low, middle, high = (percentile(values, part) for part in (25, 50, 75))
    return {
        "median": round(middle, digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "iqr": round(high - low, digits),
        "repeats": len(values),
    }


def percentiles(values: Sequence[float], *, digits: int = 3) -> dict[str, Any] | None:
    """``mean``, ``p50``, ``p90``, ``p99`` and ``max``; None without values."""
    if not values:
        return None
    return {
        "mean": round(statistics.fmean(values), digits),
        **{f"p{part}": round(percentile(values, part), digits) for part in (50, 90, 99)},
        "max": round(max(values), digits),
    }


def percentile(values: Sequence[float], part: float) -> float:
    """The value below which ``part`` percent lie, interpolated between neighbours."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * part / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)

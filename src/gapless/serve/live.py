"""The last two minutes of a server, a point a second: what the page draws and nothing stores for longer.

Rates are differences of the engine's totals over its own clock, so a late heartbeat is a gap and not a dip.
Latencies are percentiles of real observations, thinned to a fixed number a second, because the buckets of the
Prometheus histograms are too coarse to read a millisecond from. Invariant: memory and the work of one point
are bounded whatever the load. Read ``dashboard.py`` for who asks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gapless.serve.metrics import RequestMetrics

NUM_POINTS = 120
LATENCY_WINDOW_S = 60.0
MAX_VALUES = 128
"""Latencies kept of one point, of each kind."""

Stats = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Point:
    at_s: float
    stats: Stats
    ttft_s: list[float]
    itl_s: list[float]


class LiveWindow:
    """``sample`` once a second; ``summary`` for the page."""

    def __init__(
        self,
        read_stats: Callable[[], Stats],
        metrics: RequestMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_stats, self._metrics, self._clock = read_stats, metrics, clock
        self._points: deque[_Point] = deque(maxlen=NUM_POINTS + 1)

    def sample(self) -> None:
        """Take a point. Nothing is kept of a moment at which the engine has not said anything yet."""
        ttft_s, itl_s = _take(self._metrics.recent_ttft_s), _take(self._metrics.recent_inter_token_s)
        stats = self._read_stats()
        if stats:
            self._points.append(_Point(self._clock(), stats, ttft_s, itl_s))

    def sample_if_due(self, interval_s: float) -> None:
        """``sample`` unless the last point is younger than that."""
        if not self._points or self._clock() - self._points[-1].at_s >= interval_s:
            self.sample()

    def summary(self) -> dict[str, Any]:
        """``series``: lists of equal length, oldest first, with the age of each point. ``latency``:
        percentiles over the last minute, None without a request in it."""
        now = self._clock()
        pairs = list(pairwise(self._points))
        recent = [point for point in self._points if now - point.at_s <= LATENCY_WINDOW_S]
        return {
            "series": {
                "age_s": [round(now - point.at_s, 1) for _, point in pairs],
                "tokens_in_per_s": _rates(pairs, "prompt_tokens"),
                "tokens_out_per_s": _rates(pairs, "generation_tokens"),
                "running": [point.stats["num_running"] for _, point in pairs],
                "waiting": [point.stats["num_waiting"] for _, point in pairs],
                "kv_usage": [round(point.stats["kv_usage"], 4) for _, point in pairs],
            },
            "latency": {
                "ttft_ms": _percentiles([value for point in recent for value in point.ttft_s]),
                "itl_ms": _percentiles([value for point in recent for value in point.itl_s]),
            },
        }


def _take(values: deque[float]) -> list[float]:
    """Empty ``values``; at most ``MAX_VALUES`` of them, evenly chosen."""
    taken = list(values)
    values.clear()
    stride = -(-len(taken) // MAX_VALUES) or 1
    return taken[::stride]


def _rates(pairs: Sequence[tuple[_Point, _Point]], total: str) -> list[float]:
    """Per second; a point without a new heartbeat repeats the one before."""
    rates: list[float] = []
    for before, after in pairs:
        seconds = after.stats["uptime_s"] - before.stats["uptime_s"]
        if seconds > 0:
            rates.append(round((after.stats[total] - before.stats[total]) / seconds, 1))
        else:
            rates.append(rates[-1] if rates else 0.0)
    return rates


def _percentiles(values_s: list[float]) -> dict[str, float] | None:
    if not values_s:
        return None
    ordered = sorted(values_s)
    last = len(ordered) - 1
    return {
        "p50": round(1e3 * ordered[round(0.50 * last)], 3),
        "p95": round(1e3 * ordered[round(0.95 * last)], 3),
        "samples": len(ordered),
    }

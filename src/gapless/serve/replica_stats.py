"""Statistics of several engines as those of one, and of one engine over its restarts.

Both are sums, so both are made by ``add_stats``. Totals must never fall, because scrapers take differences:
what a dead process had counted is kept under what its successor counts (``StatsHistory``). The clock of the
sum advances by the mean of the live replicas' own clocks, which makes a rate taken over it the sum of their
rates, however their heartbeats are spread. Read ``stats.py`` for the fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gapless.serve.recent_steps import NUM_STEPS

Stats = Mapping[str, Any]

_SUMS = (
    *("num_preemptions", "prompt_tokens", "generation_tokens", "num_steps", "requests_refused"),
    *("prefix_cache_queries", "prefix_cache_hits", "media_encoded", "embedding_cache_hits"),
    *("embedding_cache_evictions", "encoder_captures"),
)
_GAUGES = (
    *("num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_graphs", "capture_s"),
    *("pool_bytes", "driver_bytes", "embedding_cache_bytes"),
)
_HISTOGRAMS = ("queue_time_s", "step_time_s")
_TABLES = {
    "replays": (("phase", "strategy", "bucket"), ("count", "tokens", "padding")),
    "eager": (("phase", "reason"), ("count",)),
}


def add_stats(parts: Sequence[Stats]) -> dict[str, Any]:
    """Field by field. ``uptime_s`` is the longest, ``kv_usage`` that of all blocks together, and
    ``recent_steps`` are those of the parts in turn. A field that no part has is absent."""
    parts = [part for part in parts if part]
    total: dict[str, Any] = {}
    for name in (*_SUMS, *_GAUGES):
        numbers = [part[name] for part in parts if name in part]
        if numbers:
            total[name] = sum(numbers)
    uptimes = [part["uptime_s"] for part in parts if "uptime_s" in part]
    if uptimes:
        total["uptime_s"] = max(uptimes)
    if total.get("num_blocks") and "num_free_blocks" in total:
        total["kv_usage"] = 1 - total["num_free_blocks"] / total["num_blocks"]
    finished: Counter[str] = Counter()
    for part in parts:
        finished.update(part.get("requests_finished", {}))
    if any("requests_finished" in part for part in parts):
        total["requests_finished"] = dict(finished)
    for name in _HISTOGRAMS:
        histograms = [part[name] for part in parts if name in part]
        if histograms:
            total[name] = _add_histograms(histograms)
    for name, (keys, values) in _TABLES.items():
        tables = [part[name] for part in parts if name in part]
        if tables:
            total[name] = _add_tables(tables, keys, values)
    records = [part["recent_steps"] for part in parts if "recent_steps" in part]
    if records:
        share = NUM_STEPS // len(records)
        total["recent_steps"] = [record for steps in records for record in steps[-share:]]
    return total


class StatsHistory:
    """Of one replica. ``before`` holds the totals of its processes that have ended."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}

    def retire(self, stats: Stats) -> None:
        """The process that counted ``stats`` is gone: totals stay, what it held does not."""
        gone = {name: 0 for name in _GAUGES if name in stats} | {"uptime_s": 0.0, "recent_steps": []}
        self._before = add_stats([self._before, {**stats, **gone}]) if stats else self._before

    def now(self, stats: Stats) -> dict[str, Any]:
        """Of the process that runs, or nothing where none has said anything yet."""
        if not stats:
            return dict(self._before)
        if not self._before:
            return dict(stats)
        return {**add_stats([self._before, stats]), "recent_steps": stats.get("recent_steps", [])}


class SharedClock:
    """The uptime of all replicas together; see the module."""

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}
        self._uptime_s = 0.0

    def advance(self, uptimes_s: Mapping[int, float]) -> float:
        """``uptimes_s``: by replica, of those that live. Returns the common one, which never falls."""
        if uptimes_s:
            # A process that was started again begins at 0.
            gains = [max(0.0, now - self._seen.get(index, 0.0)) for index, now in uptimes_s.items()]
            self._uptime_s += sum(gains) / len(gains)
        self._seen = dict(uptimes_s)
        return self._uptime_s


def _add_histograms(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All have the same bounds: one program made them."""
    return {
        "bounds": records[0]["bounds"],
        "counts": [sum(column) for column in zip(*(record["counts"] for record in records), strict=True)],
        "sum": sum(record["sum"] for record in records),
    }


def _add_tables(
    tables: Sequence[Sequence[Mapping[str, Any]]], keys: Sequence[str], values: Sequence[str]
) -> list[dict[str, Any]]:
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for table in tables:
        for row in table:
            key = tuple(row[name] for name in keys)
            known = rows.get(key)
            if known is None:
                rows[key] = dict(row)
            else:
                for name in values:
                    known[name] += row[name]
    return list(rows.values())

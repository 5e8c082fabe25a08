"""The numbers that ``/metrics`` needs of the engine, as the heartbeat carries them once a second.

Totals count from the engine's start and never fall, so a scraper can take differences. What a request
experiences (time to first token, between tokens, end to end) is measured in the HTTP process, where it is
experienced; only the time in the queue is measured here, where the queue is. Read ``engine_loop.py`` for
where they are counted.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

if TYPE_CHECKING:
    from gapless.engine.core import EngineCore
    from gapless.graphs.report import StepLog
    from gapless.serve.recent_steps import StepRecord

QUEUE_TIME_BOUNDS_S = (
    *(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)
STEP_TIME_BOUNDS_S = (
    *(0.0003, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0),
)


class HistogramRecord(TypedDict):
    """``counts[i]`` observations were at most ``bounds[i]`` (and above the bound before); the last of
    ``counts``, one more than ``bounds``, is the rest."""

    bounds: list[float]
    counts: list[int]
    sum: float


class EngineStats(TypedDict):
    """What ``EngineClient.stats()`` returns; empty before the first heartbeat."""

    uptime_s: float
    num_running: int
    """Sequences that take part in steps."""
    num_waiting: int
    """Sequences in the engine's queue, preempted ones included."""
    kv_usage: float
    """Part of the KV cache's blocks that is in use, 0 to 1."""
    num_blocks: int
    """Blocks that can be in use at once."""
    num_free_blocks: int
    num_preemptions: int
    prompt_tokens: int
    """Of all requests that were accepted."""
    generation_tokens: int
    num_steps: int
    requests_finished: dict[str, int]
    """Choices that have ended, by finish reason: stop, length, abort, error."""
    requests_refused: int
    replays: list[dict[str, Any]]
    """``{phase, strategy, bucket, count, tokens, padding}``, as in the report."""
    eager: list[dict[str, Any]]
    """``{phase, reason, count}``."""
    num_graphs: int
    capture_s: float
    pool_bytes: int
    driver_bytes: int
    prefix_cache_queries: int
    """Prompt tokens looked up in the prefix cache; 0 without one."""
    prefix_cache_hits: int
    """Prompt tokens found there."""
    media_encoded: NotRequired[int]
    """Images and videos that the encoder has made rows of; this and the next ones only with an encoder."""
    embedding_cache_hits: NotRequired[int]
    """Images and videos of steps whose rows were there already."""
    embedding_cache_evictions: NotRequired[int]
    embedding_cache_bytes: NotRequired[int]
    encoder_captures: NotRequired[int]
    """Graphs of the encoder captured while serving (exact mode)."""
    queue_time_s: HistogramRecord
    """From a request's arrival in the engine to its first step."""
    step_time_s: HistogramRecord
    recent_steps: list[list[Any]]
    """The last steps, oldest first; see ``recent_steps.py``."""


class Histogram:
    """Counts observations by the first bound they do not exceed."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def record(self) -> HistogramRecord:
        return {"bounds": self._bounds, "counts": list(self._counts), "sum": self._sum}


class EngineCounters:
    """What the loop counts itself."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.num_steps = 0
        self.requests_refused = 0
        self.requests_finished: Counter[str] = Counter()
        self.queue_time_s = Histogram(QUEUE_TIME_BOUNDS_S)
        self.step_time_s = Histogram(STEP_TIME_BOUNDS_S)


def collect_stats(
    core: EngineCore,
    counters: EngineCounters,
    *,
    log: StepLog | None,
    capture: Mapping[str, Any],
    uptime_s: float,
    recent_steps: Sequence[StepRecord] = (),
) -> EngineStats:
    """The record as it is now. ``capture``: ``num_graphs`` and the report's ``memory``, which are fixed once
    everything is captured."""
    scheduler = core.scheduler
    allocator, cache = scheduler.allocator, scheduler.prefix_cache
    stats: EngineStats = {
        "uptime_s": uptime_s,
        "num_running": len(scheduler.running),
        "num_waiting": len(scheduler.waiting),
        "kv_usage": allocator.num_used / allocator.num_usable,
        "num_blocks": allocator.num_usable,
        "num_free_blocks": allocator.num_free,
        "num_preemptions": scheduler.num_preemptions,
        "prompt_tokens": counters.prompt_tokens,
        "generation_tokens": counters.generation_tokens,
        "num_steps": counters.num_steps,
        "requests_finished": dict(counters.requests_finished),
        "requests_refused": counters.requests_refused,
        "replays": log.steps() if log is not None else [],
        "eager": log.eager_steps() if log is not None else [],
        "num_graphs": int(capture.get("num_graphs", 0)),
        "capture_s": float(capture.get("capture_s", 0.0)),
        "pool_bytes": int(capture.get("pool_bytes", 0)),
        "driver_bytes": int(capture.get("driver_bytes", 0)),
        "prefix_cache_queries": cache.num_queries if cache is not None else 0,
        "prefix_cache_hits": cache.num_hits if cache is not None else 0,
        "queue_time_s": counters.queue_time_s.record(),
        "step_time_s": counters.step_time_s.record(),
        "recent_steps": [list(record) for record in recent_steps],
    }
    if core.runner.media is not None:
        _add_media(stats, core.runner.media.report())
    return stats


def _add_media(stats: EngineStats, report: Mapping[str, Any]) -> None:
    cache, encoder = report["embedding_cache"], report["encoder"]
    stats["media_encoded"] = cache["encoded"]
    stats["embedding_cache_hits"] = cache["hits"]
    stats["embedding_cache_evictions"] = cache["evicted"]
    stats["embedding_cache_bytes"] = cache["bytes"]
    stats["encoder_captures"] = encoder.get("captures", 0)

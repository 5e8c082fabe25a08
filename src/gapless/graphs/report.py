"""What ran: counters per kind of step, and the report the CLI, the server and the benchmarks all print.

Every step lands in exactly one of two tables: replays by (phase, strategy, bucket) with their padding, or
eager steps by (phase, reason). A fallback that is not in the second table cannot happen, because the engine
counts where it decides.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from gapless.graphs.modes import Phase, Strategy
from gapless.graphs.store import GraphStore
from gapless.graphs.timeline import Timeline


@dataclass(slots=True)
class StepCounts:
    count: int = 0
    tokens: int = 0
    padding: int = 0


@dataclass(slots=True)
class StepLog:
    """Counters of one runtime. ``bucket`` is tokens for prefill, requests or rows for the others."""

    replays: dict[tuple[Phase, Strategy, int], StepCounts] = field(default_factory=dict)
    eager: Counter[tuple[Phase, str]] = field(default_factory=Counter)
    timeline: Timeline = field(default_factory=Timeline)

    def count_replay(self, phase: Phase, strategy: Strategy, bucket: int, num_real: int) -> None:
        counts = self.replays.get((phase, strategy, bucket))
        if counts is None:
            counts = self.replays[phase, strategy, bucket] = StepCounts()
        counts.count += 1
        counts.tokens += num_real
        counts.padding += bucket - num_real
        self.timeline.count(is_replay=True)

    def count_eager(self, phase: Phase, reason: str) -> None:
        self.eager[phase, reason] += 1
        self.timeline.count(is_replay=False)

    def clear(self) -> None:
        """Forget everything counted so far (a benchmark's warm-up)."""
        self.replays.clear()
        self.eager.clear()
        self.timeline.clear()

    def steps(self) -> list[dict[str, Any]]:
        return [
            {
                "phase": str(phase),
                "strategy": str(strategy),
                "bucket": bucket,
                "count": counts.count,
                "tokens": counts.tokens,
                "padding": counts.padding,
            }
            for (phase, strategy, bucket), counts in sorted(self.replays.items())
        ]

    def eager_steps(self) -> list[dict[str, Any]]:
        return [
            {"phase": str(phase), "reason": reason, "count": count}
            for (phase, reason), count in sorted(self.eager.items())
        ]


def build_report(*, plan: dict[str, Any], store: GraphStore | None, log: StepLog) -> dict[str, Any]:
    """The report schema: ``plan``, ``graphs`` (the ledger), ``failures``, ``steps``, ``eager``,
    ``timeline``, ``memory``. Without a store there are no graphs."""
    ledger = store.ledger if store is not None else []
    failures = store.failures if store is not None else []
    return {
        "plan": plan,
        "graphs": [row.to_dict() for row in ledger],
        "failures": [{"graph": str(f.key), "message": f.message} for f in failures],
        "steps": log.steps(),
        "eager": log.eager_steps(),
        "timeline": log.timeline.to_dict(),
        "memory": {
            "pool_bytes": store.pool_bytes if store is not None else 0,
            "driver_bytes": sum(row.driver_bytes for row in ledger),
            "capture_s": round(sum(row.capture_s for row in ledger), 3),
        },
    }

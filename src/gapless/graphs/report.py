"""What ran: counters per kind of step, and the report the CLI, the server and the benchmarks all print.

Every step lands in exactly one of two tables: replays by (phase, strategy, bucket) with their padding, or
eager steps by (phase, reason). A fallback that is not in the second table cannot happen, because the engine
counts where it decides.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gapless.graphs.modes import Phase, Strategy
from gapless.graphs.store import GraphStore
from gapless.graphs.timeline import Timeline


@dataclass(slots=True)
class StepCounts:
    count: int = 0
    tokens: int = 0
    padding: int = 0


class Run(NamedTuple):
    """One thing that ran: a replay, or without ``strategy`` an eager run and its ``reason``."""

    phase: Phase
    strategy: Strategy | None
    bucket: int
    num_real: int
    reason: str


_MAX_RECENT = 64
"""More than one step counts; whoever wants to see every run looks after every step."""


@dataclass(slots=True)
class StepLog:
    """Counters of one runtime. ``bucket`` is tokens for prefill, requests or rows for the others."""

    replays: dict[tuple[Phase, Strategy, int], StepCounts] = field(default_factory=dict)
    eager: Counter[tuple[Phase, str]] = field(default_factory=Counter)
    timeline: Timeline = field(default_factory=Timeline)
    recent: deque[Run] = field(default_factory=lambda: deque(maxlen=_MAX_RECENT))
    """The last runs, oldest first; a reader may take them out."""

    def count_replay(self, phase: Phase, strategy: Strategy, bucket: int, num_real: int) -> None:
        counts = self.replays.get((phase, strategy, bucket))
        if counts is None:
            counts = self.replays[phase, strategy, bucket] = StepCounts()
        counts.count += 1
        counts.tokens += num_real
        counts.padding += bucket - num_real
        self.timeline.count(is_replay=True)
        self.recent.append(Run(phase, strategy, bucket, num_real, ""))

    def count_eager(self, phase: Phase, reason: str, *, num_real: int = 0) -> None:
        """``num_real``: how many tokens or rows ran, where that is known."""
        self.eager[phase, reason] += 1
        self.recent.append(Run(phase, None, 0, num_real, reason))
        self.timeline.count(is_replay=False)

    def clear(self) -> None:
        """Forget everything counted so far (a benchmark's warm-up)."""
        self.replays.clear()
        self.eager.clear()
        self.timeline.clear()
        self.recent.clear()

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
        "failures": [{"graph": f.key.text, "message": f.message} for f in failures],
        "steps": log.steps(),
        "eager": log.eager_steps(),
        "timeline": log.timeline.to_dict(),
        "memory": {
            "pool_bytes": store.pool_bytes if store is not None else 0,
            "driver_bytes": sum(row.driver_bytes for row in ledger),
            "capture_s": round(sum(row.capture_s for row in ledger), 3),
        },
    }

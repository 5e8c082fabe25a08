"""The last few hundred steps, one short record each, for a page that shows them as a strip.

What ran is taken from the step log, which every counted run passes: a step of the engine opens with its
prefill or decode run, and runs of its head and sampling that were eager are added to it as reasons. A step
costs a few appends; nothing grows, and the records travel with the heartbeat. Read ``stats.py`` for the rest
of what travels.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from gapless.graphs.modes import Phase

if TYPE_CHECKING:
    from gapless.graphs.report import Run, StepLog

NUM_STEPS = 300
EAGER = "eager"
"""Stands where a replay has its strategy."""

_OPENING = (Phase.PREFILL, Phase.DECODE)


class StepRecord(NamedTuple):
    """``size`` is the graph's bucket and ``real`` what of it was used: tokens for prefill, requests for
    decode. ``reason``: why something of the step ran eagerly, empty when nothing did."""

    phase: str
    strategy: str
    size: int
    real: int
    reason: str
    ms: float


class RecentSteps:
    """A ring of step records, fed after each step from what ``log`` has seen since."""

    def __init__(self, log: StepLog | None, *, num_steps: int = NUM_STEPS) -> None:
        self._log = log
        self.records: deque[StepRecord] = deque(maxlen=num_steps)
        if log is not None:
            log.recent.clear()  # of the start-up

    def add(self, seconds: float) -> None:
        """The engine has just worked for ``seconds``. Steps launched in one go share the time."""
        if self._log is None or not self._log.recent:
            return
        steps: list[list[Run]] = []
        recent = self._log.recent
        while recent:
            run = recent.popleft()
            if run.phase in _OPENING or not steps:
                steps.append([run])
            else:
                steps[-1].append(run)
        ms = round(1e3 * seconds / len(steps), 3)
        self.records.extend(_record(runs, ms) for runs in steps)


def _record(runs: list[Run], ms: float) -> StepRecord:
    first = runs[0]
    reasons = [run.reason if run is first else f"{run.phase}: {run.reason}" for run in runs if run.reason]
    return StepRecord(
        str(first.phase),
        EAGER if first.strategy is None else str(first.strategy),
        first.bucket,
        first.num_real,
        ", ".join(reasons),
        ms,
    )

"""Row stages (head, sampling): graphs keyed by the number of sampled rows, at most one per request.

They need no dispatcher: there is one shape, and the smallest captured size that fits serves. What cannot be
served (stage switched off, capture failed) runs eagerly at the real size and is counted, like any other step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.modes import Phase, RuntimeMode, Strategy
from gapless.graphs.report import StepLog
from gapless.graphs.runner import GraphRunner

PADDED_EAGER = "padded_eager"
"""Reason of steps that ran eagerly on the padded bucket because the caller asked for graphs off."""


class RowGraphs:
    """Runs row stages on the sizes of their ladder; ``padded_eager`` turns replays into eager runs of the
    same bucket.

    The head uses ``sizes``. Sampling uses the powers of two below their largest, and that: its graphs hold
    hundreds of nodes for every 32 rows, so a fine ladder costs seconds of start-up and megabytes a size, and
    rows are cheap.
    """

    def __init__(self, sizes: tuple[int, ...], log: StepLog) -> None:
        self.sizes = sizes
        largest = sizes[-1] if sizes else 0
        self.sampling_sizes = tuple(sorted({largest, *(1 << i for i in range(largest.bit_length()))} - {0}))
        self.padded_eager = False
        self._log = log
        self._failed: set[tuple[str, int]] = set()

    def descriptors(self, runner: GraphRunner) -> list[BatchDescriptor]:
        """What ``runner`` is to capture."""
        sizes = self._sizes_of(runner)
        return [_descriptor(rows) for rows in sizes if (runner.phase, rows) not in self._failed]

    def drop(self, runner: GraphRunner, failed: list[BatchDescriptor]) -> None:
        """Sizes whose capture failed are never looked up again; the next larger one may serve."""
        self._failed.update((runner.phase, descriptor.num_reqs) for descriptor in failed)

    def run(self, runner: GraphRunner, values: Mapping[str, np.ndarray], num_rows: int) -> tuple[Tensor, ...]:
        """Run ``runner`` on ``num_rows`` real rows."""
        reason, size = self._find(runner, num_rows)
        if size is None:
            self._log.count_eager(runner.phase, reason)
            return runner.run_eager(_descriptor(num_rows), values)
        real = {"rows": num_rows}
        if self.padded_eager:
            self._log.count_eager(runner.phase, PADDED_EAGER)
            return runner.run(_descriptor(size), RuntimeMode.NONE, values, num_real=real)
        results = runner.run(_descriptor(size), runner.strategy.runtime_mode, values, num_real=real)
        self._log.count_replay(runner.phase, runner.strategy, size, num_rows)
        return results

    def _find(self, runner: GraphRunner, num_rows: int) -> tuple[str, int | None]:
        if runner.strategy is Strategy.DISABLED:
            return "phase_disabled", None
        sizes = self._sizes_of(runner)
        for size in sizes[bisect_left(sizes, num_rows) :]:
            if (runner.phase, size) not in self._failed:
                return "", size
        return "capture_failed" if self._failed else "larger_than_largest", None

    def _sizes_of(self, runner: GraphRunner) -> tuple[int, ...]:
        return self.sizes if runner.phase is Phase.HEAD else self.sampling_sizes


def _descriptor(num_rows: int) -> BatchDescriptor:
    return BatchDescriptor(num_tokens=num_rows, num_reqs=num_rows, uniform=True)

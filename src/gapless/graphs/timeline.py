"""Timeline: replays and eager steps over time, in a fixed number of bins.

A server runs for weeks, so neither the steps nor the bins may grow without bound: when time runs past the
last bin, neighbours are added together and every bin gets twice as wide. Invariant: the sums over all bins
are the numbers counted since ``clear``. Used by ``report.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

NUM_BINS = 120
"""Even, because folding adds pairs."""


class Timeline:
    """Counts per bin since the first step."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        self._start: float | None = None
        self._bin_s = 1.0
        self._replays: list[int] = [0] * NUM_BINS
        self._eager: list[int] = [0] * NUM_BINS
        self._num_used = 0

    def count(self, *, is_replay: bool) -> None:
        now = self._clock()
        if self._start is None:
            self._start = now
        index = int((now - self._start) / self._bin_s)
        while index >= NUM_BINS:
            self._fold()
            index = int((now - self._start) / self._bin_s)
        self._num_used = max(self._num_used, index + 1)
        (self._replays if is_replay else self._eager)[index] += 1

    def to_dict(self) -> dict[str, Any]:
        """Width of a bin in seconds, and the counts of every bin up to the last that was used."""
        return {
            "bin_s": self._bin_s,
            "replays": self._replays[: self._num_used],
            "eager": self._eager[: self._num_used],
        }

    def _fold(self) -> None:
        self._replays, self._eager = (
            [a + b for a, b in zip(bins[::2], bins[1::2], strict=True)] + [0] * (NUM_BINS // 2)
            for bins in (self._replays, self._eager)
        )
        self._bin_s *= 2
        self._num_used = -(-self._num_used // 2)

"""How many requests may be inside at once, and when to come back if that is too many.

The bound is what makes the queue's memory and the wait in it finite: a request beyond it is told so at once,
which costs nothing, instead of timing out after minutes. Counted in choices, which is what takes a place in a
step, and in bytes of prepared images, which wait with their request. Read ``process_client.py`` next.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from gapless.serve.client import EngineBusyError

_WINDOW = 256
"""Ends of requests that the estimate looks at."""
_WINDOW_S = 60.0
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


class Admission:
    """``max_running`` choices run, ``max_queued`` more may wait; their images take ``max_bytes``."""

    def __init__(
        self,
        *,
        max_running: int,
        max_queued: int,
        max_bytes: int = 2**40,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_running, self.max_queued, self.max_bytes = max_running, max_queued, max_bytes
        self.num_inside = 0
        self.num_bytes_inside = 0
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_WINDOW)

    def enter(self, num_choices: int = 1, *, num_bytes: int = 0) -> None:
        """Raises ``EngineBusyError``. A request that comes while there is room may bring more choices than
        there is room for: else one with many could never run."""
        limit = self.max_running + self.max_queued
        if self.num_inside >= limit:
            raise EngineBusyError(
                f"the server is busy: {self.num_inside} requests run or wait and at most {limit} may "
                f"({self.max_running} running, {self.max_queued} queued); try again later",
                retry_after_s=self.retry_after_s(),
            )
        if num_bytes and self.num_bytes_inside and self.num_bytes_inside + num_bytes > self.max_bytes:
            raise EngineBusyError(
                f"the server is busy: images and videos of requests inside take {self.num_bytes_inside} "
                f"bytes, and with this one's {num_bytes} they would take more than {self.max_bytes} "
                "(--max-media-bytes); try again later",
                retry_after_s=self.retry_after_s(),
            )
        self.num_inside += num_choices
        self.num_bytes_inside += num_bytes

    def leave(self, num_choices: int = 1, *, num_bytes: int = 0) -> None:
        self.num_inside -= num_choices
        self.num_bytes_inside -= num_bytes
        now = self._clock()
        self._ends.extend([now] * min(num_choices, _WINDOW))

    def retry_after_s(self) -> float:
        """When half of the queue will have been served, at the rate of the last minute; 1 to 60."""
        now = self._clock()
        ends = [end for end in self._ends if now - end <= _WINDOW_S]
        if len(ends) < 2:
            return _MIN_RETRY_S
        rate = len(ends) / max(now - ends[0], 1e-3)
        num_waiting = max(0, self.num_inside - self.max_running)
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, num_waiting / 2 / rate))

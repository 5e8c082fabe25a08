"""A limit for what may take no longer: a rank that hangs without dying closes no connection.

Whoever waits for other ranks does so inside ``watching``; a thread looks at the clock. Invariants: time
between such blocks does not count, so an engine may rest as long as it likes; ``on_late`` is called at most
once, from the thread. Read ``workers.py`` for what is done about a rank that is late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOOKS_PER_LIMIT = 4
_LONGEST_NAP_S = 1.0


class Watchdog:
    """Calls ``on_late`` with a name and its limit in seconds when a block of that name takes longer."""

    def __init__(self, on_late: Callable[[str, float], None]) -> None:
        self._on_late = on_late
        self._watched: tuple[str, float, float] | None = None
        """Name, limit, and since when."""
        self._is_closed = threading.Event()
        self._has_work = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, name: str, limit_s: float) -> Iterator[None]:
        """The block, of the one thread that waits for ranks, may take ``limit_s``; blocks may be nested, and
        then the inner one counts alone."""
        before, self._watched = self._watched, (name, limit_s, time.monotonic())
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="rank-watchdog", daemon=True)
            self._thread.start()
        self._has_work.set()
        try:
            yield
        finally:
            self._watched = None if before is None else (before[0], before[1], time.monotonic())

    def progress(self, limit_s: float) -> None:
        """What is watched goes on: its time begins again, and may be ``limit_s`` from now on."""
        watched = self._watched
        if watched is not None:
            self._watched = (watched[0], limit_s, time.monotonic())

    def close(self) -> None:
        self._is_closed.set()
        self._has_work.set()

    def _watch(self) -> None:
        while not self._is_closed.is_set():
            watched = self._watched
            if watched is None:
                # Set again by the next block: an engine at rest wakes nobody.
                self._has_work.clear()
                if self._watched is None and not self._is_closed.is_set():
                    self._has_work.wait()
                continue
            name, limit_s, since = watched
            if time.monotonic() - since > limit_s and self._watched is watched:
                self._on_late(name, limit_s)
                return
            self._is_closed.wait(min(_LONGEST_NAP_S, limit_s / _LOOKS_PER_LIMIT))

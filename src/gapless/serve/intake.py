"""Requests that have arrived, prepared in the order of their arrival, a few per turn of the event loop.

Sockets are read all at once: of 256 requests that come together each would otherwise go through every
stage beside all others, so that the first reaches the engine hardly before the last, and no token is passed
on until all are prepared. Here a request whose head has arrived waits for its turn, and in that turn it goes
through to the engine without waiting for anything. Invariant: nobody is held up by another's slow body,
because a request whose body is not complete by its turn goes on later by itself. Read ``connection.py`` for
who waits, ``delivery.py`` for the other direction.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

PER_TURN = 4
"""Requests. About a millisecond of work, after which tokens are passed on."""


class Intake:
    """Of one server; its methods run on one event loop."""

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = per_turn
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_running = False

    def add(self, begin: Callable[[], None]) -> None:
        """``begin`` starts the preparation of a request, as a task. It must not raise."""
        self._waiting.append(begin)
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_soon(self._begin_some)

    def _begin_some(self) -> None:
        for _ in range(min(self._per_turn, len(self._waiting))):
            self._waiting.popleft()()
        # Behind the tasks that were just made, so the next requests begin when these have had their turn.
        self._is_running = bool(self._waiting)
        if self._is_running:
            asyncio.get_running_loop().call_soon(self._begin_some)

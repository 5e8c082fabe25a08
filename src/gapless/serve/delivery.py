"""Deltas on their way from the engine's messages to the streams that wait for them.

One step's message wakes a stream per running request, and each then takes its turn on the event loop: with
256 of them several milliseconds, in which nothing else moves. A new request needs many turns until the engine
has it, so handing out everything at once would make it wait that long many times over. A few requests per
turn leave turns for others. Invariant: a request's deltas stay in order, and what waits here while more
arrives is handed out together, so that a slow process writes fewer and longer events instead of falling
behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from gapless.serve.messages import Delta

PER_TURN = 32
"""Requests. About a millisecond of work for the streams that they wake."""


class Delivery:
    """``deliver`` is given a request and its new deltas."""

    def __init__(self, deliver: Callable[[str, list[Delta]], None]) -> None:
        self._deliver = deliver
        self._waiting: dict[str, list[Delta]] = {}

    def add(self, deltas: Iterable[Delta]) -> None:
        waiting = self._waiting
        for delta in deltas:
            found = waiting.get(delta.request_id)
            if found is None:
                waiting[delta.request_id] = [delta]
            else:
                found.append(delta)

    def hand_out(self, num_requests: int | None = PER_TURN) -> bool:
        """Deltas of the requests that have waited longest, by default of a few, with None of all; whether
        others still wait."""
        waiting = self._waiting
        for request_id in list(islice(waiting, num_requests)):  # one look at the dict, however many have left
            self._deliver(request_id, waiting.pop(request_id))
        return bool(waiting)

"""Other processes that capture the same graphs at the same time, because their kernels wait for each other.

A collective inside a graph runs only when every process replays that graph, so all have to hold the same
ones: what one cannot capture, none keeps. Nothing here knows how processes talk; who has peers passes an
object to its ``GraphStore``. Invariant: in one capture every process asks ``first_problem`` equally often, in
the same places: before it, before segments are replayed in the middle of it, and after it. One that fails
says so at its next place and the others fail there too. Read ``capture.py`` for the places.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from gapless.errors import CaptureError


class Peers(Protocol):
    """All processes that capture together, this one included."""

    def first_problem(self, own: str | None = None) -> str | None:
        """What keeps the first process that has a problem from going on; None when all are well. Waits for
        every process. Raises ``RankError`` when one is gone."""

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Wait on the host until ``is_done``. Raises ``RankError`` when a process is gone meanwhile, for then
        the device may wait for it for ever."""

    def capturing(self) -> AbstractContextManager[None]:
        """Around every capture: what was queued before has ended, and collectives may be recorded."""

    def warming_up(self) -> AbstractContextManager[None]:
        """Around all captures of a store: what runs between them are warm-ups, whose results nobody
        reads."""


class PeerCaptureError(CaptureError):
    """The capture went well here and failed elsewhere."""


def check_peers(peers: Peers | None) -> None:
    """Wait until all processes have come here. Raises ``PeerCaptureError`` if one cannot go on."""
    problem = None if peers is None else peers.first_problem()
    if problem is not None:
        raise PeerCaptureError(f"another process could not capture this: {problem}", cause=problem)

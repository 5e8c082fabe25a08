"""One of several replicas over all its lives: the engine process of now, and when there will be another.

A process that dies is started again after a pause that doubles with every death in short succession; one that
has lived long enough begins with a clean record. When its restarts are used up a replica stays dead and the
server goes on with the others. Invariant: at most one engine process per replica, and none after ``close``.
Read ``replicas.py`` for who sends requests here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from gapless.serve.client import ReplicaView
from gapless.serve.process_client import ProcessClient, ProgressCallback
from gapless.serve.replica_stats import StatsHistory

MAX_PAUSE_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartRule:
    """``max_restarts`` in a row, ``first_pause_s`` before the first and twice as long before each next one.
    Whoever has lived for ``forgiven_after_s`` starts anew."""

    max_restarts: int = 5
    first_pause_s: float = 1.0
    forgiven_after_s: float = 300.0

    def pause_s(self, num_deaths: int) -> float:
        return min(MAX_PAUSE_S, self.first_pause_s * 2.0 ** min(num_deaths - 1, 16))


class Replica:
    """``make_client`` makes the client of one life. ``on_change`` is called when it has died, is ready again,
    or has been given up."""

    def __init__(
        self,
        index: int,
        make_client: Callable[[], ProcessClient],
        *,
        rule: RestartRule,
        environment: Mapping[str, str],
        on_change: Callable[[Replica], None],
    ) -> None:
        self.index = index
        self.client = make_client()
        self.load_tokens = 0
        self.num_routed: Counter[str] = Counter()
        self.num_restarts = 0
        self._make_client, self._rule, self._on_change = make_client, rule, on_change
        self._environment = dict(environment)
        self._history = StatsHistory()
        self._supervisor: asyncio.Task[None] | None = None
        self._last_death: str | None = None
        self._state: Literal["ready", "starting", "dead"] = "starting"

    async def start(self, progress: ProgressCallback | None = None) -> None:
        """The first life; its errors are the caller's, as those of ``ProcessClient.start``."""
        await self.client.start(progress)
        self._state = "ready"
        self._supervisor = asyncio.create_task(self._supervise(), name=f"replica-{self.index}")

    async def close(self, *, drain_s: float = 0.0) -> int:
        """The exit code of the last process; one that had died before is not asked again."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        return await self.client.close(drain_s=drain_s)

    @property
    def is_ready(self) -> bool:
        return self._state == "ready" and self.client.is_alive

    @property
    def is_healthy(self) -> bool:
        return self.is_ready and self.client.is_healthy

    @property
    def is_given_up(self) -> bool:
        return self._state == "dead"

    def uptime_s(self) -> float | None:
        """Of the process that runs, by its own clock."""
        return self.client.stats().get("uptime_s") if self.is_ready else None

    def view(self) -> ReplicaView:
        state = self._state if self._state != "ready" or self.is_ready else "starting"
        return ReplicaView(
            index=self.index,
            state=state,
            is_healthy=self.is_healthy,
            pid=self.client.pid if self.is_ready else None,
            num_inside=self.client.num_inside if self.is_ready else 0,
            load_tokens=self.load_tokens,
            num_restarts=self.num_restarts,
            num_routed=dict(self.num_routed),
            environment=self._environment,
            last_death=self._last_death,
            stats=self._history.now(self.client.stats() if self.is_ready else {}),
        )

    async def _supervise(self) -> None:
        num_deaths = 0
        ready_s = time.monotonic()
        death: Exception | None = None
        while True:
            if death is None:
                death = await self.client.wait_dead()
                if time.monotonic() - ready_s >= self._rule.forgiven_after_s:
                    num_deaths = 0
            num_deaths += 1
            self._last_death = str(death)
            is_last = num_deaths > self._rule.max_restarts
            self._state = "dead" if is_last else "starting"
            logger.error("replica %d: %s", self.index, death)
            self._history.retire(self.client.stats())
            self._on_change(self)
            await self.client.close()
            if is_last:
                logger.error("replica %d stays down: %d deaths in a row", self.index, num_deaths)
                return
            pause_s = self._rule.pause_s(num_deaths)
            logger.warning("replica %d is started again in %g s", self.index, pause_s)
            await asyncio.sleep(pause_s)
            death = await self._start_again()
            ready_s = time.monotonic()

    async def _start_again(self) -> Exception | None:
        """Why it did not start. Whatever that is (no memory for a process, no more files), it is one more
        death, and not the end of this task, which nobody would notice."""
        self.num_restarts += 1
        self.client = self._make_client()
        try:
            await self.client.start()
        except Exception as error:
            return error
        self._state = "ready"
        logger.warning("replica %d is ready again", self.index)
        self._on_change(self)
        return None

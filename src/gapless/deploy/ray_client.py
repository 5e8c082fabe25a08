"""``EngineClient`` over a Ray Serve deployment of engines: the application does not know where they run.

Ray Serve chooses the replica and starts dead ones again; this adds what a caller is promised: a request whose
replica died before anything came is sent once more, one that had begun fails with ``ReplicaLostError``, and a
caller who leaves ends the request where it runs. Numbers are collected from all replicas every few seconds,
totals of those that have gone stay. Invariant: every stream ends. Read ``ray_serve.py`` for both deployments.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from gapless.deploy.wire import decode
from gapless.serve.client import (
    EngineBusyError,
    EngineDeadError,
    EngineRestartingError,
    ReplicaLostError,
    ReplicaView,
)
from gapless.serve.messages import Delta, EmbedRequest, EngineInfo, GenerateRequest
from gapless.serve.replica_stats import SharedClock, StatsHistory, add_stats

MAX_ATTEMPTS = 2
POLL_S = 2.0
GONE_AFTER = 30
"""Rounds without an answer after which a replica's totals are taken for final: one that was only slow brings
them again, and they must not count twice."""
_POLL_LIMIT_S = 10.0
_BUSY_RETRY_S = 1.0

logger = logging.getLogger(__name__)


class RayClient:
    """``handle``: of the deployment of ``EngineReplica``. ``start`` before use."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._info: EngineInfo | None = None
        self._views: dict[str, dict[str, Any]] = {}
        self._indices: dict[str, int] = {}
        self._silent: dict[str, tuple[int, dict[str, Any]]] = {}
        self._gone = StatsHistory()
        self._clock = SharedClock()
        self._polled_s = time.monotonic()
        self._poller: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when one replica is ready."""
        self._info = msgspec.msgpack.decode(await self._handle.info.remote(), type=EngineInfo)
        with contextlib.suppress(RayError, TimeoutError):  # numbers come with a later round
            await self._poll()
        self._poller = asyncio.create_task(self._poll_forever(), name="replica-numbers")

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "start() first"
        return self._info

    @property
    def is_healthy(self) -> bool:
        return any(view["is_healthy"] for view in self._views.values())

    @property
    def is_draining(self) -> bool:
        """Ray takes a replica of the HTTP side out of service before it ends it."""
        return False

    def step_age_s(self) -> float | None:
        ages = [view["step_age_s"] for view in self._views.values() if view["step_age_s"] is not None]
        return min(ages) + time.monotonic() - self._polled_s if ages else None

    def stats(self) -> dict[str, Any]:
        parts = [view["stats"] for view in self._views.values()]
        silent = StatsHistory()
        for _, stats in self._silent.values():
            silent.retire(stats)
        total = add_stats([self._gone.now({}), silent.now({}), *parts])
        known = {
            self._indices[name]: view["stats"]["uptime_s"]
            for name, view in self._views.items()
            if "uptime_s" in view["stats"]
        }
        if total:
            total["uptime_s"] = self._clock.advance(known)
        return total

    def replicas(self) -> list[ReplicaView]:
        return [
            ReplicaView(
                index=self._indices[name],
                state="ready",
                is_healthy=view["is_healthy"],
                pid=view["pid"],
                num_inside=view["num_inside"],
                environment={"node": view["node"], "replica": name},
                stats=view["stats"],
            )
            for name, view in sorted(self._views.items(), key=lambda item: self._indices[item[0]])
        ]

    async def report(self) -> dict[str, Any]:
        """Of one replica with those of all under ``replicas``, as ``ReplicaSet`` has it."""
        found = {
            str(self._index(answer["replica"])): answer["report"]
            for answer in await self._ask_all("report")
            if isinstance(answer, dict)
        }
        if not found:
            raise EngineRestartingError("no replica has answered; Ray Serve starts them again")
        return {**found[min(found, key=int)], "replicas": found}

    async def reset_prefix_cache(self) -> None:
        """Of all that live now; those that come later begin empty."""
        await self._ask_all("reset_prefix_cache")

    async def generate(self, request: GenerateRequest) -> AsyncIterator[list[Delta]]:
        for attempt in range(request.num_deaths + 1, MAX_ATTEMPTS + 1):
            has_begun = is_over = False
            stream = self._handle.options(stream=True).generate.remote(request)
            try:
                async for data in stream:
                    deltas = decode(data).deltas
                    has_begun = True
                    yield deltas
                is_over = True
                return
            except (BackPressureError, DeploymentUnavailableError) as error:
                is_over = True
                raise _refused(error) from None
            except (RayActorError, EngineDeadError) as error:
                is_over = True
                if has_begun or attempt == MAX_ATTEMPTS:
                    raise ReplicaLostError(
                        f"the replica of this request has died: {error}",
                        may_restart=request.is_whole and attempt < MAX_ATTEMPTS,
                    ) from None
                logger.warning("request %s is sent to another replica", request.request_id)
            finally:
                if not is_over:
                    stream.cancel()

    async def embed(self, request: EmbedRequest) -> list[float]:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            answer = self._handle.embed.remote(request)
            try:
                values = decode(await answer).values
                assert values is not None
                return values
            except asyncio.CancelledError:
                answer.cancel()
                raise
            except (BackPressureError, DeploymentUnavailableError) as error:
                raise _refused(error) from None
            except (RayActorError, EngineDeadError) as error:
                if attempt == MAX_ATTEMPTS:
                    raise ReplicaLostError(f"the replica of this request has died: {error}") from None
        raise AssertionError("the last attempt returns or raises")

    async def _ask_all(self, method: str) -> list[Any]:
        """Answers of all replicas; one that dies meanwhile is an exception among them."""
        asked = self._handle.broadcast(method)
        answers: list[Any] = await asked.results_async(timeout_s=_POLL_LIMIT_S, return_exceptions=True)
        return answers

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._poll()
            except (RayError, TimeoutError) as error:
                logger.warning("replicas do not say how they are: %s", error)

    async def _poll(self) -> None:
        answers = [answer for answer in await self._ask_all("status") if isinstance(answer, dict)]
        views = {answer["replica"]: answer for answer in answers}
        for name in self._views.keys() - views.keys():
            self._silent[name] = (0, self._views[name]["stats"])
        for name, (num_rounds, stats) in list(self._silent.items()):
            if name in views:
                del self._silent[name]
            elif num_rounds < GONE_AFTER:
                self._silent[name] = (num_rounds + 1, stats)
            else:
                del self._silent[name]
                self._gone.retire(stats)
        for name in views:
            self._index(name)
        self._views, self._polled_s = views, time.monotonic()

    def _index(self, name: str) -> int:
        """A number for each replica that there has ever been, for labels that stay short."""
        return self._indices.setdefault(name, len(self._indices))


def _refused(error: Exception) -> Exception:
    if isinstance(error, DeploymentUnavailableError):
        return EngineRestartingError("no replica could be started; Ray Serve goes on trying")
    return EngineBusyError(
        f"the server is busy: all replicas are full and the queue is too ({error}); try again later",
        retry_after_s=_BUSY_RETRY_S,
    )

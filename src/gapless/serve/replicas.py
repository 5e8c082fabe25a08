"""``EngineClient`` over several engine processes on one machine: one queue, one health, one set of numbers.

Requests go where ``routing.py`` says. One replica's death is an event, not the end: what it had begun to
answer fails with ``ReplicaLostError``, what it had not is sent to another, once, because a request that two
replicas did not survive may be the reason; the process is started again (``replica.py``). The server ends
when every replica has been given up. Invariants: limits count for the sum of all; a request is inside exactly
once however often it is sent; every stream ends. Read ``server.py`` for the owner, ``placement.py`` for which
GPUs each gets.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gapless.errors import RequestError
from gapless.serve.admission import Admission
from gapless.serve.client import (
    EngineDeadError,
    EngineDrainingError,
    EngineRestartingError,
    ReplicaLostError,
    ReplicaView,
)
from gapless.serve.engine_process import EngineOpener
from gapless.serve.messages import Delta, EmbedRequest, EngineInfo, GenerateRequest
from gapless.serve.process_client import ProcessClient, ProgressCallback
from gapless.serve.replica import Replica, RestartRule
from gapless.serve.replica_stats import SharedClock, add_stats
from gapless.serve.routing import Router, Routing, expected_tokens, name_prefix

MAX_ATTEMPTS = 2
"""How many replicas may die of, or with, one request."""
_UNLIMITED = 2**40
"""For the limits of one replica: those of the sum are checked before."""


@dataclass(slots=True, eq=False)
class _Inside:
    """A request that is inside, and what it weighs where it is."""

    num_choices: int
    num_bytes: int = 0
    replica: Replica | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0

    def move(self, replica: Replica | None, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        if self.replica is not None:
            self.replica.load_tokens -= self.prompt_tokens + self.output_tokens
        self.replica, self.prompt_tokens, self.output_tokens = replica, prompt_tokens, output_tokens
        if replica is not None:
            replica.load_tokens += prompt_tokens + output_tokens

    def has_begun(self) -> None:
        """Its prompt has been computed."""
        self.move(self.replica, output_tokens=self.output_tokens)


class ReplicaSet:
    """Starts and owns a process per entry of ``environments``; other options are ``ProcessClient``'s."""

    def __init__(
        self,
        open_engine: EngineOpener,
        *,
        environments: Sequence[Mapping[str, str]],
        routing: Routing = "prefix",
        restart: RestartRule | None = None,
        max_queued_requests: int = 1024,
        max_media_bytes: int = 4 * 2**30,
        **client_options: Any,
    ) -> None:
        self._admission = Admission(max_running=0, max_queued=max_queued_requests, max_bytes=max_media_bytes)
        self._router = Router(routing)
        self._clock = SharedClock()
        self._inside: dict[str, _Inside] = {}
        self._is_draining = self._is_closing = False
        self._is_told_to_end = False
        """That all are dead is no failure then (as in ``process_client.py``)."""
        self._died = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._info: EngineInfo | None = None

        def make_client(environment: Mapping[str, str]) -> Callable[[], ProcessClient]:
            return lambda: ProcessClient(
                open_engine,
                max_queued_requests=_UNLIMITED,
                max_media_bytes=_UNLIMITED,
                environment=environment,
                on_complete=self._leave,
                **client_options,
            )

        self._replicas = [
            Replica(
                index,
                make_client(environment),
                rule=restart or RestartRule(),
                environment=environment,
                on_change=self._on_change,
            )
            for index, environment in enumerate(environments)
        ]

    async def start(self, progress: ProgressCallback | None = None) -> None:
        """All at once; ``progress`` hears of the first. One that cannot start ends all, with its error."""
        starts = [
            asyncio.create_task(replica.start(progress if replica.index == 0 else None))
            for replica in self._replicas
        ]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.close()
            raise
        self._info = _common_info([replica.client.info for replica in self._replicas])
        self._count_places()

    async def close(self, *, drain_s: float = 0.0) -> int:
        """0 when every process that was alive has ended as told, else one of the other exit codes."""
        self._is_draining = self._is_closing = True
        self._is_told_to_end = self._is_told_to_end or not self._died.is_set()
        alive = [replica for replica in self._replicas if replica.is_ready]
        codes = await asyncio.gather(*(replica.close(drain_s=drain_s) for replica in self._replicas))
        self._died.set()
        return next((codes[replica.index] for replica in alive if codes[replica.index]), 0)

    def begin_drain(self) -> None:
        self._is_draining = True

    async def wait_idle(self, limit_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), limit_s)
        return self._idle.is_set()

    async def wait_dead(self) -> EngineDeadError:
        """Until every replica has been given up, or all are closed."""
        await self._died.wait()
        return self._death()

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDeadError("the engines have not been started")
        return self._info

    @property
    def is_alive(self) -> bool:
        """At least one replica serves, or will again."""
        return self._info is not None and not self._died.is_set()

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def is_healthy(self) -> bool:
        return not self._is_draining and any(replica.is_healthy for replica in self._replicas)

    @property
    def num_inside(self) -> int:
        return self._admission.num_inside

    def step_age_s(self) -> float | None:
        """The youngest sign of life; one silent replica among others does not make the server silent."""
        ages = [replica.client.step_age_s() for replica in self._replicas if replica.is_ready]
        return min((age for age in ages if age is not None), default=None)

    def stats(self) -> dict[str, Any]:
        views = self.replicas()
        total = add_stats([view.stats for view in views])
        uptimes = {replica.index: replica.uptime_s() for replica in self._replicas}
        known = {index: uptime for index, uptime in uptimes.items() if uptime is not None}
        if total:
            total["uptime_s"] = self._clock.advance(known)
        return total

    def replicas(self) -> list[ReplicaView]:
        return [replica.view() for replica in self._replicas]

    async def report(self) -> dict[str, Any]:
        """That of the first replica that lives, with those of all under ``replicas``, by index."""
        ready = [replica for replica in self._replicas if replica.is_ready]
        if not ready:
            raise self._none_ready()
        reports = await asyncio.gather(
            *(replica.client.report() for replica in ready), return_exceptions=True
        )
        found = {
            str(replica.index): report
            for replica, report in zip(ready, reports, strict=True)
            if isinstance(report, dict)
        }
        if not found:
            raise self._none_ready()
        return {**next(iter(found.values())), "replicas": found}

    async def reset_prefix_cache(self) -> None:
        """Of all that live; one that dies meanwhile has lost its cache as well."""
        ready = [replica for replica in self._replicas if replica.is_ready]
        if not ready:
            raise self._none_ready()
        for replica in ready:
            self._router.forget(replica.index)
        results = await asyncio.gather(
            *(replica.client.reset_prefix_cache() for replica in ready), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, EngineDeadError):
                raise result

    async def generate(self, request: GenerateRequest) -> AsyncIterator[list[Delta]]:
        num_choices = _int_of(request.params, "n", 1)
        num_bytes = 0 if request.media is None else request.media.num_bytes
        inside = self._enter(request.request_id, _Inside(num_choices, num_bytes))
        output = expected_tokens(num_choices, _int_of(request.params, "max_tokens", None))
        prefix = self._name_prefix(request)
        try:
            for attempt in range(request.num_deaths + 1, MAX_ATTEMPTS + 1):
                replica = self._send(request, inside, prefix, output=output, is_retry=attempt > 1)
                has_begun = False
                stream = replica.client.generate(_copy(request))
                try:
                    async for deltas in stream:
                        if not has_begun:
                            has_begun = True
                            inside.has_begun()
                            if request.media is not None and not request.is_whole:
                                request.media.parts.clear()  # no other replica will need them
                        yield deltas
                    return
                except EngineDeadError as error:
                    if self._is_closing:
                        raise
                    if has_begun or attempt == MAX_ATTEMPTS:
                        may_restart = request.is_whole and attempt < MAX_ATTEMPTS
                        raise _lost(replica, error, may_restart=may_restart) from None
                finally:
                    await stream.aclose()  # type: ignore[attr-defined]
        finally:
            self._leave(request.request_id, inside)

    async def embed(self, request: EmbedRequest) -> list[float]:
        inside = self._enter(request.request_id, _Inside(1))
        prefix = self._name_prefix(request)
        try:
            for attempt in range(1, MAX_ATTEMPTS + 1):
                replica = self._send(request, inside, prefix, output=0, is_retry=attempt > 1)
                try:
                    return await replica.client.embed(request)
                except EngineDeadError as error:
                    if self._is_closing:
                        raise
                    if attempt == MAX_ATTEMPTS:
                        raise _lost(replica, error) from None
            raise AssertionError("the last attempt returns or raises")
        finally:
            self._leave(request.request_id, inside)

    def _enter(self, request_id: str, inside: _Inside) -> _Inside:
        if self._is_draining and (self._is_told_to_end or not self._died.is_set()):
            raise EngineDrainingError("the server is shutting down and takes no new requests")
        if self._died.is_set():
            raise self._death()
        if not any(replica.is_ready for replica in self._replicas):
            raise self._none_ready()
        if request_id in self._inside:
            raise RequestError(f"request_id={request_id!r} is already in use; wait until it has finished")
        self._admission.enter(inside.num_choices, num_bytes=inside.num_bytes)
        self._inside[request_id] = inside
        self._idle.clear()
        return inside

    def _leave(self, request_id: str, only: _Inside | None = None) -> None:
        """Also told by the replica, as soon as the engine is done with it; only the first time counts.
        ``only``: not when the name is another request's by now."""
        inside = self._inside.get(request_id)
        if inside is None or only not in (None, inside):
            return
        del self._inside[request_id]
        inside.move(None)
        self._admission.leave(inside.num_choices, num_bytes=inside.num_bytes)
        if not self._inside:
            self._idle.set()

    def _send(
        self,
        request: GenerateRequest | EmbedRequest,
        inside: _Inside,
        prefix: Sequence[bytes],
        *,
        output: int,
        is_retry: bool,
    ) -> Replica:
        """Choose a replica and put the request's weight on it."""
        ready = {replica.index: replica for replica in self._replicas if replica.is_ready}
        if not ready:
            raise self._none_ready()
        # One that is silent may be hung: it gets nothing while others are well.
        candidates = {index: replica for index, replica in ready.items() if replica.is_healthy} or ready
        loads = {index: replica.load_tokens for index, replica in candidates.items()}
        choice = self._router.choose(loads, prefix)
        self._router.sent(choice.replica, prefix)
        replica = ready[choice.replica]
        replica.num_routed["retry" if is_retry else choice.reason] += 1
        cached = choice.num_blocks * self.info.block_size
        inside.move(replica, prompt_tokens=len(request.prompt_token_ids) - cached, output_tokens=output)
        return replica

    def _name_prefix(self, request: GenerateRequest | EmbedRequest) -> list[bytes]:
        if self._router.routing != "prefix":
            return []
        return name_prefix(
            request.prompt_token_ids, block_size=self.info.block_size, extra=request.cache_extra
        )

    def _on_change(self, replica: Replica) -> None:
        if not replica.is_ready:
            self._router.forget(replica.index)
        self._count_places()
        if all(each.is_given_up for each in self._replicas):
            self._died.set()

    def _count_places(self) -> None:
        """What can run at once; with fewer replicas, fewer."""
        self._admission.max_running = sum(
            replica.client.info.max_running_requests for replica in self._replicas if replica.is_ready
        )

    def _none_ready(self) -> Exception:
        if self._died.is_set():
            return self._death()
        return EngineRestartingError("all replicas have died and are being started again; try again soon")

    def _death(self) -> EngineDeadError:
        if self._is_closing:
            return EngineDeadError("the engines have been shut down")
        last = next((view.last_death for view in self.replicas() if view.last_death), "unknown reason")
        return EngineDeadError(f"all {len(self._replicas)} replicas have died and are given up: {last}")


def _common_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """What holds for every request, and the sums of what there is."""
    return msgspec.structs.replace(
        infos[0],
        max_model_len=min(info.max_model_len for info in infos),
        max_running_requests=sum(info.max_running_requests for info in infos),
        num_blocks=sum(info.num_blocks for info in infos),
        startup_s=max(info.startup_s for info in infos),
    )


def _copy(request: GenerateRequest) -> GenerateRequest:
    """For one attempt: a client may let go of the images that it has sent."""
    if request.media is None:
        return request
    media = msgspec.structs.replace(request.media, parts=list(request.media.parts))
    return msgspec.structs.replace(request, media=media)


def _int_of(params: Mapping[str, Any], name: str, default: Any) -> Any:
    """The engine judges values that make no sense."""
    value = params.get(name, default)
    return value if isinstance(value, int) and value >= 1 else default


def _lost(replica: Replica, error: Exception, *, may_restart: bool = False) -> ReplicaLostError:
    return ReplicaLostError(
        f"replica {replica.index}, which ran this request, has died: {error}", may_restart=may_restart
    )

"""``EngineClient`` over an engine process: the HTTP process's view of it, from start to exit code.

One callback reads the wire and hands every delta to its stream; nothing it does can wait, so no reader holds
up another. Death is noticed three ways: the process says ``Failed``, the process ends, or it has shown no
life for so long that it is taken for hung and killed. Invariant: whichever it is, every stream, query and
embedding that waits fails with ``EngineDeadError`` at once, and so does every later call. Read
``streams.py`` for slow readers, ``admission.py`` for full queues, ``engine_process.py`` for the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from multiprocessing.context import SpawnProcess
from typing import Any

from gapless.errors import ConfigError, RequestError
from gapless.serve.admission import Admission
from gapless.serve.channel import Addresses, ClientChannel
from gapless.serve.client import EngineDeadError, EngineDrainingError, ReplicaView
from gapless.serve.delivery import Delivery
from gapless.serve.engine_process import EngineOpener, launch
from gapless.serve.messages import (
    AbortRequest,
    Answer,
    Delta,
    Embedding,
    EmbedRequest,
    EngineInfo,
    Failed,
    FromEngine,
    GenerateRequest,
    Heartbeat,
    Progress,
    Query,
    Ready,
    Refused,
    ResetPrefixCache,
    Shutdown,
    StepOutput,
    ToEngine,
)
from gapless.serve.streams import AnswerStream

ProgressCallback = Callable[[str, int, int], None]

STALLED_AFTER_S = 60.0
"""Without a sign of life for so long (a step may be long) the server calls itself unhealthy."""
HUNG_AFTER_S = 600.0
"""And after this the process is killed."""
_WATCH_EVERY_S = 0.25
_MESSAGES_PER_TURN = 64
"""Read at most so many before other tasks get their turn."""
_EXIT_MARGIN_S = 10.0
"""How long a process that was told to end may take for it beyond its drain."""


class ProcessClient:
    """Starts and owns one engine process. ``max_queued_requests`` bounds what waits beyond what runs,
    ``max_media_bytes`` the images and videos of both."""

    def __init__(
        self,
        open_engine: EngineOpener,
        *,
        max_queued_requests: int = 1024,
        max_media_bytes: int = 4 * 2**30,
        log_level: str = "info",
        stalled_after_s: float = STALLED_AFTER_S,
        hung_after_s: float = HUNG_AFTER_S,
        environment: Mapping[str, str] | None = None,
        on_complete: Callable[[str], None] | None = None,
    ) -> None:
        """``environment``: variables of the engine process that differ from this one's. ``on_complete`` is
        told of every request that the engine is done with, which may be long before its reader is."""
        self._environment, self._on_complete = dict(environment or {}), on_complete
        self._open_engine, self._log_level = open_engine, log_level
        self._max_queued, self._max_media_bytes = max_queued_requests, max_media_bytes
        self._stalled_after_s, self._hung_after_s = stalled_after_s, hung_after_s
        self._addresses: Addresses | None = None
        self._channel: ClientChannel | None = None
        self._process: SpawnProcess | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._progress: ProgressCallback | None = None
        self._info: EngineInfo | None = None
        self._admission: Admission | None = None
        self._streams: dict[str, AnswerStream] = {}
        self._delivery = Delivery(self._deliver)
        self._reads_on = False
        self._embeddings: dict[str, asyncio.Future[list[float]]] = {}
        self._queries: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._query_ids = itertools.count()
        self._stats: dict[str, Any] = {}
        self._last_life_s = time.monotonic()
        self._is_draining = False
        self._is_closing = False
        self._is_told_to_end = False
        """Its death is no failure then: callers are told of the end of the server (503), not of a fault."""
        self._death: EngineDeadError | None = None
        self._failed: Failed | None = None
        self._started = asyncio.Event()  # ready, or dead
        self._died = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self, progress: ProgressCallback | None = None) -> None:
        """Start the process and wait until it serves.

        Raises ``ConfigError`` for what the user can change (an option, the model, memory), else
        ``EngineDeadError``; the process is gone then.
        """
        self._progress = progress
        try:
            self._addresses = Addresses.make()
            self._channel = ClientChannel(self._addresses)
            self._process = launch(
                self._open_engine, self._addresses, log_level=self._log_level, environment=self._environment
            )
            self._last_life_s = time.monotonic()
            loop = asyncio.get_running_loop()
            loop.add_reader(self._channel.fd, self._read)
            loop.add_reader(self._process.sentinel, self._check_process)
            self._watcher = loop.create_task(self._watch(), name="engine-watch")
            await self._started.wait()
            if self._death is not None:
                if self._failed is not None and self._failed.is_user_error:
                    raise ConfigError(self._failed.message)
                raise self._death
        except BaseException:  # a cancelled start, too, must leave no process, socket or file behind
            await self.close()
            raise

    async def close(self, *, drain_s: float = 0.0) -> int:
        """End the process and return its exit code. What still runs after ``drain_s`` is aborted."""
        process = self._process
        if process is None:
            self._release()
            return 0
        self._is_draining = self._is_closing = True
        if process.is_alive() and self.is_alive:
            self._is_told_to_end = True
            self._send(Shutdown(drain_s=drain_s))
            await self._join(drain_s + _EXIT_MARGIN_S)
        elif self._failed is not None:
            await self._join(_EXIT_MARGIN_S)  # it is on its way out
        if process.is_alive():
            process.kill()
            await self._join(_EXIT_MARGIN_S)
        self._read_all()
        self._die("the engine has been shut down")
        self._release()
        return process.exitcode if process.exitcode is not None else -9

    def begin_drain(self) -> None:
        """From now on new requests are refused; what runs goes on."""
        self._is_draining = True

    async def wait_idle(self, limit_s: float) -> bool:
        """Until nothing runs or waits, at most ``limit_s``; says whether that is so."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), limit_s)
        return self._idle.is_set()

    async def wait_dead(self) -> EngineDeadError:
        """Until the engine has died, by itself or by ``close``; why."""
        await self._died.wait()
        assert self._death is not None
        return self._death

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDeadError("the engine has not been started")
        return self._info

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        """Started, and neither dead nor closed."""
        return self._info is not None and self._death is None

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def is_healthy(self) -> bool:
        if not self.is_alive or self._is_draining:
            return False
        return time.monotonic() - self._last_life_s <= self._stalled_after_s

    @property
    def num_inside(self) -> int:
        """Choices that run or wait."""
        return 0 if self._admission is None else self._admission.num_inside

    def step_age_s(self) -> float | None:
        """Seconds since the loop last showed life, by a step or a heartbeat."""
        return None if self._info is None else time.monotonic() - self._last_life_s

    def stats(self) -> dict[str, Any]:
        return self._stats

    def replicas(self) -> list[ReplicaView]:
        return [
            ReplicaView(
                index=0,
                state="ready" if self.is_alive else "dead",
                is_healthy=self.is_healthy,
                pid=self.pid,
                num_inside=self.num_inside,
                environment=self._environment,
                last_death=None if self._death is None else str(self._death),
                stats=self._stats,
            )
        ]

    async def report(self) -> dict[str, Any]:
        return await self._ask(Query(query_id=next(self._query_ids), what="report"))

    async def reset_prefix_cache(self) -> None:
        await self._ask(ResetPrefixCache(query_id=next(self._query_ids)))

    async def generate(self, request: GenerateRequest) -> AsyncIterator[list[Delta]]:
        request_id = request.request_id
        num_choices = _num_choices(request)
        num_bytes = 0 if request.media is None else request.media.num_bytes
        self._admit(request_id, num_choices, num_bytes)
        stream = self._streams[request_id] = AnswerStream(num_choices, num_media_bytes=num_bytes)
        try:
            self._send(request)
            if request.media is not None:
                request.media.parts.clear()  # the engine has them now, and an answer may take minutes
            while not stream.is_over:
                yield await stream.take()
        finally:
            if self._streams.get(request_id) is stream:  # given up before its end
                self._forget(request_id)
                self._send(AbortRequest(request_id=request_id))

    async def embed(self, request: EmbedRequest) -> list[float]:
        self._admit(request.request_id, 1)
        future = self._embeddings[request.request_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(request)
            return await future
        finally:
            del self._embeddings[request.request_id]
            self._leave(1)

    async def _ask(self, query: Query | ResetPrefixCache) -> dict[str, Any]:
        self._require_alive()
        future = self._queries[query.query_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(query)
            return await future
        finally:
            self._queries.pop(query.query_id, None)

    def _admit(self, request_id: str, num_choices: int, num_bytes: int = 0) -> None:
        if self._is_draining and (self._death is None or self._is_told_to_end):
            raise EngineDrainingError("the server is shutting down and takes no new requests")
        self._require_alive()
        if request_id in self._streams or request_id in self._embeddings:
            raise RequestError(f"request_id={request_id!r} is already in use; wait until it has finished")
        assert self._admission is not None
        self._admission.enter(num_choices, num_bytes=num_bytes)
        self._idle.clear()

    def _leave(self, num_choices: int, num_bytes: int = 0) -> None:
        assert self._admission is not None
        self._admission.leave(num_choices, num_bytes=num_bytes)
        if self._admission.num_inside == 0:
            self._idle.set()

    def _forget(self, request_id: str) -> AnswerStream | None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._leave(stream.num_choices, stream.num_media_bytes)
            if self._on_complete is not None and self._death is None:
                self._on_complete(request_id)
        return stream

    def _require_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(str(self._death))
        if self._info is None:
            raise EngineDeadError("the engine has not been started")

    def _send(self, message: ToEngine) -> None:
        if self._channel is not None and self._death is None:
            self._channel.send(message)

    def _read(self) -> None:
        """The wire has something; called by the event loop."""
        if not self._reads_on:  # else it is coming anyway
            self._read_some()

    def _read_some(self) -> None:
        """What one turn of the event loop is given, and the next turn if that was not all."""
        self._reads_on = False  # an error below costs one message: whoever looks next finds the rest
        is_rest = True
        for _ in range(_MESSAGES_PER_TURN):
            message = None if self._channel is None else self._channel.receive()
            if message is None:
                is_rest = False
                break
            self._handle(message)
        self._reads_on = self._delivery.hand_out() or is_rest
        if self._reads_on:
            asyncio.get_running_loop().call_soon(self._read_some)

    def _read_all(self) -> None:
        while self._channel is not None and (message := self._channel.receive()) is not None:
            self._handle(message)
        self._delivery.hand_out(None)

    def _handle(self, message: FromEngine) -> None:
        self._last_life_s = time.monotonic()
        match message:
            case StepOutput():
                self._delivery.add(message.deltas)
            case Heartbeat():
                self._stats = message.stats
            case Refused():
                error = RequestError(message.message)
                if (stream := self._forget(message.request_id)) is not None:
                    stream.fail(error)
                _set_exception(self._embeddings.get(message.request_id), error)
            case Embedding():
                future = self._embeddings.get(message.request_id)
                if message.error is not None:
                    _set_exception(future, RuntimeError(message.error))
                elif future is not None and not future.done():
                    future.set_result(message.values)
            case Answer():
                query = self._queries.get(message.query_id)
                if query is not None and not query.done():
                    query.set_result(message.value)
            case Progress():
                if self._progress is not None:
                    self._progress(message.stage, message.done, message.total)
            case Ready():
                self._info = message.info
                self._admission = Admission(
                    max_running=message.info.max_running_requests,
                    max_queued=self._max_queued,
                    max_bytes=self._max_media_bytes,
                )
                self._started.set()
            case Failed():
                self._failed = message
                self._die(message.message)

    def _deliver(self, request_id: str, deltas: list[Delta]) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return  # its reader has gone, and the abort is on its way
        for delta in deltas:
            stream.put(delta)
        if stream.is_complete:
            self._forget(request_id)

    def _check_process(self) -> None:
        """The process may have ended; what it said last is read first."""
        process = self._process
        if process is None or process.is_alive():
            return
        asyncio.get_running_loop().remove_reader(process.sentinel)
        self._read_all()
        how = "been shut down" if self._is_closing else "ended unexpectedly"
        self._die(f"the engine process has {how} ({_exit_text(process.exitcode)})")

    async def _watch(self) -> None:
        """What the callbacks would miss: a sentinel that a grandchild keeps open, a lost wake-up, a hang."""
        while self._death is None:
            await asyncio.sleep(_WATCH_EVERY_S)
            self._read()
            self._check_process()
            age_s = time.monotonic() - self._last_life_s
            if self._info is not None and age_s > self._hung_after_s and self._death is None:
                assert self._process is not None
                self._process.kill()
                self._die(f"the engine has shown no life for {age_s:.0f} s and was killed")

    def _die(self, message: str) -> None:
        if self._death is not None:
            return
        self._delivery.hand_out(None)
        self._death = EngineDeadError(message)
        for request_id in list(self._streams):
            stream = self._forget(request_id)
            assert stream is not None
            stream.fail(self._fault(message))
        for embedding in self._embeddings.values():
            _set_exception(embedding, self._fault(message))
        for query in self._queries.values():
            _set_exception(query, self._fault(message))
        self._started.set()
        self._died.set()

    def _fault(self, message: str) -> Exception:
        """What waits for an answer that will not come is told."""
        if self._is_told_to_end:
            return EngineDrainingError("the server is shutting down and has ended this request")
        return EngineDeadError(message)

    async def _join(self, limit_s: float) -> None:
        process = self._process
        assert process is not None
        deadline = time.monotonic() + limit_s
        while process.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    def _release(self) -> None:
        loop = asyncio.get_running_loop()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._process is not None:
            loop.remove_reader(self._process.sentinel)
        if self._channel is not None:
            loop.remove_reader(self._channel.fd)
            self._channel.close()
            self._channel = None
        if self._addresses is not None:
            self._addresses.remove()


def _num_choices(request: GenerateRequest) -> int:
    """As asked for; the engine judges values that make no sense."""
    n = request.params.get("n", 1)
    return n if isinstance(n, int) and n >= 1 else 1


def _set_exception(future: asyncio.Future[Any] | None, error: Exception) -> None:
    if future is not None and not future.done():
        future.set_exception(error)


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {-code}"
    return f"exit code {code}"

"""A server's life: engine process up, HTTP up, drain, exit code.

Signals have one owner, this file. The first SIGTERM or SIGINT starts the drain: new requests are refused with
503 while the sockets stay open, running ones finish within the limit, what is left is aborted, and the exit
code is 0. A second one ends the drain. When the engine dies, requests fail at once, health turns red, and
after a moment for both to be seen the process exits with 1. Invariant: no path out of ``run_server`` leaves
an engine process behind. Read ``process_client.py`` for the engine's side of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import uvicorn

from gapless.errors import ConfigError
from gapless.serve.client import EngineClient, ManagedClient
from gapless.serve.connection import Connection
from gapless.serve.engine_process import EngineOpener
from gapless.serve.intake import Intake
from gapless.serve.messages import EngineInfo
from gapless.serve.process_client import ProcessClient, ProgressCallback
from gapless.serve.replica import RestartRule
from gapless.serve.replicas import ReplicaSet
from gapless.serve.settings import ServerSettings

EXIT_ENGINE_DIED = 1

MakeApp = Callable[[EngineClient], Any]
"""The ASGI application around a client."""

_DEATH_GRACE_S = 1.0
"""Between the engine's death and closing the sockets: waiting requests get their answers, probes see it."""
_CLOSE_LIMIT_S = 5
"""How long responses may take to reach their readers once nothing is generated any more."""
_KEEP_ALIVE_S = 75
"""Longer than proxies keep idle connections, so that they close them and not we, under their feet."""
_BACKLOG = 2048
READER_STALL_S = 300
"""A connection whose other side takes nothing and says nothing for so long is given up."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Announcements:
    """Who is told of a server's progress."""

    progress: ProgressCallback
    on_ready: Callable[[EngineInfo], None]
    """The engine is ready; the sockets open next."""
    on_serving: Callable[[str], None]
    """Requests are taken at this address."""


def run_server(
    open_engine: EngineOpener,
    make_app: MakeApp,
    settings: ServerSettings,
    announce: Announcements,
    *,
    environments: Sequence[Mapping[str, str]] | None = None,
) -> int:
    """Serve until told to stop; returns the exit code. ``environments``: see ``placement.py``.

    Raises ``ConfigError`` for what a user can change and ``EngineDeadError`` for engines that cannot start.
    """
    _check_certificate(settings)
    _raise_file_limit()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(open_engine, make_app, settings, announce, environments))


async def _serve(
    open_engine: EngineOpener,
    make_app: MakeApp,
    settings: ServerSettings,
    announce: Announcements,
    environments: Sequence[Mapping[str, str]] | None,
) -> int:
    client = make_client(open_engine, settings, environments)
    with _bound_socket(settings) as listener, _StopSignals() as stop:
        if not await _started(client, stop, announce):
            return 0
        try:
            server = _make_server(make_app(client), settings)
            # What start-up has made lives as long as the process. The collector would look at all of it again
            # and again, tens of milliseconds in which no stream moves.
            gc.collect()
            gc.freeze()
            announce.on_ready(client.info)
            serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
            try:
                await _until_open(server, serving)
                announce.on_serving(_address(settings, listener))
                return await _until_stopped(client, server, serving, stop, settings)
            finally:
                server.should_exit = True
                await serving
        finally:
            await client.close()


def make_client(
    open_engine: EngineOpener,
    settings: ServerSettings,
    environments: Sequence[Mapping[str, str]] | None = None,
) -> ManagedClient:
    """Not started yet. Needs a running event loop."""
    options: dict[str, Any] = {
        "max_queued_requests": settings.max_queued_requests,
        "max_media_bytes": settings.max_media_bytes,
        "log_level": settings.log_level,
        "stalled_after_s": settings.health_stale_s,
    }
    places = environments or [{}] * settings.replicas
    if settings.replicas == 1:
        return ProcessClient(open_engine, environment=places[0], **options)
    return ReplicaSet(
        open_engine,
        environments=places,
        routing=settings.routing,
        restart=RestartRule(max_restarts=settings.max_replica_restarts),
        **options,
    )


async def _started(client: ManagedClient, stop: _StopSignals, announce: Announcements) -> bool:
    """False when it was told to stop before the engine was ready."""
    starting = asyncio.create_task(client.start(announce.progress))
    await _first(starting, stop.wait(1))
    if starting.done():
        await starting
        return True
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    return False


async def _until_open(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if serving.done():
        await serving
        raise ConfigError("the HTTP server could not start; the log says why")


async def _until_stopped(
    client: ManagedClient,
    server: uvicorn.Server,
    serving: asyncio.Task[None],
    stop: _StopSignals,
    settings: ServerSettings,
) -> int:
    await _first(serving, client.wait_dead(), stop.wait(1))
    if stop.count and client.is_alive:
        client.begin_drain()
        logger.info("draining: %d requests have %g s to finish", client.num_inside, settings.drain_s)
        await _first(client.wait_idle(settings.drain_s), client.wait_dead(), stop.wait(2))
    if client.is_alive:
        code = await client.close()  # aborts what still runs, which ends its response
    else:
        logger.error("%s", await client.wait_dead())
        await asyncio.sleep(_DEATH_GRACE_S)
        code = EXIT_ENGINE_DIED
    server.should_exit = True
    await serving
    return EXIT_ENGINE_DIED if code else 0


async def _first(*things: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> None:
    """Wait until one of ``things`` is done; give up the coroutines among the others."""
    tasks = [thing if isinstance(thing, asyncio.Task) else asyncio.create_task(thing) for thing in things]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for thing, task in zip(things, tasks, strict=True):
        if thing is not task:
            task.cancel()


class _StopSignals:
    """Counts SIGTERM and SIGINT while the block runs."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = asyncio.Event()

    async def wait(self, count: int) -> None:
        """Until there have been ``count`` of them."""
        while self.count < count:
            self._changed.clear()
            await self._changed.wait()

    def __enter__(self) -> _StopSignals:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self) -> None:
        self.count += 1
        self._changed.set()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process before the drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _make_server(app: Any, settings: ServerSettings) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            http=cast(Any, partial(Connection, intake=Intake())),  # its type is read too narrowly
            log_config=None,
            access_log=False,  # access_log.py writes it, with request ids
            root_path=settings.root_path,
            server_header=False,
            ws="none",
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_CLOSE_LIMIT_S,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
        )
    )


@contextlib.contextmanager
def _bound_socket(settings: ServerSettings) -> Iterator[socket.socket]:
    """Bound before the engine starts, so that a port in use is found out at once; it listens only when
    requests can be served."""
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host={settings.host}: {error.strerror or error}") from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _give_up_dead_peers(listener)
        try:
            listener.bind(address)
        except OSError as error:
            raise ConfigError(
                f"--port={settings.port} on {settings.host}: {error.strerror or error}; choose another"
            ) from None
        yield listener


def _give_up_dead_peers(listener: socket.socket) -> None:
    """Every connection it accepts gets these. A machine that lost its power sends no end of the connection,
    and a reader that stops reading keeps it open: neither may hold a descriptor for ever."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 60),
        ("TCP_KEEPINTVL", 15),
        ("TCP_USER_TIMEOUT", READER_STALL_S * 1000),
    ):
        if hasattr(socket, name):  # Linux has all of them
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _check_certificate(settings: ServerSettings) -> None:
    """Before minutes of loading, not after."""
    if settings.ssl_certfile is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            settings.ssl_certfile, settings.ssl_keyfile
        )
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"--ssl-certfile={settings.ssl_certfile} and --ssl-keyfile={settings.ssl_keyfile} are no "
            f"certificate and its key ({error})"
        ) from None


def _address(settings: ServerSettings, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "https" if settings.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # a faster loop where there is one; it does not exist for every platform
        return None
    return uvloop.new_event_loop


def _raise_file_limit() -> None:
    """Every connection is an open file, and the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 16)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # it stays as it is: fewer connections
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

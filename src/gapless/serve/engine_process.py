"""The engine process: opens the engine, says so, runs the loop, and says why when that ends.

``EngineLauncher`` makes the process and ``main`` is what runs in it. The process has no will of its own:
signals from a terminal or a service manager are for the HTTP process, which decides, and when that one is
gone, however it went, this one ends too. Invariant: the last thing it sends is ``Failed`` unless it was told
to shut down, and then its exit code is not 0. Read ``engine_loop.py`` for what it does all day.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any

from gapless.env import changed_environment
from gapless.errors import GaplessError, GraphError, RankError
from gapless.serve.channel import Addresses, EngineChannel
from gapless.serve.engine_loop import EngineLoop
from gapless.serve.messages import EngineInfo, Failed, FromEngine, Progress, Ready

if TYPE_CHECKING:
    from gapless.engine.core import EngineCore

EXIT_FAILED = 1
EXIT_ORPHANED = 3
"""The HTTP process is gone."""

ReportProgress = Callable[[str, int, int], None]
"""Stage, how much is done, how much there is."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedEngine:
    """An engine that is ready to serve. Its runner is shut down when the loop ends."""

    core: EngineCore
    info: EngineInfo


EngineOpener = Callable[[ReportProgress], ServedEngine]
"""Makes the engine, in the process where it will run; so it must be picklable."""


def launch(
    open_engine: EngineOpener,
    addresses: Addresses,
    *,
    log_level: str,
    environment: Mapping[str, str] | None = None,
) -> SpawnProcess:
    """Start the process, with ``environment`` on top of this one's. Spawned, not forked: CUDA and threads do
    not survive a fork.

    Not a daemon process: those may have no children, and compilers start some.
    """
    process = multiprocessing.get_context("spawn").Process(
        target=main, args=(open_engine, addresses, log_level), name="gapless-engine"
    )
    with changed_environment(environment or {}):  # before its first import: torch reads some only once
        process.start()
    return process


def main(open_engine: EngineOpener, addresses: Addresses, log_level: str) -> None:
    """The whole life of the process; leaves by ``sys.exit``."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _end_with_parent(addresses)
    _set_up_logging(log_level)
    channel = EngineChannel(addresses)
    try:
        sys.exit(_serve(open_engine, channel))
    finally:
        channel.close()


def _serve(open_engine: EngineOpener, channel: EngineChannel) -> int:
    try:
        engine = open_engine(_Throttled(channel.send))
    except Exception as error:
        channel.send(_failure(error, doing="starting the engine"))
        return EXIT_FAILED
    runner = engine.core.runner
    try:
        loop = EngineLoop(
            engine.core,
            channel,
            report=engine.core.report,
            log=getattr(runner, "log", None),
        )
        # What start-up has made lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        channel.send(Ready(info=engine.info))
        loop.run()
    except BaseException as error:  # whatever it is, the other process is waiting for an answer
        channel.send(_failure(error, doing="running the engine"))
        return EXIT_FAILED
    finally:
        runner.shutdown()
    return 0


def _failure(error: BaseException, *, doing: str) -> Failed:
    """A sentence for what a user can change, with the traceback in the log for everything else."""
    is_user_error = isinstance(error, GaplessError) and not isinstance(error, GraphError | RankError)
    if is_user_error:
        return Failed(message=str(error), is_user_error=True)
    logger.error("%s failed", doing, exc_info=error)
    return Failed(message=f"{doing} failed: {type(error).__name__}: {error}")


class _Throttled:
    """Progress as messages: every stage's end, and in between only when the percentage has changed."""

    def __init__(self, send: Callable[[FromEngine], None]) -> None:
        self._send = send
        self._last: tuple[str, int] | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = (stage, 100 * done // total if total else 100)
        if now != self._last or done >= total:
            self._last = now
            self._send(Progress(stage, done, total))


def _end_with_parent(addresses: Addresses) -> None:
    """Leave at once when the parent is gone; nobody is left to answer to."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        addresses.remove()
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _set_up_logging(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s engine %(name)s: %(message)s"))
    root = logging.getLogger("gapless")
    root.setLevel(level.upper())
    root.addHandler(handler)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenModel:
    """The opener of a real model: from a checked ``EngineConfig`` to an engine. Picklable."""

    config: Any
    """``EngineConfig``; its module is imported where the engine is, not here."""
    logs_plan: bool = True
    """False where somebody prints the plan of ``EngineInfo``: several replicas, one plan."""

    def __call__(self, progress: ReportProgress) -> ServedEngine:
        from gapless.serve.served_model import open_served_model  # torch, and all it brings

        if not self.logs_plan:
            logging.getLogger("gapless.plan").setLevel(logging.WARNING)
        return open_served_model(self.config, progress)

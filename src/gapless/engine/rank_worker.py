"""A rank other than the first: opens its part of the model, then runs every step that the first one runs.

It has no scheduler, no tokenizer and no will of its own: it does what it is told, in order, and ends when it
is told to or when the first rank is gone. An exception of any kind is told on the lifeline before the process
ends, because the first rank may be waiting for it in a collective. Read ``step_mirror.py`` for what a step is
told as, ``ranks.py`` for how the ranks come to be.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from gapless.config import EngineConfig
from gapless.parallel.wire import EXIT_FAILED, Failure, RankWires, connection_of, end_with_first

if TYPE_CHECKING:
    from gapless.engine.runner import ModelRunner
    from gapless.parallel.group import RankGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRank:
    """The first message. ``port``: of the store where the ranks meet."""

    config: EngineConfig
    size: int
    port: int
    log_level: int


class SetPaddedEager:
    """``ModelRunner.padded_eager`` begins (``value``) or ends."""

    def __init__(self, value: bool) -> None:
        self.value = value


class ResetReport:
    """Forget the steps counted so far."""


class TellReport:
    """Answer with the runner's report."""


def main(rank: int, commands: int, lifeline: int) -> None:
    """The whole life of a process that the first rank has started; leaves by ``os._exit``."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    wires = RankWires(rank=rank, commands=connection_of(commands), lifeline=connection_of(lifeline))
    serve(wires, lambda start: _join(start, rank))


def serve(wires: RankWires, join: Callable[[StartRank], tuple[RankGroup, Any]]) -> NoReturn:
    """Run until told to end; leaves by ``os._exit``, since finalizers of a process group may wait for ranks
    that are gone. ``join`` makes the group and the device of this rank."""
    is_leaving = end_with_first(wires.lifeline)
    try:
        start = wires.commands.recv()
        if start is not None:
            _set_up_logging(start.log_level, wires.rank)
            _open_and_run(start, wires, join)
    except BaseException as error:
        with suppress(OSError):  # the first rank is gone: no one to tell
            logger.debug("rank %d fails: %s", wires.rank, traceback.format_exc())
            wires.lifeline.send(Failure.of(wires.rank, error))
        os._exit(EXIT_FAILED)
    is_leaving.set()
    with suppress(OSError):
        wires.commands.send("left")
    os._exit(0)


def _open_and_run(
    start: StartRank, wires: RankWires, join: Callable[[StartRank], tuple[RankGroup, Any]]
) -> None:
    from gapless.engine.build import open_one  # torch, and all it brings
    from gapless.engine.runner import ModelRunner

    wires.commands.send("ready")  # the group's own waiting cannot be interrupted, so all come at once
    group, torch_device = join(start)
    opened = open_one(start.config, torch_device=torch_device, group=group)
    gc.collect()
    gc.freeze()  # what start-up has made lives as long as the process
    group.agree()
    runner = opened.runner
    assert isinstance(runner, ModelRunner)
    try:
        _run(runner, wires)
    finally:
        runner.shutdown()
    group.close()


def _run(runner: ModelRunner, wires: RankWires) -> None:
    from gapless.engine.step_mirror import RunMessage, StepMessage, StepReader

    reader = StepReader()
    with ExitStack() as modes:
        while True:
            match wires.commands.recv():
                case StepMessage() | RunMessage() as message:
                    runner.launch(reader.read(message))
                case SetPaddedEager(value=True):
                    modes.enter_context(runner.padded_eager())
                case SetPaddedEager():
                    modes.close()
                case ResetReport():
                    runner.reset_report()
                case TellReport():
                    wires.commands.send(runner.report())
                case None:
                    return


def _join(start: StartRank, rank: int) -> tuple[RankGroup, Any]:
    from gapless.engine.ranks import join_local

    return join_local(start, rank)


def _set_up_logging(level: int, rank: int) -> None:
    """Only errors: whatever concerns all ranks is logged by the first."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(levelname)s rank {rank} %(name)s: %(message)s"))
    root = logging.getLogger("gapless")
    root.setLevel(level)
    root.addHandler(handler)

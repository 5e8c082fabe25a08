"""The other ranks as the first one sees them: started, spoken to, watched, ended.

Processes are started by a fresh interpreter and not by ``multiprocessing``, whose spawning would run the
caller's script again. A thread watches every lifeline, another one the clock, for a rank may hang without
dying. Invariants: when one rank fails, dies or hangs, the reason is noted, all others are ended and whoever
waits in a collective is woken; after ``close`` no process is left. Read ``wire.py`` for the connections.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

from gapless.env import read_env
from gapless.errors import GaplessError, RankError
from gapless.parallel.watchdog import Watchdog
from gapless.parallel.wire import RankWires, connection_of, inherited_pair, watch_lifelines

_END_S = 10.0
"""A rank that was told to end and has not done so by then is killed."""

STEP_LIMIT_S = {"cuda": 60.0, "cpu": 600.0}
"""By device: a step that takes longer has a rank that hangs. CPUs are slow, and gloo gives up then too."""
START_LIMIT_S = 600.0
"""A start without progress on the first rank for so long has a rank that hangs: weights may come slowly, and
code may be compiled for minutes."""
MEET_LIMIT_S = 180.0
"""Processes that have been started are there, and then in one group, after this time; or never."""
CAPTURE_LIMIT_S = {"cuda": 120.0, "cpu": 600.0}
"""By device: to warm up and capture one size. Nothing is compiled there any more."""
END_LIMIT_S = 60.0
"""To give up graphs and leave the group; whoever is left behind then is killed."""

_REASON_WAIT_S = 5.0
"""What a rank says of itself, or how its process has ended, is known by then."""

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from importlib import import_module; module, _, name = sys.argv[2].partition(':'); "
    "getattr(import_module(module), name)(*map(int, sys.argv[3:]))"
)


class RankProcess(Protocol):
    """What is asked of the process of a rank; a ``subprocess.Popen`` is one."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


StartProcess = Callable[[int, int, int], RankProcess]
"""Takes a rank and the file descriptors of its ends, which are closed here afterwards."""


def start_interpreter(entry: str, rank: int, commands: int, lifeline: int) -> RankProcess:
    """A fresh interpreter with this one's path, which calls ``entry`` (``module:function``) with the other
    arguments."""
    arguments = [json.dumps(sys.path), entry, str(rank), str(commands), str(lifeline)]
    return subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP, *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=(commands, lifeline),
    )


class Workers:
    """Ranks 1 to N - 1. ``processes`` is empty where somebody else has started them."""

    def __init__(self, wires: Sequence[RankWires], processes: Sequence[RankProcess] = ()) -> None:
        self._wires, self._processes = list(wires), list(processes)
        self._failure: GaplessError | None = None
        self._failed = threading.Event()
        self._is_closing = False
        self._on_failure: list[Callable[[RankError], None]] = []
        self._lock, self._send_lock = threading.Lock(), threading.Lock()
        self._timeout_s = read_env().rank_timeout_s
        self._watchdog = Watchdog(self._fail_late)
        self._watch = watch_lifelines(self._wires, on_failure=self._fail, describe=self._describe)

    @classmethod
    def start(cls, num_others: int, *, start_process: StartProcess) -> Workers:
        """Start a process for each, which is given its rank and two file descriptors: commands and
        lifeline."""
        wires: list[RankWires] = []
        processes: list[RankProcess] = []
        try:
            for rank in range(1, num_others + 1):
                ours, theirs = zip(inherited_pair(), inherited_pair(), strict=True)
                commands, lifeline = map(connection_of, ours)
                wires.append(RankWires(rank=rank, commands=commands, lifeline=lifeline))
                try:
                    processes.append(start_process(rank, *(end.fileno() for end in theirs)))
                finally:
                    for end in theirs:
                        end.close()
        except BaseException:
            for process in processes:
                process.kill()
            raise
        return cls(wires, processes)

    @property
    def failure(self) -> GaplessError | None:
        return self._failure

    @property
    def pids(self) -> list[int]:
        """Of the processes that were started here, in the order of their ranks."""
        return [process.pid for process in self._processes]

    def check(self) -> None:
        """Raises the reason when the ranks cannot go on."""
        if self._failure is not None:
            raise _again(self._failure)

    def on_failure(self, callback: Callable[[RankError], None]) -> None:
        """``callback`` is called once with the reason, from another thread or, if it is known already, at
        once."""
        with self._lock:
            self._on_failure.append(callback)
            failure = self._failure
        if failure is not None:
            callback(RankError(str(failure)))

    def watching_step(self, step_id: int, device_type: str) -> AbstractContextManager[None]:
        """The block waits for what all ranks do in a step; one that takes too long ends them all."""
        limit_s = self._timeout_s or STEP_LIMIT_S.get(device_type, START_LIMIT_S)
        return self._watchdog.watching(f"step {step_id}", limit_s)

    def watching(self, name: str, limit_s: float = START_LIMIT_S) -> AbstractContextManager[None]:
        """As ``watching_step``, for anything else; ``progress`` gives it its whole time again. An environment
        that sets a limit sets this one too."""
        return self._watchdog.watching(name, self._timeout_s or limit_s)

    def progress(self, limit_s: float = START_LIMIT_S) -> None:
        """What is watched goes on; the next sign of it has ``limit_s`` to come."""
        self._watchdog.progress(self._timeout_s or limit_s)

    def send(self, message: Any) -> None:
        """To every rank, in one piece. Raises the reason when one is gone."""
        with self._send_lock:
            for wire in self._wires:
                try:
                    wire.commands.send(message)
                except OSError as error:
                    self.wait_for_reason(error)

    def receive(self) -> list[Any]:
        """One message from every rank, in order."""
        answers = []
        for wire in self._wires:
            try:
                answers.append(wire.commands.recv())
            except (EOFError, OSError) as error:
                self.wait_for_reason(error)
        return answers

    def wait_for_reason(self, error: BaseException) -> None:
        """Raises why a rank does not answer, which may become known only in a moment."""
        self.await_failure()
        raise RankError(f"a rank does not answer any more: {error}") from error

    def await_failure(self) -> None:
        """Raises the reason if there is one within a moment."""
        self._failed.wait(_REASON_WAIT_S)
        self.check()

    def fail(self, error: GaplessError) -> None:
        """The first rank itself cannot go on."""
        self._fail(error)

    def close(self) -> None:
        """End every rank, and wait for that. Safe to call twice."""
        self._is_closing = True
        self._watchdog.close()
        if self._failure is not None:
            self._kill()  # told nothing: who hangs reads nothing
        else:
            for wire in self._wires:
                with suppress(OSError):
                    wire.commands.send(None)
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if not self._processes and self._failure is None:
            self._wait_for_farewells()
        for wire in self._wires:
            wire.close()
        self._wires, self._processes = [], []

    def _fail(self, error: GaplessError) -> None:
        with self._lock:
            if self._is_closing or self._failure is not None:
                return
            self._failure = error
            callbacks = list(self._on_failure)
        self._failed.set()
        self._kill()  # first: what callbacks abort on a device may take its time
        for callback in callbacks:
            callback(RankError(str(error)))

    def _fail_late(self, name: str, limit_s: float) -> None:
        others = f" (processes {', '.join(map(str, self.pids))})" if self._processes else ""
        self._fail(
            RankError(
                f"{name} has not ended within {limit_s:g} s: one of {len(self._wires) + 1} ranks{others} "
                "hangs; GAPLESS_RANK_TIMEOUT sets another limit, in seconds"
            )
        )

    def _kill(self) -> None:
        """Whoever waits for one of them in a collective is woken by that."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for wire in self._wires:  # of ranks that somebody else has started
            with suppress(OSError):
                wire.lifeline.close()

    def _wait_for_farewells(self) -> None:
        """Of ranks whose process is somebody else's: until they have left the group."""
        for wire in self._wires:
            with suppress(EOFError, OSError):
                if wire.commands.poll(_END_S):
                    wire.commands.recv()

    def _describe(self, rank: int) -> str:
        if not self._processes:
            return f"rank {rank} is gone"
        try:
            code = self._processes[rank - 1].wait(1.0)
        except subprocess.TimeoutExpired:
            return f"rank {rank} has closed its connection"
        if code < 0:
            with suppress(ValueError):
                return f"rank {rank} was killed by {signal.Signals(-code).name}"
        return f"rank {rank} has ended with exit code {code}"


def _again(error: GaplessError) -> GaplessError:
    """A fresh error like ``error``: one that is raised twice would carry two tracebacks."""
    try:
        return type(error)(str(error))
    except TypeError:
        return RankError(str(error))

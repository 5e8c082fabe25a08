"""How the first rank talks to another one: two connections each, one for work and one to live by.

Over the *commands* connection go pickled messages in order. The *lifeline* is silent until something is
wrong: a rank that fails says so on it, and a rank whose process ends, however it ends, closes it; so each
side notices at once that the other has gone. Both come from one parent (inherited sockets) or over TCP with a
key, where ``torchrun`` has started the ranks. Read ``workers.py`` for the first rank's side and
``engine/rank_worker.py`` for the others'.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import gapless.errors as errors
from gapless.errors import GaplessError, RankError

EXIT_FAILED = 1
EXIT_ORPHANED = 3
"""The first rank is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWires:
    """One end of both connections between the first rank and ``rank``."""

    rank: int
    commands: Connection
    lifeline: Connection

    def close(self) -> None:
        self.commands.close()
        self.lifeline.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """What a rank says on its lifeline before it ends."""

    rank: int
    kind: str
    """Name of the exception's class."""
    message: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        return cls(rank=rank, kind=type(error).__name__, message=str(error) or type(error).__name__)

    def to_error(self) -> GaplessError:
        """The error of the same class that names the rank; ``RankError`` for one that is not ours."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, GaplessError) and kind is not RankError:
            return kind(f"rank {self.rank}: {self.message}")
        name = "" if kind is RankError else f"{self.kind}: "
        return RankError(f"rank {self.rank} failed: {name}{self.message}")


def inherited_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends, the second for a child process that is told its file descriptor."""
    return socket.socketpair()


def connection_of(end: socket.socket | int) -> Connection:
    """A connection that owns the socket from now on."""
    return Connection(end if isinstance(end, int) else end.detach())


def accept_ranks(store: Any, host: str, num_others: int) -> list[RankWires]:
    """The first rank's side: wait at an address, told through ``store``, until every other rank has come."""
    key = secrets.token_bytes(32)
    with Listener((host, 0), backlog=2 * num_others, authkey=key) as listener:
        port = listener.address[1]
        store.set(_ADDRESS, f"{host} {port} {key.hex()}")
        found: dict[tuple[int, str], Connection] = {}
        while len(found) < 2 * num_others:
            connection = listener.accept()
            rank, purpose = connection.recv()
            found[rank, purpose] = connection
    return [
        RankWires(rank=rank, commands=found[rank, "commands"], lifeline=found[rank, "lifeline"])
        for rank in range(1, num_others + 1)
    ]


def connect_to_first(store: Any, rank: int) -> RankWires:
    """Another rank's side of ``accept_ranks``."""
    host, port, key = store.get(_ADDRESS).decode().split()
    connections = {}
    for purpose in ("commands", "lifeline"):
        connection = Client((host, int(port)), authkey=bytes.fromhex(key))
        connection.send((rank, purpose))
        connections[purpose] = connection
    return RankWires(rank=rank, commands=connections["commands"], lifeline=connections["lifeline"])


def end_with_first(lifeline: Connection) -> threading.Event:
    """Leave the process as soon as the first rank is gone, also in the middle of a collective; not any more
    once the returned event is set."""
    is_leaving = threading.Event()

    def watch() -> None:
        try:
            lifeline.recv()
        except (EOFError, OSError):
            if not is_leaving.is_set():
                os._exit(EXIT_ORPHANED)

    threading.Thread(target=watch, name="first-rank-watch", daemon=True).start()
    return is_leaving


def watch_lifelines(
    wires: list[RankWires], *, on_failure: Callable[[GaplessError], None], describe: Callable[[int], str]
) -> threading.Thread:
    """Call ``on_failure`` once, from a thread, when the first of the ranks fails or goes; ``describe`` says
    how the process of a rank that went without a word has ended."""
    from multiprocessing.connection import wait

    def watch() -> None:
        by_line = {wire.lifeline: wire.rank for wire in wires}
        try:
            ready = wait(list(by_line))
        except OSError:
            return  # closed by us
        line = ready[0]
        assert isinstance(line, Connection)
        try:
            failure = line.recv()
            error: GaplessError = failure.to_error()
        except (EOFError, OSError):
            error = RankError(describe(by_line[line]))
        on_failure(error)

    thread = threading.Thread(target=watch, name="rank-watch", daemon=True)
    thread.start()
    return thread


_ADDRESS = "gapless/first-rank"

"""A page of memory in which ranks on one host agree in microseconds.

In every round each rank writes one number into a line of its own and reads those of all others. A word of 8
bytes holds half a number and the round's own number, so a word says itself whether it has come: one aligned
store makes it and one load reads it whole, and no order between words has to hold, which Python could not ask
for on ARM. Invariant: a line has words for two rounds in turn. A rank begins round n + 2 only when it has
seen all of n + 1, and nobody writes n + 1 before it has read all of n (a store never overtakes a branch on
what was loaded, on ARM neither), so what is overwritten has been read.

The page has a name in no file system (``memfd_create``): it goes with the last process that maps it, however
that ends, and does not depend on ``/dev/shm``. Other ranks open it through rank 0's ``/proc``, where its name
holds a random token: a process on another host, or in another container, finds nothing of that name there.
Nobody here sees that a rank has gone; ``check`` has to say so. Read ``agreements.py`` for what is agreed on.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from mmap import mmap
from time import perf_counter

_LINE = 16
"""Words from one rank's line to the next: 128 bytes, for caches fetch lines of 64 in pairs."""
_HALF = 1 << 32
_BIAS = 1 << 63
"""Numbers are signed, words are not."""
_YIELD_S, _LONGEST_NAP_S = 1e-3, 1e-3
"""Who waits gives its core away at each look, for there may be fewer of them than ranks; after ``_YIELD_S``
it sleeps for an eighth of what it has waited, to which the kernel adds its 50 us."""

Place = tuple[str, str]
"""Where other processes find the page of rank 0, and what it is called there."""


class SharedBoard:
    """Rank ``rank``'s view of a ``memory`` of ``num_bytes(size)``, zeros at first. One thread at a time uses
    it. ``timeout_s``: for a rank that is alive and does not come."""

    def __init__(self, memory: mmap | bytearray, *, rank: int, size: int, timeout_s: float) -> None:
        self._words = memoryview(memory).cast("Q")
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._round = 0

    def exchange(self, value: int, check: Callable[[], None]) -> list[int]:
        """All ranks' values (64 bits, signed), in their order, as soon as every rank is in this round.

        ``check`` is called again and again meanwhile and may raise; the board is of no use after that. Raises
        ``RuntimeError`` when a rank does not come.
        """
        biased = value + _BIAS
        assert 0 <= biased < 1 << 64, f"{value} does not fit into 64 bits"
        self._round = (self._round + 1) % _HALF
        tag, turn = self._round * _HALF, self._round % 2 * 2
        own = self._rank * _LINE + turn
        self._words[own] = tag | biased >> 32
        self._words[own + 1] = tag | biased % _HALF
        start, values = perf_counter(), []
        for rank in range(self._size):
            first = rank * _LINE + turn
            high, low = (self._await(first + half, rank, start, check) for half in (0, 1))
            values.append((high << 32 | low) - _BIAS)
        return values

    def _await(self, index: int, rank: int, start: float, check: Callable[[], None]) -> int:
        """What the word holds, once it is of this round."""
        words, this_round = self._words, self._round
        while (word := words[index]) >> 32 != this_round:
            check()
            waited_s = perf_counter() - start
            if waited_s > self._timeout_s:
                raise RuntimeError(f"rank {rank} has not come within {self._timeout_s:g} s")
            if waited_s > _YIELD_S:
                time.sleep(min(waited_s / 8, _LONGEST_NAP_S))
            else:
                os.sched_yield()
        return word % _HALF


def num_bytes(size: int) -> int:
    return size * _LINE * 8


def open_board(
    *,
    rank: int,
    size: int,
    timeout_s: float,
    from_first: Callable[[Place | None], Place | None],
    first_problem: Callable[[str | None], str | None],
) -> tuple[SharedBoard | None, str | None]:
    """A board that every rank has, or None and the reason. Every rank calls it and gets the same answer.

    ``from_first`` gives rank 0's object to all, ``first_problem`` the text of the first rank that has one.
    """
    place: Place | None = None
    board: SharedBoard | None = None
    problem: str | None = None
    with ExitStack() as opened:  # rank 0's descriptor is there until all have opened it
        try:
            if rank == 0:
                descriptor, place = _create(num_bytes(size))
                opened.callback(os.close, descriptor)
        except (OSError, AttributeError) as error:  # AttributeError: not Linux
            problem = f"there is no memory to share ({error})"
        place = from_first(place)
        try:
            if rank != 0 and place is not None:
                descriptor = _open(place)
                opened.callback(os.close, descriptor)
            if place is not None:
                memory = mmap(descriptor, num_bytes(size))
                board = SharedBoard(memory, rank=rank, size=size, timeout_s=timeout_s)
        except (OSError, ValueError) as error:  # ValueError: not as long as it should be
            problem = f"the memory of rank 0 cannot be opened ({error})"
        problem = first_problem(problem)
    return (None, problem) if problem is not None else (board, None)


def _create(length: int) -> tuple[int, Place]:
    name = f"gapless-agreements-{secrets.token_hex(16)}"
    descriptor = os.memfd_create(name)
    try:
        os.write(descriptor, bytes(length))  # now, and not at the first use, is when memory may lack
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, (f"/proc/{os.getpid()}/fd/{descriptor}", name)


def _open(place: Place) -> int:
    path, name = place
    found = os.readlink(path)  # before it is opened: on another host it may be anything
    if not found.startswith(f"/memfd:{name}"):
        raise OSError(f"{path} is another file: not the same host")
    return os.open(path, os.O_RDWR)

"""Agreements through memory: every rank sees the values of one round, and who waits in vain hears of it."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest
from forked_ranks import context

from gapless.errors import RankError
from gapless.parallel import agreements, shared_board
from gapless.parallel.agreements import Agreements
from gapless.parallel.shard import Shard
from gapless.parallel.shared_board import SharedBoard, num_bytes, open_board

LIMITS = (-(1 << 63), -1, 0, 1, (1 << 32) - 1, 1 << 32, (1 << 63) - 1)


def nothing() -> None:
    pass


def boards(size: int, timeout_s: float = 60.0) -> list[SharedBoard]:
    memory = bytearray(num_bytes(size))
    return [SharedBoard(memory, rank=rank, size=size, timeout_s=timeout_s) for rank in range(size)]


def in_threads(size: int, run: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def value_of(rank: int, number: int) -> int:
    """Known to all ranks, other in every round, on both sides of zero and of 32 bits."""
    rng = random.Random(number * 8 + rank)
    return LIMITS[number % 7] if rank == number % 3 else rng.randrange(-(1 << 63), 1 << 63)


def exchange_many(board: SharedBoard, rank: int, size: int, num_rounds: int) -> None:
    rng = random.Random(rank)
    for number in range(num_rounds):
        if rng.random() < 0.01:
            time.sleep(rng.random() * 0.004)  # so long that the others sleep
        found = board.exchange(value_of(rank, number), nothing)
        assert found == [value_of(other, number) for other in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_see_the_values_of_the_same_round(size):
    ranks = boards(size)
    in_threads(size, lambda rank: exchange_many(ranks[rank], rank, size, 500))


def test_rounds_go_on_when_their_numbers_begin_anew():
    ranks = boards(2)
    for board in ranks:
        board._round = (1 << 32) - 6
    in_threads(2, lambda rank: exchange_many(ranks[rank], rank, 2, 20))


def test_nobody_goes_on_before_the_last_one_has_come():
    first, second = boards(2)
    found: list[list[int]] = []
    waiting = threading.Thread(target=lambda: found.append(first.exchange(3, nothing)))
    waiting.start()
    time.sleep(0.05)
    assert not found
    assert second.exchange(-4, nothing) == [3, -4]
    waiting.join()
    assert found == [[3, -4]]


class Talk:
    """How ranks in threads tell each other objects, in place of gloo."""

    def __init__(self, size: int) -> None:
        self._told: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def gather(self, rank: int, own: Any) -> list[Any]:
        self._told[rank] = own
        self._barrier.wait(30)
        told = list(self._told)
        self._barrier.wait(30)
        return told


def open_with(
    rank: int, size: int, gather: Callable[[Any], list[Any]]
) -> tuple[SharedBoard | None, str | None]:
    def first_problem(own: str | None) -> str | None:
        return next((f"rank {r}: {text}" for r, text in enumerate(gather(own)) if text is not None), None)

    return open_board(
        rank=rank,
        size=size,
        timeout_s=60.0,
        from_first=lambda own: gather(own)[0],
        first_problem=first_problem,
    )


def open_in_threads(size: int) -> list[tuple[SharedBoard | None, str | None]]:
    talk = Talk(size)
    return in_threads(size, lambda rank: open_with(rank, size, lambda own: talk.gather(rank, own)))


def pages_open() -> int:
    """How many descriptors of boards this process has."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            found += "gapless-agreements" in os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # that of the list itself
            continue
    return found


def exchange_in_process(rank: int, size: int, num_rounds: int, pipe: Connection) -> None:
    def gather(own: Any) -> Any:
        pipe.send(own)
        return pipe.recv()

    board, problem = open_with(rank, size, gather)
    assert board is not None, problem
    exchange_many(board, rank, size, num_rounds)
    pipe.send("done")
    while True:
        board.exchange(rank, nothing)


@pytest.mark.parametrize("size", [2, 4])
def test_processes_share_one_page_that_has_no_name(size):
    """And that is left by ``SIGKILL``."""
    pipes, theirs = zip(*(context.Pipe() for _ in range(size)), strict=True)
    processes = [
        context.Process(target=exchange_in_process, args=(rank, size, 2000, theirs[rank]), daemon=True)
        for rank in range(size)
    ]
    try:
        for process, end in zip(processes, theirs, strict=True):
            process.start()
            end.close()
        for _ in ("place", "problems"):
            told = [pipe.recv() for pipe in pipes]
            for pipe in pipes:
                pipe.send(told)
        assert [pipe.recv() for pipe in pipes] == ["done"] * size
    finally:
        for process in processes:
            process.kill()
    for process in processes:
        process.join()
        assert process.exitcode == -signal.SIGKILL


def test_several_groups_of_one_process_do_not_meet():
    ours, theirs = open_in_threads(2), open_in_threads(2)

    def run(member: int) -> None:
        board, problem = (ours, theirs)[member // 2][member % 2]
        assert board is not None, problem
        exchange_many(board, member % 2, 2, 200 + member // 2)

    in_threads(4, run)


def test_a_page_goes_with_its_boards():
    found = open_in_threads(3)
    assert pages_open() == 3  # mmap keeps one for each
    del found
    assert not pages_open()


class OtherOs:
    """The module, but for one function."""

    def __init__(self, name: str, instead: Callable[..., Any]) -> None:
        setattr(self, name, instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def refuse(*_: Any) -> Any:
    raise OSError("out of it")


NONE, NOT_OPENED = "rank 0: there is no memory to share", "rank 1: the memory of rank 0 cannot be opened"


@pytest.mark.parametrize(
    ("name", "instead", "problem"),
    [
        ("memfd_create", refuse, rf"{NONE} \(out of it\)"),
        ("write", refuse, rf"{NONE} \(out of it\)"),
        ("write", lambda *_: 0, r"rank 0: the memory of rank 0 cannot be opened \(.*\)"),
        ("readlink", lambda path: "/dev/tape", rf"{NOT_OPENED} \(.* is another file: not the same host\)"),
        ("readlink", refuse, rf"{NOT_OPENED} \(out of it\)"),
        ("open", refuse, rf"{NOT_OPENED} \(out of it\)"),
    ],
    ids=["none", "full", "short", "another host", "another container", "forbidden"],
)
def test_ranks_that_cannot_share_memory_all_say_why(monkeypatch, name, instead, problem):
    monkeypatch.setattr(shared_board, "os", OtherOs(name, instead))
    found = open_in_threads(3)
    assert [board for board, _ in found] == [None] * 3
    reasons = {reason for _, reason in found}
    assert len(reasons) == 1
    assert re.fullmatch(problem, reasons.pop() or "")
    assert not pages_open()


class Member(Agreements):
    """A rank that has a board and no gloo."""

    def __init__(self, board: SharedBoard, rank: int) -> None:
        super().__init__(timeout_s=60.0)
        self.shard, self._board = Shard(rank=rank, size=2), board

    def _abort(self) -> None:
        pass


def members(timeout_s: float = 60.0) -> list[Member]:
    return [Member(board, rank) for rank, board in enumerate(boards(2, timeout_s))]


def test_what_is_agreed_on_is_what_it_is_through_gloo():
    both = members()

    def run(rank: int) -> list[Any]:
        member = both[rank]
        return [
            member.agree(),
            member.agree(rank == 0),
            member.minimum([rank, -rank, 1 << 40]),
            member.minimum([]),
            member.from_first(7 + rank),
            member.first_problem(),
            member.num_agreements,
        ]

    assert in_threads(2, run) == [[True, False, [0, -1, 1 << 40], [], 7, None, 5]] * 2


def test_a_rank_that_is_lost_is_not_waited_for():
    """However it has gone: whoever watches the processes says so, from another thread."""
    first, _ = members()
    lost = threading.Timer(0.2, first.fail, (RankError("rank 1 was killed by SIGKILL"),))
    lost.start()
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(RankError, match=r"^rank 1 was killed by SIGKILL$"):
            first.agree()
    assert time.monotonic() - start < 2.0
    lost.join()


def test_a_rank_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(agreements, "_REASON_WAIT_S", 0.0)
    first, _ = members(timeout_s=0.1)
    with pytest.raises(RankError, match=r"rank 0 of 2: .*: rank 1 has not come within 0.1 s"):
        first.agree()


def test_who_waits_long_sleeps():
    """A core is worth more to those who are waited for."""
    first, second = boards(2)
    threading.Timer(1.0, second.exchange, (0, nothing)).start()
    start = time.thread_time()
    first.exchange(0, nothing)
    assert time.thread_time() - start < 0.5

"""A Ctrl-C that the interpreter has not seen when a read blocks still ends the read."""

from __future__ import annotations

import signal
import socket
import threading
import time

import pytest

from gapless.cli.chat import heeding_interrupts


def interrupt_elsewhere(after_s: float) -> threading.Thread:
    """A thread to which the system gives the signal: the main thread's read goes on, as it does when the
    signal comes just before it."""

    def run() -> None:
        time.sleep(after_s)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_blocking_read_ends_soon_after_a_signal_it_did_not_get() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    start = time.monotonic()
    thread = interrupt_elsewhere(0.1)
    try:
        with pytest.raises(KeyboardInterrupt), heeding_interrupts():
            ours.recv(1)
    finally:
        thread.join()
        ours.close()
        theirs.close()
    assert time.monotonic() - start < 10


def test_data_comes_whole_through_the_alarms() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(20)

    def send_slowly() -> None:
        for _ in range(4):
            time.sleep(0.2)
            theirs.sendall(b"x" * 10)
        theirs.close()

    thread = threading.Thread(target=send_slowly)
    thread.start()
    with heeding_interrupts(), ours.makefile("rb") as stream:
        assert stream.read() == b"x" * 40
    thread.join()
    ours.close()


def test_a_timer_and_its_handler_are_given_back() -> None:
    def mine(number: int, frame: object) -> None: ...

    handler = signal.signal(signal.SIGALRM, mine)
    timer = signal.setitimer(signal.ITIMER_REAL, 300.0)
    try:
        with heeding_interrupts():
            pass
        assert signal.getsignal(signal.SIGALRM) is mine
        assert 290 < signal.getitimer(signal.ITIMER_REAL)[0] <= 300
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def test_other_threads_need_no_alarm() -> None:
    done: list[bool] = []

    def run() -> None:
        with heeding_interrupts():
            done.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [True]

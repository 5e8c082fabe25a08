"""What takes too long is told once; what rests or goes on is left alone."""

from __future__ import annotations

import threading
import time

import pytest

from gapless.env import read_env
from gapless.errors import ConfigError
from gapless.parallel.watchdog import Watchdog

LIMIT_S = 0.2


@pytest.fixture
def told():
    return []


@pytest.fixture
def watchdog(told):
    watchdog = Watchdog(lambda *what: told.append(what))
    yield watchdog
    watchdog.close()


def test_what_takes_too_long_is_told_once(watchdog, told):
    with watchdog.watching("step 3", LIMIT_S):
        time.sleep(4 * LIMIT_S)
    assert told == [("step 3", LIMIT_S)]


def test_rest_between_blocks_does_not_count(watchdog, told):
    for _ in range(3):
        with watchdog.watching("step", LIMIT_S):
            pass
        time.sleep(2 * LIMIT_S)
    assert told == []


def test_after_a_rest_blocks_are_watched_again(watchdog, told):
    with watchdog.watching("one", LIMIT_S):
        pass
    time.sleep(3 * LIMIT_S)
    with watchdog.watching("two", LIMIT_S):
        time.sleep(4 * LIMIT_S)
    assert told == [("two", LIMIT_S)]


def test_progress_gives_the_whole_time_again(watchdog, told):
    with watchdog.watching("start", 5 * LIMIT_S):
        for _ in range(8):
            time.sleep(LIMIT_S)
            watchdog.progress(5 * LIMIT_S)
    assert told == []


def test_progress_may_set_another_limit(watchdog, told):
    with watchdog.watching("start", 60.0):
        watchdog.progress(LIMIT_S)
        time.sleep(2.0)  # it looks once a second where the limit is long
    assert told == [("start", LIMIT_S)]


def test_an_outer_block_begins_anew_behind_an_inner_one(watchdog, told):
    with watchdog.watching("outer", 3 * LIMIT_S):
        with watchdog.watching("inner", 60.0):
            time.sleep(4 * LIMIT_S)
        assert told == []
        time.sleep(6 * LIMIT_S)
    assert told == [("outer", 3 * LIMIT_S)]


def test_its_thread_ends_with_it():
    watchdog = Watchdog(lambda *_: None)
    with watchdog.watching("step", 60.0):
        pass
    watchdog.close()
    (thread,) = [t for t in threading.enumerate() if t is watchdog._thread] or [None]
    if thread is not None:
        thread.join(5.0)
        assert not thread.is_alive()


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_limit_that_is_no_time_is_refused(text):
    with pytest.raises(ConfigError, match=f"GAPLESS_RANK_TIMEOUT={text}: must be a number of seconds"):
        read_env({"GAPLESS_RANK_TIMEOUT": text})


@pytest.mark.parametrize(("text", "seconds"), [("", None), (" 2.5 ", 2.5), ("90", 90.0)])
def test_a_limit_may_be_set(text, seconds):
    assert read_env({"GAPLESS_RANK_TIMEOUT": text}).rank_timeout_s == seconds

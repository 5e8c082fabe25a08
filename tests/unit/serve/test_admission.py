"""How many may be inside, and what the others are told."""

from __future__ import annotations

import pytest

from gapless.serve.admission import Admission
from gapless.serve.client import EngineBusyError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_limit_is_what_runs_and_what_may_wait():
    admission = Admission(max_running=2, max_queued=3)
    for _ in range(5):
        admission.enter()
    with pytest.raises(EngineBusyError, match="5 requests run or wait and at most 5 may"):
        admission.enter()
    admission.leave()
    admission.enter()


def test_a_request_with_many_choices_gets_in_when_there_is_room_for_one():
    admission = Admission(max_running=2, max_queued=2)
    admission.enter(10)
    assert admission.num_inside == 10
    with pytest.raises(EngineBusyError):
        admission.enter()
    admission.leave(10)
    assert admission.num_inside == 0


@pytest.mark.parametrize(
    ("num_inside", "ends_every_s", "expected"),
    [(100, 0.1, 4.9), (100, 0.001, 1.0), (1000, 10.0, 60.0), (2, 5.0, 1.0)],
)
def test_the_wait_follows_the_rate_at_which_requests_end(num_inside, ends_every_s, expected):
    clock = Clock()
    admission = Admission(max_running=2, max_queued=10_000, clock=clock)
    admission.enter(num_inside + 5)
    for _ in range(5):
        clock.now += ends_every_s
        admission.leave()
    # Five ends in four intervals, and the queue is what does not run.
    rate = 5 / (4 * ends_every_s)
    wait = min(60.0, max(1.0, (num_inside - 2) / 2 / rate))
    assert admission.retry_after_s() == pytest.approx(wait)
    assert wait == pytest.approx(expected, rel=0.25)


def test_without_any_end_yet_the_wait_is_a_second():
    admission = Admission(max_running=1, max_queued=1)
    admission.enter(2)
    assert admission.retry_after_s() == 1.0


def test_ends_of_long_ago_say_nothing():
    clock = Clock()
    admission = Admission(max_running=1, max_queued=100, clock=clock)
    admission.enter(50)
    admission.leave(10)
    clock.now += 3600
    assert admission.retry_after_s() == 1.0


def test_bytes_of_images_are_bounded_too_but_one_request_always_fits():
    admission = Admission(max_running=2, max_queued=9, max_bytes=100)
    admission.enter(num_bytes=500)
    admission.enter()
    with pytest.raises(EngineBusyError, match=r"take 500 bytes, and with this one's 1 .*--max-media-bytes"):
        admission.enter(num_bytes=1)
    admission.leave(num_bytes=500)
    admission.enter(num_bytes=60)
    admission.enter(num_bytes=40)
    with pytest.raises(EngineBusyError):
        admission.enter(num_bytes=1)
    assert (admission.num_inside, admission.num_bytes_inside) == (3, 100)

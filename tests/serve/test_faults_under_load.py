"""Many callers, streaming and not, running and queued, while a server is told to end or its engine is killed.

What each of them sees has one of few forms, and nobody waits: the whole right answer, an error with a 5xx, a
stream that breaks off with an error event after a right beginning, or a closed door.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from engine_process_fakes import expected_answer
from test_server_life import Server, running

NUM_CALLERS, NUM_TOKENS = 40, 60
OPTIONS: dict[str, Any] = {"engine": {"step_s": 0.005, "max_num_reqs": 16}}
"""16 run and 24 wait; an answer takes about 0.3 s, so callers are met at every stage."""


def tokens_of(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def call(server: Server, first: int) -> str:
    """One request and what became of it. Asserts that it has one of the forms above."""
    is_streamed = first % 2 == 0
    right = expected_answer([first], NUM_TOKENS)
    body = {"prompt": [first], "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    try:
        answer = server.client.post("/v1/completions", json={**body, "stream": is_streamed})
    except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
        return "closed"
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["type"] == "server_error", error
        assert 500 <= answer.status_code <= 599
        return f"{answer.status_code} {error['code']}"
    if not is_streamed:
        assert tokens_of(answer.json()["choices"][0]["text"]) == right
        return "whole"
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    is_whole = events[-1] == "[DONE]"
    last = None if is_whole else json.loads(events[-1])
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    if is_whole:
        assert tokens_of(text) == right
        return "whole"
    assert last is not None
    assert last["error"]["type"] == "server_error", last
    assert tokens_of(text) == right[: len(tokens_of(text))]
    return f"broke off {last['error']['code']}"


def outcomes_around(server: Server, act: Any) -> tuple[list[str], list[str], float]:
    """What became of requests sent before anybody had noticed ``act``, and of those sent after; and how long
    the slowest of the former took from ``act`` on. (A signal takes a while to arrive.)"""
    before: list[str] = []
    after: list[str] = []
    lock, is_over, is_noticed = threading.Lock(), threading.Event(), threading.Event()
    slowest_s, acted_at = 0.0, math.inf

    def caller(number: int) -> None:
        nonlocal slowest_s
        first = number
        while not is_over.is_set():
            was_before = not is_noticed.is_set()
            outcome = call(server, first)
            with lock:
                (before if was_before else after).append(outcome)
                if was_before:
                    slowest_s = max(slowest_s, time.monotonic() - acted_at)
            if outcome != "whole":
                is_noticed.set()
            if outcome == "closed":
                return
            first += NUM_CALLERS

    with ThreadPoolExecutor(NUM_CALLERS) as pool:
        callers = [pool.submit(caller, number + 1) for number in range(NUM_CALLERS)]
        try:
            while len(before) < NUM_CALLERS:
                assert not any(one.done() for one in callers)
                time.sleep(0.01)
            acted_at = time.monotonic()
            act()
            server.process.wait(30)
        finally:
            is_over.set()
        for one in callers:
            one.result()
    return before, after, slowest_s


@pytest.mark.parametrize("drain_s", [10, 0.1], ids=["time enough", "no time"])
def test_a_signal_under_load_finishes_what_came_before_it_and_turns_away_the_rest(tmp_path, drain_s):
    with running(tmp_path, **OPTIONS, settings={"drain_s": drain_s}) as server:
        before, after, slowest_s = outcomes_around(server, lambda: server.process.send_signal(signal.SIGTERM))
        assert server.process.returncode == 0
    late = {"503 server_draining", "closed"}
    assert set(after) <= late, after
    if drain_s == 10:  # a request that was on its way when the signal came is either in or told
        assert set(before) <= {"whole"} | late, before
    else:
        assert set(before) <= {"whole", "broke off server_draining"} | late, before
        assert slowest_s < 5


def test_an_engine_killed_under_load_fails_everybody_at_once(tmp_path):
    with running(tmp_path, **OPTIONS) as server:
        engine = server.engine_pid()
        before, after, slowest_s = outcomes_around(server, lambda: os.kill(engine, signal.SIGKILL))
        assert server.process.returncode == 1
    broken = [outcome for outcome in before if outcome != "whole"]
    assert set(broken) <= {"500 engine_dead", "broke off engine_dead", "closed"}, broken
    assert len(broken) >= NUM_CALLERS // 2, "all but those whose answer was on its way"
    assert slowest_s < 5
    assert set(after) <= {"500 engine_dead", "503 server_draining", "closed"}, after

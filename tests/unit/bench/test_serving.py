"""The serving loop around a made-up engine and clock: who is queued when, and what counts as time."""

from __future__ import annotations

from typing import Any

import pytest

from gapless.bench.latency import greedy
from gapless.bench.serving import Arrival, Served, latencies, serve
from gapless.engine.outputs import CompletionOutput, RequestOutput


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds


class Engine:
    """A step takes a second and gives every request ``tokens_per_step`` tokens."""

    def __init__(self, clock: Clock, *, tokens_per_step: int = 1, fails: bool = False) -> None:
        self.clock, self.tokens_per_step, self.fails = clock, tokens_per_step, fails
        self.running: dict[str, list[int]] = {}
        self.added_at: dict[str, float] = {}

    def add_request(self, request_id: str, prompt: list[int], params: Any) -> None:
        self.running[request_id] = [params.max_tokens, 0]
        self.added_at[request_id] = self.clock.now - 100.0

    def has_unfinished(self) -> bool:
        return bool(self.running)

    def step(self) -> list[RequestOutput]:
        self.clock.now += 1.0
        outputs = []
        for request_id, counts in list(self.running.items()):
            counts[1] = min(counts[0], counts[1] + self.tokens_per_step)
            is_done = counts[1] == counts[0]
            choice = CompletionOutput(
                index=0,
                text="",
                token_ids=(1,) * counts[1],
                finish_reason="error" if self.fails else "length" if is_done else None,
                error="it broke" if self.fails else None,
            )
            outputs.append(
                RequestOutput(request_id=request_id, prompt=None, prompt_token_ids=(1,), outputs=[choice])
            )
            if is_done:
                del self.running[request_id]
        return outputs


def run(times: list[float], *, tokens: int = 3, **options: Any) -> tuple[list[Served], float, Engine, Clock]:
    clock = Clock()
    engine = Engine(clock, **options)
    arrivals = [Arrival(at_s=at, prompt=[1, 2], params=greedy(tokens)) for at in times]
    served, seconds = serve(engine, arrivals, clock=clock, sleep=clock.sleep)  # type: ignore[arg-type]
    return served, seconds, engine, clock


def test_all_at_once_is_one_batch() -> None:
    served, seconds, _, clock = run([0.0, 0.0, 0.0])
    assert [one.token_times_s for one in served] == [[1.0, 2.0, 3.0]] * 3
    assert seconds == 3.0
    assert clock.slept == []


def test_waiting_for_a_running_step_counts_for_the_request_that_waits() -> None:
    served, _, engine, _ = run([0.0, 0.25])
    assert engine.added_at == {"0": 0.0, "1": 1.0}
    assert served[1].ttft_s == 1.75, "it arrived at 0.25 and its first token was there at 2"


def test_an_idle_engine_sleeps_until_the_next_arrival() -> None:
    served, seconds, _, clock = run([0.0, 10.0])
    assert clock.slept == [7.0]
    assert served[1].token_times_s == [1.0, 2.0, 3.0]
    assert seconds == 13.0


def test_tokens_of_one_step_share_its_time() -> None:
    served, _, _, _ = run([0.0], tokens=5, tokens_per_step=2)
    assert served[0].token_times_s == [1.0, 1.0, 1.5, 2.0, 3.0]
    assert sum(served[0].gaps_s()) == 2.0


def test_a_request_that_fails_fails_the_benchmark() -> None:
    with pytest.raises(RuntimeError, match="request 0 failed: it broke"):
        run([0.0], fails=True)


def test_latencies_are_milliseconds_over_requests_and_gaps() -> None:
    served, _, _, _ = run([0.0, 0.0])
    found = latencies(served)
    assert found["ttft_ms"]["p50"] == 1000.0
    assert found["itl_ms"]["max"] == 1000.0
    assert found["e2e_ms"]["mean"] == 3000.0


def test_one_token_answers_have_no_gaps() -> None:
    served, _, _, _ = run([0.0], tokens=1)
    assert latencies(served)["itl_ms"] is None

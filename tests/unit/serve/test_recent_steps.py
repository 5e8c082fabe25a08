"""The ring of recent steps: what a step was, from what was counted in it."""

from __future__ import annotations

import msgspec
import pytest
from engine_process_fakes import make_core
from test_engine_loop import generate, run

from gapless.graphs.modes import Phase, Strategy
from gapless.graphs.report import StepLog
from gapless.serve.messages import Shutdown
from gapless.serve.recent_steps import NUM_STEPS, RecentSteps, StepRecord


@pytest.fixture
def log() -> StepLog:
    return StepLog()


def test_a_replay_becomes_a_record_with_its_size_and_what_was_real(log):
    recent = RecentSteps(log)
    log.count_replay(Phase.DECODE, Strategy.FULL, 8, 5)
    recent.add(0.002)
    assert list(recent.records) == [StepRecord("decode", "full", 8, 5, "", 2.0)]


def test_an_eager_step_has_its_reason_and_its_tokens(log):
    recent = RecentSteps(log)
    log.count_eager(Phase.PREFILL, "above the largest size", num_real=900)
    recent.add(0.5)
    assert list(recent.records) == [StepRecord("prefill", "eager", 0, 900, "above the largest size", 500.0)]


def test_eager_parts_of_a_replayed_step_are_named_with_their_phase(log):
    recent = RecentSteps(log)
    log.count_replay(Phase.PREFILL, Strategy.BREAKABLE, 64, 60)
    log.count_replay(Phase.HEAD, Strategy.FULL, 4, 3)
    log.count_eager(Phase.SAMPLE, "logprobs")
    log.count_eager(Phase.SAMPLE, "penalties")
    recent.add(0.001)
    (record,) = recent.records
    assert (record.strategy, record.size, record.reason) == (
        "breakable",
        64,
        "sample: logprobs, sample: penalties",
    )


def test_steps_launched_together_share_the_time(log):
    recent = RecentSteps(log)
    for real in (3, 4):
        log.count_replay(Phase.DECODE, Strategy.FULL, 4, real)
        log.count_replay(Phase.SAMPLE, Strategy.FULL, 4, real)
    recent.add(0.004)
    assert [(record.real, record.ms) for record in recent.records] == [(3, 2.0), (4, 2.0)]


def test_work_without_a_run_adds_nothing(log):
    recent = RecentSteps(log)
    recent.add(1.0)
    assert not recent.records


def test_the_start_up_is_not_shown(log):
    log.count_eager(Phase.PREFILL, "profiling")
    recent = RecentSteps(log)
    recent.add(1.0)
    assert not recent.records


def test_only_the_last_steps_are_kept(log):
    recent = RecentSteps(log)
    for real in range(NUM_STEPS + 10):
        log.count_replay(Phase.DECODE, Strategy.FULL, 512, real)
        recent.add(0.001)
    assert [record.real for record in recent.records] == list(range(10, NUM_STEPS + 10))


def test_an_unread_log_does_not_grow(log):
    for _ in range(10_000):
        log.count_replay(Phase.DECODE, Strategy.FULL, 1, 1)
    assert len(log.recent) < 100


def test_clearing_the_log_forgets_recent_runs(log):
    log.count_eager(Phase.DECODE, "warm-up")
    log.clear()
    assert not log.recent


def test_the_loop_sends_them_with_its_statistics():
    core, log = make_core(), StepLog()
    launch = core.runner.launch

    def counting(batch):
        log.count_replay(Phase.DECODE, Strategy.FULL, 8, batch.num_reqs)
        return launch(batch)

    core.runner.launch = counting
    _, loop = run(core, [generate("a", [1, 2]), generate("b", [3])], [Shutdown(drain_s=5.0)], log=log)
    records = loop.stats()["recent_steps"]
    assert [record[:5] for record in records] == [["decode", "full", 8, 2, ""]] * 4
    assert all(record[5] >= 0 for record in records)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(records)) == records

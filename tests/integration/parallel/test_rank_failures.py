"""What goes wrong on one rank: an error that names it, soon, and no process left behind."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import rank_faults
import torch.distributed as dist
from forked_ranks import OPTIONS, forked, greedy, is_alive, open_llm, tokens_of, write_model

from gapless import LLM
from gapless.engine import ranks
from gapless.errors import ConfigError, GaplessError, MemoryLimitError, RankError
from gapless.graphs.store import GraphStore
from gapless.parallel.group import RankGroup
from gapless.parallel.shard import Shard
from gapless.parallel.wire import Failure

AT_MOST_S = 10.0
"""As promised; counted where the fault happens, not from the start of an engine."""
FEW: dict[str, Any] = {"cuda_graph_bs_prefill": [8], "cuda_graph_bs_decode": [1], "enforce_eager": True}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pair(source: str):
    llm = open_llm(source, 2, **FEW)
    yield llm
    llm.shutdown()


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + AT_MOST_S
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "a rank is still there"
        time.sleep(0.02)


def generate_for_ever(llm: LLM) -> None:
    while True:
        llm.generate([[1, 2], [3]], greedy(100))


@pytest.mark.parametrize(
    ("fault", "backend"),
    [
        (rank_faults.cannot_capture_a_prefill_size, "full"),
        (rank_faults.cannot_capture_behind_the_first_break, "breakable"),
    ],
    ids=["full", "breakable"],
)
def test_a_size_that_one_rank_cannot_capture_is_dropped_on_all(source, fault, backend):
    with open_llm(source, 2, fault, cuda_graph_backend_prefill=backend) as llm:
        reports = [llm.report(), *llm.runner.reports_of_others()]
        for report in reports:
            sizes = [r["num_tokens"] for r in report["graphs"] if r["phase"] == "prefill"]
            assert sizes == [32]
            assert len(report["failures"]) == 1
        assert "rank 1: " in reports[0]["failures"][0]["message"]
        assert "Tensor.item at " in reports[0]["failures"][0]["message"]
        # The next larger size serves instead, on both.
        assert tokens_of(llm, [[1, 2, 3]], greedy(3))
        steps = llm.report()["steps"]
        assert ("prefill", 32) in {(row["phase"], row["bucket"]) for row in steps}
        assert llm.runner.reports_of_others()[0]["steps"] == steps


def test_four_ranks_run_eagerly_together_where_one_can_capture_no_size(source):
    with open_llm(source, 1, enforce_eager=True) as llm:
        expected = tokens_of(llm, [[1, 2, 3]], greedy(3))
    options = {"cuda_graph_backend_prefill": "full", "cuda_graph_bs_prefill": [8]}
    with open_llm(source, 4, rank_faults.cannot_capture_a_prefill_size_on_rank_2, **options) as llm:
        assert tokens_of(llm, [[1, 2, 3]], greedy(3)) == expected
        reports = [llm.report(), *llm.runner.reports_of_others()]
        assert len(reports) == 4
        for report in reports:
            assert {row["phase"] for row in report["graphs"]}.isdisjoint({"prefill"})
            assert [row["phase"] for row in report["eager"]] == ["prefill"]
            assert report["eager"] == reports[0]["eager"]
            assert report["steps"] == reports[0]["steps"]
        assert "rank 2: " in reports[0]["failures"][0]["message"]


def test_what_the_first_rank_cannot_capture_is_dropped_on_the_other(source, monkeypatch):
    rank_faults.fail_to_capture_a_prefill_size(monkeypatch.setattr)
    with open_llm(source, 2, cuda_graph_backend_prefill="full") as llm:
        for report in (llm.report(), *llm.runner.reports_of_others()):
            assert [r["num_tokens"] for r in report["graphs"] if r["phase"] == "prefill"] == [32]
        assert tokens_of(llm, [[1, 2, 3]], greedy(3))


def test_a_rank_killed_while_idle_is_noticed(pair):
    tokens_of(pair, [[1, 2]], greedy(2))
    pids = pair.runner.worker_pids
    os.kill(pids[0], signal.SIGKILL)
    deadline = time.monotonic() + AT_MOST_S
    while pair.runner.failure is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert str(pair.runner.failure) == "rank 1 was killed by SIGKILL"
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        pair.generate([[1, 2]], greedy(2))
    pair.shutdown()
    assert_gone(pids)


def test_a_rank_killed_while_it_works_ends_the_call(pair):
    pids = pair.runner.worker_pids
    threading.Timer(0.3, os.kill, (pids[0], signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(GaplessError, match="rank 1 was killed by SIGKILL"):
        generate_for_ever(pair)
    assert time.monotonic() - start < AT_MOST_S
    assert not pair.core.has_unfinished()
    assert_gone(pids)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (rank_faults.raises_in_its_third_step, "rank 1 failed: ValueError: the third step is one too many"),
        (rank_faults.dies_in_its_third_step, "rank 1 has ended with exit code 7"),
    ],
    ids=["raises", "dies"],
)
def test_trouble_in_the_middle_of_a_step_reaches_the_caller(source, fault, message):
    with open_llm(source, 2, fault, **FEW) as llm:
        pids = llm.runner.worker_pids
        start = time.monotonic()
        with pytest.raises(GaplessError, match=message):
            llm.generate([[1, 2, 3]], greedy(20))
        assert time.monotonic() - start < AT_MOST_S
        assert_gone(pids)
        with pytest.raises(GaplessError, match=message):
            llm.generate([[1, 2, 3]], greedy(20))


def test_two_of_four_ranks_go_with_the_one_that_dies(source):
    with open_llm(source, 4, **FEW) as llm:
        pids = llm.runner.worker_pids
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(GaplessError, match="rank 2 was killed by SIGKILL"):
            generate_for_ever(llm)
        assert_gone(pids)


def test_an_error_of_the_first_rank_ends_the_others(pair, monkeypatch):
    pids = pair.runner.worker_pids

    def launch(batch: Any) -> Any:
        raise OSError("no more of this")

    monkeypatch.setattr(pair.runner.inner, "launch", launch)
    with pytest.raises(GaplessError, match="rank 0 failed in step 0: OSError: no more of this"):
        pair.generate([[1, 2]], greedy(2))
    assert_gone(pids)


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (rank_faults.has_too_little_memory, MemoryLimitError, "rank 1: the weights do not fit"),
        (rank_faults.never_starts, RankError, "rank 1 has ended with exit code 5"),
    ],
    ids=["memory", "exit"],
)
def test_a_rank_that_cannot_start_is_named(source, fault, kind, message):
    start = time.monotonic()
    with pytest.raises(kind, match=message):
        open_llm(source, 2, fault, **FEW)
    assert time.monotonic() - start < 2 * AT_MOST_S


def test_an_error_of_the_first_rank_at_start_leaves_no_process(source, monkeypatch):
    monkeypatch.setattr("gapless.engine.build._Build.run", lambda self: 1 / 0)
    started: list[int] = []
    with forked():
        real = ranks.start_rank
        monkeypatch.setattr(ranks, "start_rank", lambda *args: _noted(real(*args), started))
        with pytest.raises(ZeroDivisionError):
            LLM(source, tensor_parallel_size=2, **{**OPTIONS, **FEW})
    assert started
    assert_gone(started)


def _noted(process: Any, started: list[int]) -> Any:
    started.append(process.pid)
    return process


def test_shutdown_leaves_no_process_and_may_be_repeated(source, monkeypatch):
    llm = open_llm(source, 2, **FEW)
    pids, order = llm.runner.worker_pids, []
    for owner, name in ((GraphStore, "release"), (RankGroup, "close")):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda self, real=real, name=name: (order.append(name), real(self))[1]
        )
    llm.shutdown()
    assert order == ["release", "close"], "graphs hold collectives of the group"
    assert not any(map(is_alive, pids))
    llm.shutdown()
    with pytest.raises(GaplessError, match="has been shut down"):
        llm.generate([[1]], greedy(1))


PARENT = """
import os
from gapless import LLM
llm = LLM({source!r}, tensor_parallel_size=2, **{options!r})
print(llm.runner.worker_pids[0], flush=True)
os.kill(os.getpid(), 9)
"""


def test_ranks_end_with_the_first_and_need_no_main_guard(source):
    """A plain script, whose ranks are fresh interpreters: as users have it."""
    code = PARENT.format(source=source, options={**OPTIONS, **FEW})
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert_gone([int(result.stdout)])


def test_an_engine_that_is_forgotten_leaves_no_process(source):
    llm = open_llm(source, 2, **FEW)
    pids = llm.runner.worker_pids
    del llm
    gc.collect()
    assert_gone(pids)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (MemoryLimitError("full"), MemoryLimitError, "rank 3: full"),
        (RankError("lost"), RankError, "rank 3 failed: lost"),
        (ValueError("odd"), RankError, "rank 3 failed: ValueError: odd"),
        (KeyError(), RankError, "rank 3 failed: KeyError: KeyError"),
    ],
)
def test_what_a_rank_says_of_itself(error, kind, message):
    made = Failure.of(3, error).to_error()
    assert type(made) is kind
    assert str(made) == message


TORCHRUN = """
from pathlib import Path
from gapless import LLM, SamplingParams
from gapless.errors import ConfigError
llm = LLM({source!r}, tensor_parallel_size=2, **{options!r})
params = SamplingParams(temperature=0.0, max_tokens=4, detokenize=False, ignore_eos=True)
tokens = llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids
llm.shutdown()
try:
    LLM({source!r}, tensor_parallel_size=2, **{options!r})
except ConfigError as error:
    assert "one engine of several ranks" in str(error)
    Path({out!r}).write_text(str(list(tokens)))
"""


def test_torchrun_may_start_the_ranks(source, tmp_path):
    with LLM(source, **{**OPTIONS, **FEW}) as llm:
        expected = tokens_of(llm, [[1, 2, 3]], greedy(4))
    script, out = tmp_path / "run.py", tmp_path / "out"
    script.write_text(TORCHRUN.format(source=source, options={**OPTIONS, **FEW}, out=str(out)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    assert out.read_text() == str(list(expected[0]))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "WORLD_SIZE=4"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK=zero"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR is not set"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(environ, message, source, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(GaplessError, match=message):
        LLM(source, tensor_parallel_size=2, **OPTIONS)


@pytest.mark.parametrize("when", ["step", "report"])
def test_a_rank_that_hangs_alive_is_given_up(source, monkeypatch, when):
    monkeypatch.setenv("GAPLESS_RANK_TIMEOUT", "1.5")
    with open_llm(source, 2, **FEW) as llm:
        tokens_of(llm, [[1, 2]], greedy(2))
        pids = llm.runner.worker_pids
        os.kill(pids[0], signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(GaplessError, match=rf"has not ended within 1.5 s.*{pids[0]}.* hangs"):
            llm.generate([[1, 2]], greedy(20)) if when == "step" else llm.runner.reports_of_others()
        assert time.monotonic() - start < AT_MOST_S
        assert_gone(pids)
        with pytest.raises(GaplessError, match="hangs"):
            llm.generate([[1, 2]], greedy(2))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (rank_faults.hangs_before_it_is_ready, "start of the ranks' processes has not ended within 3 s"),
        (rank_faults.hangs_before_it_joins, "meeting of the ranks has not ended within 3 s"),
        (rank_faults.hangs_while_it_loads, "start of the engine has not ended within 3 s"),
    ],
    ids=["ready", "join", "load"],
)
def test_a_rank_that_hangs_at_start_is_given_up(source, monkeypatch, fault, message):
    monkeypatch.setenv("GAPLESS_RANK_TIMEOUT", "3")
    with pytest.raises(RankError, match=message):
        open_llm(source, 2, fault, **FEW)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (rank_faults.dies_in_its_capture, "rank 1 has ended with exit code 8"),
        (rank_faults.hangs_in_its_capture, "start of the engine has not ended within 3 s"),
    ],
    ids=["dies", "hangs"],
)
def test_a_rank_that_is_lost_in_a_capture_is_not_waited_for_in_memory(source, monkeypatch, fault, message):
    monkeypatch.setenv("GAPLESS_RANK_TIMEOUT", "3")
    start = time.monotonic()
    with pytest.raises(RankError, match=message):
        open_llm(source, 2, fault, **{**FEW, "enforce_eager": False})
    assert time.monotonic() - start < 3 * AT_MOST_S


def test_ranks_that_share_no_memory_agree_through_gloo(source, caplog):
    with (
        caplog.at_level(logging.INFO, logger="gapless.parallel"),
        open_llm(source, 2, rank_faults.cannot_open_the_memory_of_the_first, **FEW) as llm,
    ):
        assert tokens_of(llm, [[1, 2]], greedy(2))
        how = llm.report()["startup"]["ranks"]["agrees_by"]
    told = [record.getMessage() for record in caplog.records if record.name.startswith("gapless.parallel")]
    assert how == "gloo: rank 1: the memory of rank 0 cannot be opened (not yours)"
    assert told == [f"ranks agree through {how}"]


def test_a_rank_that_dies_while_all_meet_is_noticed_at_once(source):
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 has ended with exit code 9"):
        open_llm(source, 2, rank_faults.dies_while_all_meet, **FEW)
    assert time.monotonic() - start < AT_MOST_S
    with open_llm(source, 2, **FEW) as llm:  # what was given up there harms nobody
        assert tokens_of(llm, [[1, 2]], greedy(2))


def test_a_rank_without_memory_in_its_warm_up_ends_the_start_of_all(source):
    options = {**FEW, "enforce_eager": False}
    with pytest.raises(GaplessError, match=r"rank 1 failed: there is too little memory.*, 1 tokens"):
        open_llm(source, 4, rank_faults.runs_out_of_memory_in_a_warm_up, **options)


def test_a_second_engine_of_several_ranks_at_the_same_time_is_refused(source, pair):
    with pytest.raises(ConfigError, match="shut that down first"):
        open_llm(source, 2, **FEW)
    assert tokens_of(pair, [[1, 2]], greedy(2))
    pair.shutdown()
    with open_llm(source, 2, **FEW) as again:
        assert tokens_of(again, [[1, 2]], greedy(2))


def test_a_rank_that_goes_while_the_engine_is_shut_down_leaves_no_process(source, monkeypatch):
    llm = open_llm(source, 2, **FEW)
    pids = llm.runner.worker_pids

    def send(self: Any, message: Any) -> None:
        raise RankError("a rank does not answer any more")

    monkeypatch.setattr("gapless.parallel.workers.Workers.send", send)
    llm.runner.shutdown()
    assert_gone(pids)


def test_ranks_of_a_cpu_divide_its_threads(monkeypatch):
    import torch

    group, numbers = RankGroup.__new__(RankGroup), []
    group.torch_device, group.shard = torch.device("cpu"), Shard(rank=1, size=4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10)
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    group.share_cores()
    assert numbers == []
    monkeypatch.delenv("OMP_NUM_THREADS")
    group.share_cores()
    assert numbers == [2]

"""How ranks end: a communicator waits for the graphs that hold it, so graphs go before the process group."""

from __future__ import annotations

import gc
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gapless.engine.build
from gapless.engine.parallel_runner import ParallelRunner
from gapless.engine.rank_worker import _open_and_run
from gapless.engine.runner import ModelRunner
from gapless.errors import RankError
from gapless.parallel.collectives import register_group
from gapless.parallel.watchdog import Watchdog


class Log(list[str]):
    """What has happened, in its order."""

    def of(self, name: str) -> Any:
        return lambda *_: self.append(name)


@pytest.fixture
def log() -> Log:
    return Log()


def group_of(log: Log, device: str, *, becomes_idle: bool = True) -> Any:
    return SimpleNamespace(
        torch_device=torch.device(device),
        shard=SimpleNamespace(group=-7),
        close=log.of("group"),
        agree=lambda: True,
        becomes_idle=lambda: becomes_idle,
    )


def first_rank(
    log: Log, *, device: str = "cpu", failure: RankError | None = None, becomes_idle: bool = True
) -> ParallelRunner:
    sizes = ("num_blocks", "block_size", "max_model_len", "max_num_reqs", "max_num_batched_tokens")
    more = dict.fromkeys((*sizes, "vocab_size", "max_steps_ahead"), 1)
    inner: Any = SimpleNamespace(shutdown=log.of("graphs"), media=None, **more)
    workers: Any = SimpleNamespace(
        failure=failure, send=log.of("told"), close=log.of("processes"), watching=lambda *_: nullcontext()
    )
    group = group_of(log, device, becomes_idle=becomes_idle)
    register_group(group)
    return ParallelRunner(inner, workers, group)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_first_rank_gives_up_its_graphs_before_the_group(log: Log, device: str) -> None:
    runner = first_rank(log, device=device)
    runner.shutdown()
    runner.shutdown()
    assert log == ["told", "graphs", "group", "processes"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_so_does_one_that_is_forgotten(log: Log, device: str) -> None:
    runner = first_rank(log, device=device)
    del runner
    gc.collect()
    assert log == ["told", "graphs", "group", "processes"]


@pytest.mark.parametrize(
    ("device", "becomes_idle", "order"),
    [("cpu", False, ["graphs", "group"]), ("cuda", True, ["graphs", "group"]), ("cuda", False, ["group"])],
)
def test_after_a_failure_graphs_go_unless_kernels_of_a_gpu_wait_for_ever(
    log: Log, device: str, becomes_idle: bool, order: list[str]
) -> None:
    """An aborted communicator waits for graphs that hold it as any other does."""
    first_rank(log, device=device, failure=RankError("gone"), becomes_idle=becomes_idle).shutdown()
    assert log == [*order, "processes"]


def test_a_first_rank_whose_graphs_cannot_be_given_up_still_leaves(log: Log) -> None:
    runner = first_rank(log)

    def fails() -> None:
        raise RuntimeError("no such graph")

    runner.inner.shutdown = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no such graph"):
        runner.shutdown()
    assert log == ["told", "group", "processes"]


def test_an_end_that_hangs_is_watched(log: Log) -> None:
    runner = first_rank(log)
    failed = threading.Event()
    watchdog = Watchdog(lambda name, _: (log.append(name), failed.set()))
    runner._workers.watching = lambda name, _: watchdog.watching(name, 0.1)  # type: ignore[method-assign]

    def close() -> None:
        assert failed.wait(20.0)
        log.append("group")

    runner._group.close = close  # type: ignore[method-assign]
    runner.shutdown()
    watchdog.close()
    assert log == ["told", "graphs", "the end of the ranks", "group", "processes"]


class OtherRank(ModelRunner):
    """As much of a runner as its end needs."""

    def __init__(self, log: Log) -> None:
        self.log_of_ends = log

    def shutdown(self) -> None:
        self.log_of_ends.append("graphs")


def run_other_rank(log: Log, monkeypatch: pytest.MonkeyPatch, receive: Any) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: None)  # meant for a process of its own
    opened = SimpleNamespace(runner=OtherRank(log))
    monkeypatch.setattr(gapless.engine.build, "open_one", lambda *_, **__: opened)
    wires: Any = SimpleNamespace(commands=SimpleNamespace(send=log.of("said"), recv=receive))
    start: Any = SimpleNamespace(config=None)
    _open_and_run(start, wires, lambda _: (group_of(log, "cpu"), torch.device("cpu")))


def test_another_rank_gives_up_its_graphs_before_the_group(log: Log, monkeypatch: Any) -> None:
    run_other_rank(log, monkeypatch, lambda: None)
    assert log == ["said", "graphs", "group"]


def test_another_rank_whose_first_has_gone_gives_up_its_graphs(log: Log, monkeypatch: Any) -> None:
    def gone() -> None:
        raise EOFError

    with pytest.raises(EOFError):
        run_other_rank(log, monkeypatch, gone)
    assert log == ["said", "graphs"]  # the process ends without waiting in a group

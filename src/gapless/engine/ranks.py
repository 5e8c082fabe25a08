"""From one config to an engine of several ranks: who starts them, how they meet, what is checked before.

Without ``torchrun`` the calling process is the first rank and starts the others, one process per GPU (per
part of the CPU). Under ``torchrun`` every rank runs the caller's program: the first one goes on with an
engine, the others serve it inside this call and leave with it. All open their part of the model at the same
time and meet in every collective of start-up. Read ``build.py`` for what each does, ``parallel_runner.py``
for the steps after it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gapless.config import EngineConfig
from gapless.engine.parallel_runner import ParallelRunner
from gapless.engine.rank_worker import StartRank, serve
from gapless.engine.rules import refuse_divided_encoder
from gapless.env import TorchrunRank, read_torchrun
from gapless.errors import ConfigError, RankError
from gapless.models.registry import read_model_info
from gapless.parallel.collectives import forget_group, register_group
from gapless.parallel.group import RankGroup
from gapless.parallel.shard import Shard
from gapless.parallel.wire import accept_ranks, connect_to_first
from gapless.parallel.workers import (
    CAPTURE_LIMIT_S,
    MEET_LIMIT_S,
    START_LIMIT_S,
    StartProcess,
    Workers,
    start_interpreter,
)

if TYPE_CHECKING:
    from gapless.engine.build import OpenedEngine, Progress

start_rank: StartProcess = partial(start_interpreter, "gapless.engine.rank_worker:main")
"""Starts the process of another rank."""
_LOOK_S = 0.1
"""While ranks meet, this often somebody looks whether all of them are still there."""
_MEET_S = 120.0
"""Ranks that have all said they are there have met by then, or never will."""

_HERE = "gapless/here/{}"
"""What a rank sets in the store when it is about to join."""
_meeting: threading.Thread | None = None
"""The last one, which goes on for a while if it had to be given up."""

_has_met_under_torchrun = False

logger = logging.getLogger(__name__)


def open_ranks(
    config: EngineConfig,
    *,
    device_type: str,
    progress: Progress | None,
    open_one: Callable[..., OpenedEngine],
) -> OpenedEngine:
    """The engine of the first rank. Does not return on other ranks that ``torchrun`` has started: their
    processes end with the engine.

    Raises what ``open_engine`` raises, also for another rank, whose number the message then has, and
    ``ConfigError`` where the model or the machine cannot be divided so.
    """
    size = config.tensor_parallel_size
    torchrun = _torchrun_of(size)
    _check(config, device_type=device_type, is_local=torchrun is None)
    if torchrun is not None:
        workers, store = _meet_under_torchrun(torchrun, config, device_type)
        local_rank, port = torchrun.local_rank, torchrun.master_port
    else:
        own_store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store, port = own_store, own_store.port
        workers, local_rank = Workers.start(size - 1, start_process=start_rank), 0
    group: RankGroup | None = None
    try:
        level = max(logging.getLogger("gapless").getEffectiveLevel(), logging.ERROR)
        start = StartRank(config=config, size=size, port=port, log_level=level)
        with workers.watching("the start of the ranks' processes", MEET_LIMIT_S):
            workers.send(start)
            workers.receive()
        torch_device = _device(device_type, local_rank)

        def join() -> RankGroup:
            _device(device_type, local_rank)  # CUDA's current device is that of a thread
            return _join(store, 0, config, torch_device, on_failure=workers.on_failure)

        with workers.watching("the meeting of the ranks", MEET_LIMIT_S):
            _wait_for_all(store, size, workers)
            group = _meet(workers, join)
        group.share_cores()

        def report(stage: str, done: int, total: int) -> None:
            workers.progress(CAPTURE_LIMIT_S[device_type] if stage == "capture" else START_LIMIT_S)
            if progress is not None:
                progress(stage, done, total)

        with workers.watching("the start of the engine"):
            opened = open_one(config, torch_device=torch_device, group=group, progress=report)
            group.agree()
    except BaseException as error:
        failure = workers.failure
        workers.fail(RankError(f"rank 0 failed: {error}"))
        workers.close()
        if group is not None:
            group.fail(RankError(str(error)))
            group.close()
            forget_group(group)
        if failure is not None and isinstance(error, Exception):
            raise failure from None  # what it has made of this rank's device or group is no news
        raise
    assert not isinstance(opened.runner, ParallelRunner)
    return replace(opened, runner=ParallelRunner(opened.runner, workers, group))


def _wait_for_all(store: dist.Store, size: int, workers: Workers) -> None:
    """Until the other ranks are about to join, so that one that is lost on its way leaves nobody in a call
    that cannot be interrupted."""
    keys = [_HERE.format(rank) for rank in range(1, size)]
    while not store.check(keys):
        workers.check()
        time.sleep(_LOOK_S / 5)


def _meet(workers: Workers, join: Callable[[], RankGroup]) -> RankGroup:
    """``join()``, given up as soon as another rank fails."""
    global _meeting
    future: Future[RankGroup] = Future()

    def run() -> None:
        try:
            future.set_result(join())
        except BaseException as error:
            future.set_exception(error)

    _meeting = threading.Thread(target=run, name="rank-meeting", daemon=True)
    _meeting.start()
    while not future.done():
        wait_for_futures([future], timeout=_LOOK_S)
        if workers.failure is not None:
            future.add_done_callback(_close_late)
            workers.check()
    if isinstance(future.exception(), RuntimeError | RankError):
        workers.await_failure()  # most likely that of a rank that has gone in the middle of it
    return future.result()


def _close_late(future: Future[RankGroup]) -> None:
    """A group that was made when it was not wanted any more."""
    if future.exception() is None:
        group = future.result()
        group.fail(RankError("the ranks met too late"))
        forget_group(group)
        group.close()


def join_local(start: StartRank, rank: int) -> tuple[RankGroup, torch.device]:
    """Group and device of a rank that was started by the first one, on its machine."""
    store = dist.TCPStore("127.0.0.1", start.port, is_master=False)
    torch_device = _device(start.config.device, rank)
    group = _join(store, rank, start.config, torch_device)
    group.share_cores()
    return group, torch_device


def _join(
    store: dist.Store,
    rank: int,
    config: EngineConfig,
    torch_device: torch.device,
    *,
    on_failure: Callable[[Callable[[RankError], None]], None] | None = None,
) -> RankGroup:
    """``on_failure``: where who must hear of a lost rank says so."""
    store.set_timeout(timedelta(seconds=_MEET_S))
    store.set(_HERE.format(rank), "")
    group = RankGroup(
        store,
        rank=rank,
        size=config.tensor_parallel_size,
        torch_device=torch_device,
        break_at_all_reduce=config.break_at_all_reduce,
    )
    register_group(group)
    if on_failure is not None:
        on_failure(group.fail)  # at once: what follows waits for the other ranks, in memory and on the device
    group.share_memory()
    if torch_device.type == "cuda":
        group.find_one_shot()
    return group


def _meet_under_torchrun(
    torchrun: TorchrunRank, config: EngineConfig, device_type: str
) -> tuple[Workers, dist.Store]:
    """The other ranks, for the first one. On the others: serve it, then leave."""
    global _has_met_under_torchrun
    if _has_met_under_torchrun:
        raise ConfigError(
            f"--tensor-parallel-size={torchrun.world_size}: under torchrun a program has one engine of "
            "several ranks, with which the processes of the other ranks end; begin a new program for another"
        )
    _has_met_under_torchrun = True
    store, rank, size = next(dist.rendezvous("env://"))
    if rank == 0:
        return Workers(accept_ranks(store, torchrun.master_addr, size - 1)), store
    wires = connect_to_first(store, rank)

    def join(start: StartRank) -> tuple[RankGroup, torch.device]:
        torch_device = _device(device_type, torchrun.local_rank)
        return _join(store, rank, start.config, torch_device), torch_device

    serve(wires, join)


def _torchrun_of(size: int) -> TorchrunRank | None:
    found = read_torchrun()
    if found is not None and found.world_size > 1 and found.world_size != size:
        raise ConfigError(
            f"--tensor-parallel-size={size}, but torchrun has started WORLD_SIZE={found.world_size} "
            f"processes; give --tensor-parallel-size={found.world_size}, or start without torchrun"
        )
    return found if found is not None and found.world_size > 1 else None


def _check(config: EngineConfig, *, device_type: str, is_local: bool) -> None:
    size = config.tensor_parallel_size
    if not dist.is_available():
        raise ConfigError(f"--tensor-parallel-size={size}: this torch was built without torch.distributed")
    if device_type == "cuda" and is_local and torch.cuda.device_count() < size:
        raise ConfigError(
            f"--tensor-parallel-size={size}: this machine has {torch.cuda.device_count()} GPUs that are "
            "visible, one is needed for each rank"
        )
    refuse_divided_encoder(config, read_model_info(config.model, shard=Shard(rank=0, size=size)))
    if is_local and dist.is_initialized():
        raise ConfigError(
            f"--tensor-parallel-size={size}: this process is in a group of torch.distributed already, that "
            "of another engine with several ranks or the program's own; shut that down first (after a failed "
            "one on GPUs: begin a new process), or run each engine in a process of its own"
        )
    if _meeting is not None and _meeting.is_alive():
        raise ConfigError(
            f"--tensor-parallel-size={size}: this process is still in the group of an engine that lost a "
            "rank while its ranks met; begin a new process"
        )


def _device(device_type: str, local_rank: int) -> torch.device:
    if device_type != "cuda":
        return torch.device(device_type)
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)

"""From one config to an engine of several ranks: who starts them, how they meet, what is checked before.

Without ``torchrun`` the calling process is the first rank and starts the others, one process per GPU (per
part of the CPU). Under ``torchrun`` every rank runs the caller's program: the first one goes on with an
engine, the others serve it inside this call and leave with it. All open their part of the model at the same
time and meet in every collective of start-up. Read ``build.py`` for what each does, ``parallel_runner.py``
for the steps after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gapless.config import EngineConfig
from gapless.engine.parallel_runner import ParallelRunner
from gapless.engine.rank_worker import StartRank, serve
from gapless.env import TorchrunRank, read_torchrun
from gapless.errors import ConfigError, RankError
from gapless.models.registry import read_model_info
from gapless.parallel.collectives import forget_group, register_group
from gapless.parallel.group import RankGroup
from gapless.parallel.shard import Shard
from gapless.parallel.wire import accept_ranks, connect_to_first
from gapless.parallel.workers import StartProcess, Workers, start_interpreter

if TYPE_CHECKING:
    from gapless.engine.build import OpenedEngine, Progress

start_rank: StartProcess = partial(start_interpreter, "gapless.engine.rank_worker:main")
"""Starts the process of another rank."""
_MEET_S = 120.0
"""Ranks that have all said they are there have met by then, or never will."""

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
        workers.send(start)
        workers.receive()
        torch_device = _device(device_type, local_rank)
        group = _join(store, 0, config, torch_device)
        workers.on_failure(group.fail)
        opened = open_one(config, torch_device=torch_device, group=group, progress=progress)
        group.agree()
    except BaseException as error:
        failure = workers.failure
        workers.fail(RankError(f"rank 0 failed: {error}"))
        workers.close()
        if group is not None:
            group.fail(RankError(str(error)))
            group.close()
            forget_group(group)
        if failure is not None and isinstance(error, RankError):
            raise failure from None
        raise
    assert not isinstance(opened.runner, ParallelRunner)
    return replace(opened, runner=ParallelRunner(opened.runner, workers, group))


def join_local(start: StartRank, rank: int) -> tuple[RankGroup, torch.device]:
    """Group and device of a rank that was started by the first one, on its machine."""
    store = dist.TCPStore("127.0.0.1", start.port, is_master=False)
    torch_device = _device(start.config.device, rank)
    return _join(store, rank, start.config, torch_device), torch_device


def _join(store: dist.Store, rank: int, config: EngineConfig, torch_device: torch.device) -> RankGroup:
    store.set_timeout(timedelta(seconds=_MEET_S))
    group = RankGroup(
        store,
        rank=rank,
        size=config.tensor_parallel_size,
        torch_device=torch_device,
        break_at_all_reduce=config.break_at_all_reduce,
    )
    register_group(group)
    if torch_device.type == "cuda":
        group.find_one_shot()
    return group


def _meet_under_torchrun(
    torchrun: TorchrunRank, config: EngineConfig, device_type: str
) -> tuple[Workers, dist.Store]:
    """The other ranks, for the first one. On the others: serve it, then leave."""
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
    info = read_model_info(config.model, shard=Shard(rank=0, size=size))
    if info.is_multimodal:
        raise ConfigError(
            f"--tensor-parallel-size={size}: models that take images run on one GPU only; give 1"
        )


def _device(device_type: str, local_rank: int) -> torch.device:
    if device_type != "cuda":
        return torch.device(device_type)
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)

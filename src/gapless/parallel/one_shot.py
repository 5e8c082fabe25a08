"""Sums of small tensors over ranks in one kernel that reads every rank's memory (torch's symmetric memory).

NCCL takes several hops of a ring; for the few kilobytes of a decode step it is quicker that each rank reads
all others' values itself. What it costs depends on the machine, so the largest message it serves is measured
at start-up, inside graphs, as a step will run it. Invariants: the values of a step are copied into a buffer
whose address all ranks know, so no captured tensor needs to be registered; the order of summation is the same
on all ranks, so their results are the same bits; a reducer that is not there, or that disagrees with NCCL in
its first sums, is not used, and ``why_not`` says so. NVLink multicast is never used.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gapless.parallel.exchange import ExchangeGroup

logger = logging.getLogger(__name__)

MAX_BYTES = 512 * 1024
"""Beyond this NCCL is quicker on every machine known."""
_NUMBERS_OF_RANKS = (2, 4, 8)
"""For others torch's kernel adds in another order on each rank, and so to other bits."""
_ALIGNMENT = 16
_DTYPES = (torch.float32, torch.bfloat16)
"""What the kernel adds."""
_NUM_RELEASES = 1000
"""A step holds a few hundred sums that wait one after the other."""
_NUM_SUMS, _NUM_REPEATS = 20, 5


class OneShotReducer:
    """Sums up to ``max_bytes`` of the ranks of ``group``, whose every member makes one at the same time;
    ``control`` is a group of the same ranks for the CPU.

    Raises ``RuntimeError`` where the machine or this torch has no symmetric memory.
    """

    def __init__(
        self, group: Any, control: Any, torch_device: torch.device, *, max_bytes: int = MAX_BYTES
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        ops = torch.ops.symm_mem
        if group.size() not in _NUMBERS_OF_RANKS:
            raise RuntimeError(f"sums of {group.size()} ranks would differ between them")
        if not hasattr(ops, "one_shot_all_reduce_out"):
            raise RuntimeError("this torch has no one-shot sum")
        self.max_bytes = max_bytes
        self._exchange = ExchangeGroup(group, control)
        self._group_name = self._exchange.name
        self._buffer = symmetric_memory.empty(max_bytes, dtype=torch.uint8, device=torch_device)
        self._memory = symmetric_memory.rendezvous(self._buffer, group=self._group_name)
        self._sum = ops.one_shot_all_reduce_out

    def release_waiting(self) -> None:
        """A rank is gone: let a kernel that waits for its signal go on, so that the device becomes idle. What
        it leaves behind is wrong; nobody may use it. Called from another thread than the steps'."""
        rank, size = self._memory.rank, self._memory.world_size
        with torch.cuda.stream(torch.cuda.Stream(self._buffer.device)):
            pads = [self._memory.get_signal_pad(peer) for peer in range(size)]
            for _ in range(_NUM_RELEASES):
                for peer, pad in enumerate(pads):
                    pad.fill_(int(peer == rank))  # ours: signalled; theirs: free to be signalled

    def serves(self, values: Tensor) -> bool:
        """Whether this sum is for the one kernel."""
        return (
            0 < values.nbytes <= self.max_bytes
            and values.nbytes % _ALIGNMENT == 0
            and values.data_ptr() % _ALIGNMENT == 0
            and values.dtype in _DTYPES
            and values.is_contiguous()
        )

    def all_reduce(self, values: Tensor) -> None:
        """Sum in place, on the current stream."""
        shared = self._buffer[: values.nbytes].view(values.dtype).view(values.shape)
        # torch could copy in the kernel itself (``one_shot_all_reduce_copy_out``), but there the first
        # threads of a block signal the other ranks when they have written their own part: no
        # ``__syncthreads`` waits for the rest of the block in between.
        shared.copy_(values)
        self._sum(shared, "sum", self._group_name, values)


def find_one_shot(
    group: Any,
    control: Any,
    torch_device: torch.device,
    *,
    agree: Callable[[bool], bool],
    from_first: Callable[[int], int],
) -> tuple[OneShotReducer | None, str]:
    """A reducer with its ``max_bytes`` measured, or None; and one line about why.

    Every rank calls it at the same time and gets the same answer: ``agree`` is true where all are,
    ``from_first`` is rank 0's number. ``control``: as in ``OneShotReducer``.
    """
    reducer, reason = None, ""
    try:
        reducer = OneShotReducer(group, control, torch_device)
    except (RuntimeError, ImportError, AttributeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
    if not agree(reducer is not None) or reducer is None:
        return None, f"NCCL only: no symmetric memory ({reason or 'on another rank'})"
    if not agree(_is_right(reducer, group, torch_device)):
        return None, "NCCL only: one-shot sums differ from NCCL's"
    fastest = 0
    size = 4096
    while size <= MAX_BYTES:
        values = torch.zeros(size // 2, dtype=torch.bfloat16, device=torch_device)
        one_shot_s = _seconds(partial(reducer.all_reduce, values), agree)
        nccl_s = _seconds(partial(dist.all_reduce, values, group=group), agree)
        if one_shot_s < nccl_s:
            fastest = size
        size *= 2
    reducer.max_bytes = from_first(fastest)
    if not reducer.max_bytes:
        return None, "NCCL only: faster at every size that was measured"
    return reducer, f"one kernel up to {reducer.max_bytes} bytes, NCCL above"


def _is_right(reducer: OneShotReducer, group: Any, torch_device: torch.device) -> bool:
    """Whether sums of a few sizes equal NCCL's, twice in a row (the buffer is used again)."""
    generator = torch.Generator(device=torch_device).manual_seed(dist.get_rank())
    is_right = True  # to the end in any case: other ranks, to whom all looks well, wait for this one
    for size in (64, 4096, MAX_BYTES // 4):
        for _ in range(2):
            values = torch.randn(size, device=torch_device, generator=generator)
            wanted, found = values.clone(), values.clone()
            dist.all_reduce(wanted, group=group)
            reducer.all_reduce(found)
            is_right &= torch.allclose(wanted, found, rtol=1e-5, atol=1e-5)
    return is_right


def _seconds(run: Callable[[], object], agree: Callable[[bool], bool]) -> float:
    """Of one call, as a node of a graph that all ranks replay at the same time; infinite where a rank cannot
    capture it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = _captured(run, stream)
        if not agree(graph is not None) or graph is None:
            return math.inf
        seconds = []
        for _ in range(_NUM_REPEATS):
            agree(True)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1000 / _NUM_SUMS)
        graph.reset()
    return statistics.median(seconds)


def _captured(run: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph | None:
    """``_NUM_SUMS`` calls of ``run``; None where that does not work."""
    run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(_NUM_SUMS):
                run()
        finally:
            graph.capture_end()
    except RuntimeError as error:
        logger.info("sums cannot be timed in a graph: %s", error)
        return None
    return graph

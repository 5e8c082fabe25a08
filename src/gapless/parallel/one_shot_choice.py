"""Which sums over ranks go through one kernel, and which through NCCL: found out at start-up.

What a sum costs depends on the machine, so both ways are measured with the norm behind, inside graphs, as a
step will run them. Invariants: all ranks decide alike; a reducer that is not there, or that disagrees with
NCCL in its first sums, is not used, and the reason is reported. Read ``one_shot.py`` for the reducer.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gapless.kernels.launch import can_compile_ahead, compiling_ahead
from gapless.kernels.norm import add_rms_norm_into
from gapless.parallel.one_shot import MAX_ROWS, NUM_HALVES, OneShotReducer, open_mailbox
from gapless.parallel.rank_reducer import RankReducer

logger = logging.getLogger(__name__)

SIZE = 4096
"""Elements of a row of bfloat16, when the two ways are compared."""
_NUM_SUMS, _NUM_REPEATS = 20, 5


def find_one_shot(
    group: Any,
    control: Any,
    torch_device: torch.device,
    *,
    agree: Callable[[bool], bool],
    from_first: Callable[[int], int],
    on_open: Callable[[OneShotReducer], object],
) -> tuple[OneShotReducer | None, str]:
    """A reducer with its ``max_bytes`` measured, or None; and one line about why.

    Every rank calls it at the same time and gets the same answer: ``agree`` is true where all are,
    ``from_first`` is rank 0's number. ``control``: as in ``open_mailbox``. ``on_open`` is given the reducer
    before anything is launched that waits for other ranks, so that it can be released when one is lost.
    """
    reducer, reason = None, ""
    try:
        reducer = OneShotReducer(open_mailbox(group, control, torch_device))
    except Exception as error:  # of a machine, or of another torch: NCCL is there in any case
        reason = in_one_line(error)
    if not agree(reducer is not None) or reducer is None:
        return None, f"NCCL only: no symmetric memory ({reason or 'on another rank'})"
    on_open(reducer)
    compile_first(reducer, torch_device)
    if (problem := cannot_launch(reducer, reducer.release_waiting, torch_device, agree)) is not None:
        return None, f"NCCL only: one-shot sums cannot be launched ({problem})"
    if not agree(is_right(reducer, group, torch_device, (1, 3, MAX_ROWS))):
        return None, "NCCL only: one-shot sums differ from NCCL's"
    numbers_of_rows = [2**power for power in range(MAX_ROWS.bit_length())]
    fastest = largest_quicker(reducer, group, torch_device, numbers_of_rows, agree)
    reducer.max_bytes = from_first(fastest)
    if not reducer.max_bytes:
        return None, "NCCL only: faster at every size that was measured"
    return reducer, f"one kernel up to {reducer.max_bytes} bytes, NCCL above"


def largest_quicker(
    reducer: RankReducer,
    group: Any,
    torch_device: torch.device,
    numbers_of_rows: Iterable[int],
    agree: Callable[[bool], bool],
) -> int:
    """Bytes of the largest of such sums, with a norm behind, that takes the one kernel less time than NCCL;
    0 if none does."""
    fastest = 0
    weight_E = torch.ones(SIZE, dtype=torch.bfloat16, device=torch_device)
    for num_rows in numbers_of_rows:
        values_TE = torch.zeros(num_rows, SIZE, dtype=torch.bfloat16, device=torch_device)
        out = (torch.empty_like(values_TE), torch.empty_like(values_TE))
        args = (values_TE, torch.zeros_like(values_TE), weight_E, 1e-5, *out)
        ours_s = seconds_of_call(partial(reducer.sum_add_rms_norm, *args), agree)
        nccl_s = seconds_of_call(partial(by_nccl, *args, group=group), agree)
        if ours_s < nccl_s:
            fastest = values_TE.nbytes
    return fastest


def compile_first(reducer: RankReducer, torch_device: torch.device) -> None:
    """What is launched below, side by side."""
    if not can_compile_ahead(torch_device):
        return
    row = torch.zeros(1, SIZE, dtype=torch.bfloat16, device=torch_device)
    with compiling_ahead():
        for launch in _first_launches(reducer, torch_device):
            launch()
        add_rms_norm_into(row, row, row[0], 1e-5, torch.empty_like(row), torch.empty_like(row))


def cannot_launch(
    reducer: RankReducer,
    release_waiting: Callable[[], None],
    torch_device: torch.device,
    agree: Callable[[bool], bool],
) -> str | None:
    """Why some rank cannot launch one of the kernels, or None. They are launched one after the other, before
    NCCL is asked for anything: where one rank cannot, kernels of the others wait for it, and are released."""
    for launch in _first_launches(reducer, torch_device):
        problem = None
        try:
            launch()
        except Exception as error:  # of Triton, whose errors have no class in common
            problem = in_one_line(error)
        if not agree(problem is None):
            release_waiting()
            if torch_device.type == "cuda":
                torch.cuda.synchronize(torch_device)
            return problem or "on another rank"
    return None


def _first_launches(reducer: RankReducer, torch_device: torch.device) -> list[Callable[[], None]]:
    rows = torch.zeros(5, SIZE, dtype=torch.bfloat16, device=torch_device)[:, None]
    with_norm = (rows[0], rows[1], rows[2][0], 1e-5, rows[3], rows[4])
    return [lambda: reducer.all_reduce(rows[0]), lambda: reducer.sum_add_rms_norm(*with_norm)]


def in_one_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def by_nccl(partial_TE: Tensor, *others: Any, group: Any) -> None:
    dist.all_reduce(partial_TE, group=group)
    add_rms_norm_into(partial_TE, *others)


def is_right(
    reducer: RankReducer, group: Any, torch_device: torch.device, numbers_of_rows: Iterable[int]
) -> bool:
    """Whether sums of such sizes equal NCCL's, each in both halves of the memory, alone and with a norm."""
    generator = torch.Generator(device=torch_device).manual_seed(dist.get_rank())
    weight_E = torch.ones(SIZE, dtype=torch.bfloat16, device=torch_device)
    is_right = True  # to the end in any case: other ranks, to whom all looks well, wait for this one
    for num_rows in numbers_of_rows:
        for _ in range(NUM_HALVES):
            shape = (num_rows, SIZE)
            # Whole numbers, whose sums are exact in any order.
            values_TE = torch.randint(-8, 8, shape, device=torch_device, generator=generator).bfloat16()
            wanted, found, residual_TE = values_TE.clone(), values_TE.clone(), torch.ones_like(values_TE)
            dist.all_reduce(wanted, group=group)
            reducer.all_reduce(found)
            is_right &= torch.equal(wanted, found)
            one, two = [[torch.empty_like(values_TE) for _ in range(2)] for _ in range(2)]
            reducer.sum_add_rms_norm(values_TE, residual_TE, weight_E, 1e-5, *one)
            add_rms_norm_into(wanted, residual_TE, weight_E, 1e-5, *two)
            is_right &= torch.equal(one[0], two[0]) and torch.allclose(one[1], two[1], rtol=0.02, atol=1e-3)
    return is_right


def seconds_of_call(run: Callable[[], object], agree: Callable[[bool], bool]) -> float:
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

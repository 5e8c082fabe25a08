"""Ranks as processes that share memory, for kernels that sum over ranks under the interpreter: they really
wait for one another."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def run_ranks(
    num_ranks: int,
    num_words: int,
    work: Callable[[Tensor, list[int], int], Any],
    folder: Path,
    *,
    gone: Sequence[int] = (),
) -> list[Any]:
    """What ``work(words, addresses, rank)`` gave on each rank; ranks that are ``gone`` never call anything.
    ``words`` are zeros (int64) that all ranks can write to, which begin at ``addresses``."""
    words = [torch.zeros(num_words, dtype=torch.int64) for _ in range(num_ranks)]
    for one in words:
        one.share_memory_()  # at the same address in each process that is forked now

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        torch.save(work(words[rank], [one.data_ptr() for one in words], rank), folder / f"{rank}.pt")

    context = multiprocessing.get_context("fork")
    present = [rank for rank in range(num_ranks) if rank not in gone]
    processes = [context.Process(target=run, args=(rank,), daemon=True) for rank in present]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 100
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    stuck = [process for process in processes if process.exitcode is None]
    for process in stuck:
        process.kill()
    assert not stuck, "ranks wait for ever"
    assert [process.exitcode for process in processes] == [0] * len(present)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in present]


def values_of(rank: int, number: int, num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return (torch.randn(num_rows, size, generator=generator) * 3).to(dtype)


def residual_and_weight(number: int, num_rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same on all ranks. Rows of the residual lie apart."""
    wide = values_of(100, number, num_rows, 2 * size, dtype)
    return wide[:, :size], values_of(101, number, 1, size, dtype)[0]

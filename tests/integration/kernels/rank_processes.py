"""Ranks as processes that share memory, for kernels that sum over ranks under the interpreter: they really
wait for one another."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from gapless.kernels.norm import fused_add_rms_norm
from gapless.parallel.rank_reducer import RankReducer
from kernel_oracles import assert_close_to

EPS = 1e-5
Rounds = Sequence[tuple[int, int, bool]]
"""Rows, size, and whether with a norm: the same on all ranks."""


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


def make_sums(reducer: RankReducer, rank: int, rounds: Rounds, dtype: torch.dtype) -> list[Tensor]:
    """What this rank gets from the sums of ``rounds``, now and then late to begin one and, at a program's
    barriers, to go on: between its sending and its receiving, so the others may be one call ahead by then."""
    found, own = [], random.Random(rank)
    # Of this process only.
    InterpreterBuilder.create_barrier = lambda builder: time.sleep(own.choice((0.0, 0.0, 0.02)))
    for number, (num_rows, size, has_norm) in enumerate(rounds):
        if rank == number % 5:
            time.sleep(0.02)
        values = values_of(rank, number, num_rows, size, dtype)
        assert reducer.serves(values)
        if not has_norm:
            reducer.all_reduce(values)
            found.append(values)
            continue
        residual, weight = residual_and_weight(number, num_rows, size, dtype)
        before = values.clone()
        out = [torch.full((num_rows, size), float("nan"), dtype=dtype) for _ in range(2)]
        reducer.sum_add_rms_norm(values, residual, weight, EPS, out[0], out[1])
        assert torch.equal(values, before)
        found += out
    return found


def check_sums(results: list[list[Tensor]], rounds: Rounds, dtype: torch.dtype) -> None:
    """``results`` of ``make_sums``, a rank each: the same bits everywhere, and the sums of all ranks."""
    for other in results[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(other, results[0], strict=True))
    found = iter(results[0])
    for number, (num_rows, size, has_norm) in enumerate(rounds):
        parts = [values_of(rank, number, num_rows, size, dtype) for rank in range(len(results))]
        in_order = parts[0].float()
        for part in parts[1:]:
            in_order = in_order + part.float()
        total = in_order.to(dtype)
        assert_close_to(total, sum(part.double() for part in parts).to(dtype))
        if has_norm:
            residual, weight = residual_and_weight(number, num_rows, size, dtype)
            wanted = fused_add_rms_norm(total, residual, weight, EPS)
            assert torch.equal(next(found), wanted[0]), "the residual stream is that of two kernels"
            assert_close_to(next(found), wanted[1])
        else:
            assert torch.equal(next(found), total)

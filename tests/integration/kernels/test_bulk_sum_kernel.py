"""The kernel that sums many rows over ranks, interpreted: ranks are processes, which really wait for one
another in memory that they share."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch
from rank_processes import EPS, check_sums, make_sums, residual_and_weight, values_of
from torch import Tensor

from gapless.kernels.norm import fused_add_rms_norm
from gapless.parallel import bulk_sum
from gapless.parallel.bulk_sum import BulkReducer, Inbox
from gapless.parallel.one_shot import Mailbox, OneShotReducer
from kernel_oracles import DTYPES, assert_close_to

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with two GPUs tests/gpu covers the compiled kernel"
)

NUM_ROUNDS = 16
PROGRAMS = 3
Work = Callable[[BulkReducer, int], Any]


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_sum, "_MEMORY_BYTES", 48 * 1024)
    bulk_sum._constants.cache_clear()


def run_ranks(num_ranks: int, work: Work, folder: Path, *, gone: Sequence[int] = ()) -> list[Any]:
    """What ``work(reducer, rank)`` gave on each rank."""

    def with_reducer(words: Tensor, addresses: list[int], rank: int) -> Any:
        released = torch.zeros(1, dtype=torch.int32)
        inbox = Inbox.of_words(words, addresses, rank=rank, num_programs=PROGRAMS, released=released)
        return work(BulkReducer(inbox), rank)

    num_words = Inbox.num_words(num_ranks, PROGRAMS)
    return rank_processes.run_ranks(num_ranks, num_words, with_reducer, folder, gone=gone)


def shapes(seed: int, sizes: Sequence[int]) -> list[tuple[int, int, bool]]:
    """``(rows, size, with norm)`` of each round: fewer rows than programs, as many, more, and uneven."""
    draw = random.Random(seed)
    return [
        (draw.choice((1, 2, 3, 4, 7, 12)), draw.choice(sizes), draw.random() < 0.6) for _ in range(NUM_ROUNDS)
    ]


@pytest.mark.parametrize(("num_ranks", "dtype"), [(2, dtype) for dtype in DTYPES] + [(3, torch.bfloat16)])
def test_sums_of_many_rounds_are_right_and_the_same_bits_everywhere(
    num_ranks: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    # All are multiples of 16 bytes; in float32 not all of 8 elements.
    rounds = shapes(num_ranks, (16, 24, 96, 64) if dtype.itemsize == 2 else (4, 12, 96, 20))

    def work(reducer: BulkReducer, rank: int) -> list[Tensor]:
        return make_sums(reducer, rank, rounds, dtype)

    check_sums(run_ranks(num_ranks, work, tmp_path), rounds, dtype)


def test_a_rank_that_is_gone_is_not_waited_for_after_the_release(tmp_path: Path) -> None:
    def work(reducer: BulkReducer, rank: int) -> bool:
        reducer._inbox.released.fill_(1)
        for _ in range(3):
            reducer.all_reduce(torch.ones(5, 16))
        return True

    assert run_ranks(2, work, tmp_path, gone=[1]) == [True]


def test_every_program_counts_every_call_and_counters_may_run_over(tmp_path: Path) -> None:
    """A flag of the next call may come before one that is waited for was seen, also where numbers wrap."""

    def work(reducer: BulkReducer, rank: int) -> tuple[list[float], list[int]]:
        reducer._inbox.epochs_P.fill_(2**31 - 3)
        reducer._inbox.flags.fill_(2**31 - 3)
        found = []
        time.sleep(0.5)  # both have set their counters
        for number in range(6):
            values = torch.full((1 + 3 * (number % 2), 16), float(number + rank))
            reducer.all_reduce(values)
            found.append(values.mean().item())
        return found, reducer._inbox.epochs_P.tolist()

    wanted = ([1.0, 3.0, 5.0, 7.0, 9.0, 11.0], [-(2**31) + 3] * PROGRAMS)
    assert run_ranks(2, work, tmp_path) == [wanted] * 2


def test_what_one_kernel_can_sum() -> None:
    words = torch.zeros(Inbox.num_words(2, PROGRAMS), dtype=torch.int64)
    released = torch.zeros(1, dtype=torch.int32)
    inbox = Inbox.of_words(words, [0, 0], rank=0, num_programs=PROGRAMS, released=released)
    room = inbox.region_bytes // (16 * 4)
    reducer = BulkReducer(inbox)
    assert reducer.serves(torch.ones(PROGRAMS * room, 16))
    assert not reducer.serves(torch.ones(PROGRAMS * room + 1, 16)), "the first program has one row more"
    assert not reducer.serves(torch.ones(0, 16))
    assert not reducer.serves(torch.ones(4, 3))
    assert not reducer.serves(torch.ones(4, 16, dtype=torch.float64))
    assert not reducer.serves(torch.ones(8, 32)[:, :16])
    assert not BulkReducer(inbox, max_bytes=256).serves(torch.ones(5, 16))
    assert inbox.flags.numel() >= PROGRAMS
    assert inbox.rows.numel() * 8 == 2 * PROGRAMS * inbox.region_bytes


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_memory_is_divided_among_halves_sources_and_programs(size: int, monkeypatch) -> None:
    monkeypatch.undo()
    num_programs = bulk_sum.MAX_PROGRAMS
    per_program = bulk_sum.region_bytes(size, num_programs)
    assert per_program % 16 == 0
    assert 2 * (size - 1) * num_programs * per_program <= 64 * 1024 * 1024
    assert Inbox.num_words(size, num_programs) * 8 < 65 * 1024 * 1024
    assert per_program >= 16 * 1024, "a row of any length that is served"


def test_dtypes_ranks_kernels_and_aliases_in_turn(tmp_path: Path) -> None:
    """Both kernels keep their own count; what is summed may be overwritten with either result."""
    draw = random.Random(4)
    forms = [(torch.float32, 12), (torch.bfloat16, 24), (torch.float16, 8), (torch.float32, 4)]
    ways = ("sum", "sum is partial", "sum is residual", "normed is partial", "normed is residual")
    rounds = [(draw.choice(forms), draw.choice((1, 3, 7)), way, draw.random() < 0.4) for way in ways * 3]
    num_ranks, num_words = 4, Inbox.num_words(4, PROGRAMS)

    def work(words: Tensor, addresses: list[int], rank: int) -> list[Tensor]:
        released = torch.zeros(1, dtype=torch.int32)
        where = {"rank": rank, "num_programs": PROGRAMS, "released": released}
        behind = [address + num_words * 8 for address in addresses]
        few = OneShotReducer(Mailbox.of_words(words[num_words:], behind, rank=rank))
        many = BulkReducer(Inbox.of_words(words[:num_words], addresses, **where))
        found = []
        for number, ((dtype, size), num_rows, way, is_few) in enumerate(rounds):
            reducer = few if is_few else many
            values = values_of(rank, number, num_rows, size, dtype)
            assert reducer.serves(values)
            residual, weight = residual_and_weight(number, num_rows, size, dtype)
            residual = residual.contiguous()
            by_name = {"partial": values, "residual": residual}
            out = {"sum": torch.empty_like(values), "normed": torch.empty_like(values)}
            if way != "sum":
                out[way.split()[0]] = by_name[way.split()[-1]]
            reducer.sum_add_rms_norm(values, residual, weight, EPS, out["sum"], out["normed"])
            found += [out["sum"], out["normed"]]
        return found

    results = rank_processes.run_ranks(num_ranks, num_words + Mailbox.num_words(num_ranks), work, tmp_path)
    for number, ((dtype, size), num_rows, way, _) in enumerate(rounds):
        total = torch.zeros(num_rows, size)
        for rank in range(num_ranks):
            total += values_of(rank, number, num_rows, size, dtype).float()
        residual, weight = residual_and_weight(number, num_rows, size, dtype)
        wanted = fused_add_rms_norm(total.to(dtype), residual, weight, EPS)
        for found in results:
            assert torch.equal(found[2 * number], wanted[0]), way
            assert_close_to(found[2 * number + 1], wanted[1])

"""The kernel that sums over ranks, interpreted: ranks are processes, which really wait for one another in
memory that they share."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch
from rank_processes import check_sums, make_sums
from torch import Tensor

from gapless.parallel import one_shot
from gapless.parallel.one_shot import Mailbox, OneShotReducer
from kernel_oracles import DTYPES

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with two GPUs tests/gpu covers the compiled kernel"
)

NUM_ROUNDS = 24
Work = Callable[[OneShotReducer, int], Any]


def run_ranks(num_ranks: int, work: Work, folder: Path, *, gone: Sequence[int] = ()) -> list[Any]:
    """What ``work(reducer, rank)`` gave on each rank."""

    def with_reducer(words: Tensor, addresses: list[int], rank: int) -> Any:
        return work(OneShotReducer(Mailbox.of_words(words, addresses, rank=rank)), rank)

    num_words = Mailbox.num_words(num_ranks)
    return rank_processes.run_ranks(num_ranks, num_words, with_reducer, folder, gone=gone)


def shapes(seed: int) -> list[tuple[int, int, bool]]:
    """``(rows, size, with norm)`` of each round: the same on all ranks, and always another."""
    draw = random.Random(seed)
    sizes = (16, 24, 96, 64)
    return [(draw.choice((1, 2, 3, 5)), draw.choice(sizes), draw.random() < 0.6) for _ in range(NUM_ROUNDS)]


@pytest.mark.parametrize(("num_ranks", "dtype"), [(2, dtype) for dtype in DTYPES] + [(3, torch.bfloat16)])
def test_sums_of_many_rounds_are_right_and_the_same_bits_everywhere(
    num_ranks: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    rounds = shapes(num_ranks)

    def work(reducer: OneShotReducer, rank: int) -> list[Tensor]:
        return make_sums(reducer, rank, rounds, dtype)

    check_sums(run_ranks(num_ranks, work, tmp_path), rounds, dtype)


def test_a_rank_that_is_gone_is_not_waited_for_after_the_release(tmp_path: Path) -> None:
    def work(reducer: OneShotReducer, rank: int) -> bool:
        reducer.release_waiting()
        for _ in range(3):
            reducer.all_reduce(torch.ones(2, 16))
        return True

    assert run_ranks(2, work, tmp_path, gone=[1]) == [True]


def test_each_program_counts_its_own_calls(tmp_path: Path) -> None:
    """A program that has no row in a call must not count it; nor may the halves depend on other programs."""

    def work(reducer: OneShotReducer, rank: int) -> Tensor:
        for num_rows in (1, 3, 1, 2):
            reducer.all_reduce(torch.ones(num_rows, 16))
        return reducer._mailbox.epochs_T[:4].clone()

    for counted in run_ranks(2, work, tmp_path):
        assert counted.tolist() == [4, 2, 1, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_no_numbers_are_bits_like_others(dtype: torch.dtype, tmp_path: Path) -> None:
    """Of all patterns none means that a word has not come. Twice as often as there are halves."""
    inf, nan = float("inf"), float("nan")
    parts = [[inf, nan, 1.0, -0.0, -inf, inf, 0.0, 6e4], [1.0, 2.0, nan, -0.0, -inf, -inf, nan, 6e4]]
    largest = torch.tensor([6e4], dtype=dtype).float().item() * 2  # infinite in float16
    wanted = torch.tensor([inf, nan, nan, 0.0, -inf, nan, nan, largest]).to(dtype)

    def work(reducer: OneShotReducer, rank: int) -> list[Tensor]:
        found = [torch.tensor(parts[rank], dtype=dtype).repeat(2, 2) for _ in range(4)]
        for values in found:
            reducer.all_reduce(values)
        return found

    for found in run_ranks(2, work, tmp_path):
        for values in found:
            torch.testing.assert_close(values, wanted.repeat(2, 2), rtol=0, atol=0, equal_nan=True)


def test_epochs_may_run_over(tmp_path: Path) -> None:
    def work(reducer: OneShotReducer, rank: int) -> list[float]:
        reducer._mailbox.epochs_T.fill_(2**31 - 3)
        found = []
        for number in range(6):
            values = torch.full((1, 16), float(number + rank))
            reducer.all_reduce(values)
            found.append(values.mean().item())
        return found

    assert run_ranks(2, work, tmp_path) == [[1.0, 3.0, 5.0, 7.0, 9.0, 11.0]] * 2


@pytest.mark.parametrize(
    ("values", "is_served"),
    [
        (torch.ones(2, 64), True),
        (torch.ones(64, dtype=torch.bfloat16), True),
        (torch.ones(64, dtype=torch.float16), True),
        (torch.ones(64, dtype=torch.float64), False),
        (torch.ones(2, 129), False),
        (torch.ones(3), False),
        (torch.ones(0, 64), False),
        (torch.ones(8, 16)[:, :8], False),
        (torch.ones(68)[1:65], False),
        (torch.ones(1, one_shot.MAX_ROW_BYTES // 4 + 4), False),
        (torch.ones(one_shot.MAX_ROWS, 4), True),
        (torch.ones(one_shot.MAX_ROWS + 1, 4), False),
    ],
    ids=["float32", "bfloat16", "float16", "another dtype", "too large", "odd row", "empty", "strided",
         "unaligned", "long row", "all rows", "too many rows"],
)  # fmt: skip
def test_what_one_kernel_can_sum(values: Tensor, is_served: bool) -> None:
    reducer = object.__new__(OneShotReducer)
    reducer.max_bytes = 1024 if values.shape != (1, one_shot.MAX_ROW_BYTES // 4 + 4) else one_shot.MAX_BYTES
    if values.ndim == 2 and values.shape[0] >= one_shot.MAX_ROWS:
        reducer.max_bytes = one_shot.MAX_BYTES
    assert reducer.serves(values) is is_served

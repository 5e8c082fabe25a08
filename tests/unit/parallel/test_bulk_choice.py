"""Up to which size sums of many rows go through one kernel, and what is left behind where they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gapless.parallel import bulk_choice, one_shot_choice
from gapless.parallel.bulk_choice import find_bulk
from gapless.parallel.bulk_sum import BulkReducer, Inbox
from gapless.parallel.one_shot import Mailbox, OneShotReducer

CPU = torch.device("cpu")
FEW_BYTES = 1024 * 1024
Found = tuple[BulkReducer | None, str]


def _fails(*_: Any) -> Any:
    raise RuntimeError("out of registers\nlong story")


@pytest.fixture
def few() -> OneShotReducer:
    return OneShotReducer(Mailbox.of_words(torch.zeros(1, dtype=torch.int64), [0, 0], rank=0))


@pytest.fixture
def find(few: OneShotReducer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Found]:
    def find(
        *,
        num_ranks: int = 2,
        num_multiprocessors: int = 132,
        faster: Callable[[int], bool] = lambda num_rows: True,
        launches: tuple[Callable[[], Any], ...] = (),
        is_right: bool = True,
        agree: Callable[[bool], bool] = lambda is_well: is_well,
        from_first: Callable[[int], int] = lambda value: value,
        has_memory: bool = True,
    ) -> Found:
        def open_inbox(*where: Any) -> Inbox:
            words, released = torch.zeros(1, dtype=torch.int64), where[-1].released
            where_it_is = {"rank": 0, "num_programs": where[-2], "released": released}
            return Inbox.of_words(words, [0] * num_ranks, **where_it_is)

        def seconds(call: Any, agree: Any) -> float:
            is_ours = call.func is not one_shot_choice.by_nccl
            return 1.0 if is_ours == faster(call.args[0].shape[0]) else 2.0

        properties = SimpleNamespace(multi_processor_count=num_multiprocessors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(bulk_choice, "_open", open_inbox if has_memory else _fails)
        monkeypatch.setattr(bulk_choice, "is_right", lambda *_: is_right)
        monkeypatch.setattr(one_shot_choice, "seconds_of_call", seconds)
        monkeypatch.setattr(one_shot_choice, "_first_launches", lambda *_: launches)
        few.max_bytes = FEW_BYTES
        return find_bulk(None, None, CPU, few=few, agree=agree, from_first=from_first)

    return find


@pytest.mark.parametrize(
    ("num_ranks", "num_multiprocessors", "num_rows"),
    [(2, 132, 4096), (2, 114, 1024), (4, 132, 1024), (8, 132, 256)],
)
def test_the_largest_sum_that_fits_and_was_faster_is_the_limit(
    find: Callable[..., Found], num_ranks: int, num_multiprocessors: int, num_rows: int
) -> None:
    reducer, above = find(num_ranks=num_ranks, num_multiprocessors=num_multiprocessors)
    assert reducer is not None
    assert reducer.max_bytes == num_rows * 8192
    assert above == f"another up to {reducer.max_bytes}, NCCL above"
    slower, _ = find(num_ranks=2, faster=lambda num_rows: num_rows <= 256)
    assert slower is not None
    assert slower.max_bytes == 256 * 8192


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"from_first": lambda value: value + 1}, "NCCL above (the GPUs differ)"),
        ({"has_memory": False}, "NCCL above (out of registers)"),
        ({"launches": [_fails]}, "NCCL above (out of registers)"),
        ({"is_right": False}, "NCCL above (sums of many rows differ from NCCL's)"),
        ({"faster": lambda num_rows: False}, "NCCL above"),
    ],
    ids=["other GPUs", "no memory", "no launch", "wrong", "slower"],
)
def test_why_nccl_has_the_rest(find: Callable[..., Found], others: dict[str, Any], why: str) -> None:
    assert find(**others, agree=bool) == (None, why)


def test_sums_of_few_rows_wait_again_where_those_of_many_cannot_be_launched(
    find: Callable[..., Found], few: OneShotReducer
) -> None:
    """What ended the wait for a rank that could not launch would end theirs too, and they would be wrong."""
    answers: Iterator[bool] = iter([True, True, False, True])  # GPUs, memory, a launch, all are there still
    waiting: list[int] = []

    def agree(is_well: bool) -> bool:
        waiting.append(int(few.released))
        return next(answers)

    found = find(launches=[lambda: None], agree=agree)
    assert found == (None, "NCCL above (on another rank)")
    assert not few.released.any()
    assert waiting == [0, 0, 0, 0]
    assert next(answers, None) is None, "a rank that was lost meanwhile is noticed"

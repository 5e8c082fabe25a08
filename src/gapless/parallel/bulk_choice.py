"""Whether sums of many rows over ranks go through one kernel of ours, and up to which size: found out at
start-up, after the same has been found out for few rows.

Invariants and measurements as in ``one_shot_choice.py``: all ranks decide alike, and a reducer that is not
there, or that disagrees with NCCL in its first sums, is not used. Read ``bulk_sum.py`` for the reducer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gapless.parallel.bulk_sum import MAX_PROGRAMS, BulkReducer, Inbox
from gapless.parallel.one_shot import OneShotReducer, open_memory
from gapless.parallel.one_shot_choice import (
    SIZE,
    cannot_launch,
    compile_first,
    in_one_line,
    is_right,
    largest_quicker,
)

NUM_ROWS = (256, 1024, 4096)
"""Of ``SIZE`` elements, when the two ways are compared."""
_CHECKED_ROWS = (3, 300, 4096)


def find_bulk(
    group: Any,
    control: Any,
    torch_device: torch.device,
    *,
    few: OneShotReducer,
    agree: Callable[[bool], bool],
    from_first: Callable[[int], int],
) -> tuple[BulkReducer | None, str]:
    """A reducer with its ``max_bytes`` measured, or None; and what to say of it behind "one kernel up to N
    bytes, ". Called by every rank at the same time, with what ``find_one_shot`` takes; ``few`` is what that
    has found, and releases kernels of both."""
    own = min(MAX_PROGRAMS, 2 * torch.cuda.get_device_properties(torch_device).multi_processor_count)
    num_programs = from_first(own)
    if not agree(num_programs <= own):
        return None, "NCCL above (the GPUs differ)"
    reducer, reason = None, ""
    try:
        reducer = BulkReducer(_open(group, control, torch_device, num_programs, few))
    except Exception as error:  # out of memory, say; NCCL is there in any case
        reason = in_one_line(error)
    if not agree(reducer is not None) or reducer is None:
        return None, f"NCCL above ({reason or 'no memory on another rank'})"
    compile_first(reducer, torch_device)
    if (problem := cannot_launch(reducer, few.release_waiting, torch_device, agree)) is not None:
        few.wait_again()  # or its sums would take what has not come
        # No kernel of another rank writes to this one any more; and where a rank was lost meanwhile, whose
        # release has just been undone, this raises.
        agree(True)
        return None, f"NCCL above ({problem})"
    checked = [rows for rows in _CHECKED_ROWS if _fits(reducer, rows)]
    if not agree(is_right(reducer, group, torch_device, checked)):
        return None, "NCCL above (sums of many rows differ from NCCL's)"
    timed = [rows for rows in NUM_ROWS if _fits(reducer, rows)]
    fastest = largest_quicker(reducer, group, torch_device, timed, agree)
    reducer.max_bytes = from_first(fastest)
    if reducer.max_bytes <= few.max_bytes:
        return None, "NCCL above"
    return reducer, f"another up to {reducer.max_bytes}, NCCL above"


def _open(
    group: Any, control: Any, torch_device: torch.device, num_programs: int, few: OneShotReducer
) -> Inbox:
    words, addresses, rank, handles = open_memory(
        group, control, torch_device, num_words=Inbox.num_words(group.size(), num_programs)
    )
    return Inbox.of_words(
        words, addresses, rank=rank, num_programs=num_programs, released=few.released, handles=handles
    )


def _fits(reducer: BulkReducer, num_rows: int) -> bool:
    return reducer.serves(torch.empty(num_rows, SIZE, dtype=torch.bfloat16))

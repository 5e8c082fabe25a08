"""Compiles the kernel that sums many rows over ranks for a Hopper GPU, without one; prints a line of JSON per
launch. Run by ``test_compiled_rank_sum.py`` in a process of its own, where Triton is not interpreting."""

from __future__ import annotations

import torch
from compile_rank_sum import FORMS, call_both, compile_and_tell

from gapless.kernels import bulk_sum_jit
from gapless.parallel import bulk_sum
from gapless.parallel.bulk_sum import BulkReducer, Inbox


def main() -> None:
    bulk_sum._kernels = lambda: bulk_sum_jit  # type: ignore[assignment]
    bulk_sum.launch = compile_and_tell  # type: ignore[assignment]
    bulk_sum.launch_options = lambda device: {"EARLY": True, "launch_pdl": True}  # type: ignore[assignment]
    for dtype, size, num_ranks in FORMS:
        num_programs = bulk_sum.MAX_PROGRAMS
        words = torch.zeros(Inbox.num_words(num_ranks, num_programs), dtype=torch.int64)
        released = torch.zeros(1, dtype=torch.int32)
        where = {"rank": num_ranks - 1, "num_programs": num_programs, "released": released}
        reducer = BulkReducer(Inbox.of_words(words, [0] * num_ranks, **where))
        call_both(reducer, size, dtype)


if __name__ == "__main__":
    main()

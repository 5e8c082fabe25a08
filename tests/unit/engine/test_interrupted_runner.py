"""A step that is interrupted inside the runner takes nothing along: rows and slots are found again."""

from __future__ import annotations

import pytest
import torch
from engine_fakes import PagedFakeRunner

from gapless.engine.inputs import BatchBuilder
from gapless.engine.penalties import PenaltyTable
from gapless.engine.request import Request, make_sequences
from gapless.engine.step import ScheduledSequence
from gapless.sampling.params import SamplingParams

NUM_REQS = 3


def entry() -> ScheduledSequence:
    request = Request(
        request_id="r",
        prompt=None,
        prompt_token_ids=(1, 2),
        params=SamplingParams(repetition_penalty=1.5, detokenize=False),
        max_total_tokens=18,
    )
    return ScheduledSequence(make_sequences(request, base_seed=0)[0], 0, 2, True, 0, [1])


def interrupted_after(owner: object, name: str, patch: pytest.MonkeyPatch) -> None:
    """The method does its work, and its result gets lost."""
    method = getattr(owner, name)

    def interrupted(*args: object) -> None:
        method(*args)
        raise KeyboardInterrupt

    patch.setattr(owner, name, interrupted)


def test_rows_of_the_table_mirror_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = PagedFakeRunner(max_num_reqs=NUM_REQS)
    builder = BatchBuilder(
        block_size=runner.block_size, max_num_reqs=NUM_REQS, max_num_tokens=32, max_blocks=8
    )
    for _ in range(2 * NUM_REQS):
        with monkeypatch.context() as patch:
            interrupted_after(builder, "_take_row", patch)
            with pytest.raises(KeyboardInterrupt):
                builder._mirror((entry(),))
    for _ in range(3):
        rows = builder._mirror(tuple(entry() for _ in range(NUM_REQS)))
        assert sorted(rows.tolist()) == list(range(NUM_REQS))


def test_slots_of_the_penalty_table_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    table = PenaltyTable(
        max_num_reqs=NUM_REQS, vocab_size=11, torch_device=torch.device("cpu"), has_fused_kernels=False
    )
    for _ in range(2 * NUM_REQS):
        with monkeypatch.context() as patch:
            interrupted_after(table, "_take_slot", patch)
            with pytest.raises(KeyboardInterrupt):
                table.apply([entry()], [0], torch.zeros(1, 11))
    for _ in range(3):
        entries = [entry() for _ in range(NUM_REQS)]
        logits = torch.ones(NUM_REQS, 11)
        table.apply(entries, range(NUM_REQS), logits)
        table.count(torch.zeros(NUM_REQS, dtype=torch.int64))
        assert (logits[:, 1] < 1).all()
        assert len({table._slots[e.sequence].index for e in entries}) == NUM_REQS

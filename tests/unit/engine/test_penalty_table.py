"""The table of token counts: every row of every step sees exactly its own history."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from gapless.engine.penalties import PenaltyTable
from gapless.engine.request import Request, Sequence, SequenceState
from gapless.engine.step import ScheduledSequence
from gapless.errors import GaplessError
from gapless.sampling.params import SamplingParams
from gapless.sampling.sampler import apply_penalties

SIZE = 9


def make_sequence(prompt: list[int], **params: float) -> Sequence:
    request = Request(
        request_id="r",
        prompt=None,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**{"repetition_penalty": 1.5, "frequency_penalty": 0.5, **params}),  # type: ignore[arg-type]
        max_total_tokens=1000,
    )
    return Sequence(request=request, index=0, seed=0, token_ids=list(prompt), block_table=[])


def entry_of(sequence: Sequence, num_unknown: int = 0) -> ScheduledSequence:
    """Samples the token after the known ones and ``num_unknown`` more."""
    end = len(sequence.token_ids) + num_unknown
    return ScheduledSequence(sequence, end - 1, 1, True, sequence.generation, [])


def make_table(max_num_reqs: int = 4) -> PenaltyTable:
    return PenaltyTable(
        max_num_reqs=max_num_reqs,
        vocab_size=SIZE,
        torch_device=torch.device("cpu"),
        has_fused_kernels=False,
    )


def expected_of(sequence: Sequence, logits_V: Tensor, unknown: list[int]) -> Tensor:
    params = sequence.params
    return apply_penalties(
        logits_V[None],
        prompt_ids=[sequence.request.prompt_token_ids],
        output_ids=[[*sequence.output_token_ids, *unknown]],
        repetition_R=torch.tensor([params.repetition_penalty]),
        presence_R=torch.tensor([params.presence_penalty]),
        frequency_R=torch.tensor([params.frequency_penalty]),
    )[0]


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_random_histories_with_preemption_aborts_and_newcomers(seed: int, ahead: int) -> None:
    """``ahead`` tokens of every sequence are known to the table only; a preemption forgets them."""
    rng = random.Random(seed)
    table = make_table()
    running: list[Sequence] = []
    unknown: dict[Sequence, list[int]] = {}
    for _ in range(60):
        while len(running) < 4 and rng.random() < 0.7:
            sequence = make_sequence([rng.randrange(SIZE) for _ in range(3)], presence_penalty=rng.random())
            running.append(sequence)
            unknown[sequence] = []
        for sequence in [s for s in running if rng.random() < 0.1]:
            if rng.random() < 0.5:
                sequence.state = SequenceState.FINISHED
                running.remove(sequence)
            else:
                sequence.generation += 1
                unknown[sequence] = []
        step = rng.sample(running, rng.randint(0, len(running))) if ahead == 0 else list(running)
        if not step:
            continue
        logits = torch.randn(len(step) + 1, SIZE)
        expected = [expected_of(s, row, unknown[s]) for s, row in zip(step, logits[1:].clone(), strict=True)]
        entries = [entry_of(make_sequence([1])), *(entry_of(s, len(unknown[s])) for s in step)]
        table.apply(entries, list(range(1, len(entries))), logits)
        for place, wanted in enumerate(expected):
            assert torch.equal(logits[place + 1], wanted)
        drawn = [rng.randrange(SIZE) for _ in entries]
        table.count(torch.tensor(drawn))
        for sequence, token in zip(step, drawn[1:], strict=True):
            unknown[sequence].append(token)
            while len(unknown[sequence]) > ahead:
                sequence.token_ids.append(unknown[sequence].pop(0))


def test_a_prompt_is_counted_once_and_the_slot_filled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[Sequence] = []
    table = make_table()
    fill = table._fill
    monkeypatch.setattr(
        table, "_fill", lambda slot, sequence, num: (filled.append(sequence), fill(slot, sequence, num))
    )
    sequence = make_sequence([1, 2, 3])
    for token in (4, 5, 4):
        table.apply([entry_of(sequence)], [0], torch.zeros(1, SIZE))
        table.count(torch.tensor([token]))
        sequence.token_ids.append(token)
    assert filled == [sequence]


def test_memory_grows_with_the_sequences_that_have_penalties() -> None:
    table = make_table(max_num_reqs=20)
    assert table.num_bytes == 0
    sizes = []
    for count in (1, 8, 9, 20, 20):
        entries = [entry_of(make_sequence([1])) for _ in range(count)]
        table.apply(entries, list(range(count)), torch.zeros(count, SIZE))
        table.count(torch.zeros(count, dtype=torch.int64))
        sizes.append(table.num_bytes // (4 * SIZE))
    assert sizes == [8, 16, 20, 20, 20]


def test_a_step_that_failed_before_its_tokens_were_counted_is_made_up_for() -> None:
    table, sequence = make_table(), make_sequence([1, 2])
    table.apply([entry_of(sequence)], [0], torch.zeros(1, SIZE))
    logits = torch.ones(1, SIZE)
    sequence.token_ids.append(7)
    table.apply([entry_of(sequence)], [0], logits)
    assert torch.equal(logits[0], expected_of(sequence, torch.ones(SIZE), []))


def test_an_invalid_token_is_not_counted() -> None:
    table, sequence = make_table(), make_sequence([1, 2])
    table.apply([entry_of(sequence)], [0], torch.zeros(1, SIZE))
    table.count(torch.tensor([-1]))
    assert table._counts_SV.sum() == 2


def test_counts_given_up_while_the_host_is_behind_are_an_error_not_a_wrong_penalty() -> None:
    table = make_table(max_num_reqs=1)
    first, second = make_sequence([1]), make_sequence([2])
    for sequence in (first, second):
        table.apply([entry_of(sequence)], [0], torch.zeros(1, SIZE))
        table.count(torch.tensor([3]))
    with pytest.raises(GaplessError, match="need its 1 tokens, of which the host knows 0"):
        table.apply([entry_of(first, 1)], [0], torch.zeros(1, SIZE))

"""Penalties, banned tokens and log-probabilities, against their definitions written out."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.sampling.sampler import apply_penalties, mask_tokens, token_logprobs

tokens_strategy = st.lists(st.integers(0, 11), max_size=20)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.tuples(tokens_strategy, tokens_strategy), min_size=1, max_size=4),
    repetition=st.sampled_from([0.5, 1.0, 1.3]),
    presence=st.sampled_from([-1.0, 0.0, 0.7]),
    frequency=st.sampled_from([-0.5, 0.0, 0.4]),
)
def test_penalties_follow_their_definition(
    rows: list[tuple[list[int], list[int]]], repetition: float, presence: float, frequency: float
) -> None:
    logits = torch.randn(len(rows), 12, generator=torch.Generator().manual_seed(len(rows)))
    before = logits.clone()
    result = apply_penalties(
        logits,
        prompt_ids=[prompt for prompt, _ in rows],
        output_ids=[output for _, output in rows],
        repetition_R=torch.full((len(rows),), repetition),
        presence_R=torch.full((len(rows),), presence),
        frequency_R=torch.full((len(rows),), frequency),
    )
    for row, (prompt, output) in enumerate(rows):
        counts = Counter(output)
        for token in range(12):
            value = float(before[row, token])
            if token in prompt or token in counts:
                value = value / repetition if value > 0 else value * repetition
            value -= frequency * counts[token] + presence * (counts[token] > 0)
            assert float(result[row, token]) == pytest.approx(value, abs=1e-5)
    assert torch.equal(logits, before), "the logits given are left alone"


def test_each_row_has_its_own_penalties() -> None:
    result = apply_penalties(
        torch.ones(3, 4),
        prompt_ids=[[0], [0], [0]],
        output_ids=[[1], [1], [1, 1]],
        repetition_R=torch.tensor([2.0, 1.0, 1.0]),
        presence_R=torch.tensor([0.0, 1.0, 0.0]),
        frequency_R=torch.tensor([0.0, 0.0, 0.25]),
    )
    assert result.tolist() == [[0.5, 0.5, 1, 1], [1, 0, 1, 1], [1, 0.5, 1, 1]]


def test_presence_and_frequency_ignore_the_prompt() -> None:
    result = apply_penalties(
        torch.zeros(1, 3),
        prompt_ids=[[0, 0, 1]],
        output_ids=[[]],
        repetition_R=torch.ones(1),
        presence_R=torch.ones(1),
        frequency_R=torch.ones(1),
    )
    assert result.tolist() == [[0.0, 0.0, 0.0]]


def test_masked_tokens_become_impossible_and_others_stay() -> None:
    logits = torch.ones(3, 5)
    mask_tokens(logits, [(0, [4]), (2, [0, 1])])
    assert logits.tolist() == [
        [1, 1, 1, 1, -math.inf],
        [1, 1, 1, 1, 1],
        [-math.inf, -math.inf, 1, 1, 1],
    ]


@pytest.mark.parametrize("banned", [[], [(0, [])]])
def test_masking_nothing_changes_nothing(banned: list[tuple[int, list[int]]]) -> None:
    logits = torch.ones(1, 3)
    mask_tokens(logits, banned)
    assert logits.tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("k", [0, 1, 5, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_list_the_own_token_then_the_best(k: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(6, 50, generator=torch.Generator().manual_seed(k)) * 3).to(dtype)
    tokens = torch.tensor([0, 7, 49, 3, 3, 12])
    values, ids, ranks = token_logprobs(logits, tokens, k)
    assert values.shape == ids.shape == ranks.shape == (6, 1 + k)
    expected = torch.log_softmax(logits.double(), -1)
    assert ids[:, 0].tolist() == tokens.tolist()
    torch.testing.assert_close(values.double(), expected.gather(1, ids), atol=1e-5, rtol=1e-5)
    order = torch.argsort(-logits.float(), dim=-1, stable=True)
    assert ids[:, 1:].tolist() == order[:, :k].tolist()
    assert ranks[:, 1:].tolist() == [list(range(1, k + 1))] * 6
    for row in range(6):
        better = int((logits[row].float() > logits[row, tokens[row]].float()).sum())
        assert ranks[row, 0] == better + 1


def test_more_logprobs_than_tokens_gives_all_of_them() -> None:
    values, ids, _ = token_logprobs(torch.tensor([[0.0, 1.0]]), torch.tensor([0]), 5)
    assert ids.tolist() == [[0, 1, 0]]
    assert values.exp()[0, 1:].sum().item() == pytest.approx(1.0)


def test_logprobs_among_equals_list_the_lower_id_first() -> None:
    _, ids, ranks = token_logprobs(torch.zeros(1, 6), torch.tensor([4]), 3)
    assert ids.tolist() == [[4, 0, 1, 2]]
    assert ranks.tolist() == [[1, 1, 2, 3]]


def test_impossible_tokens_come_last() -> None:
    values, ids, _ = token_logprobs(torch.tensor([[-math.inf, 0.0, 1.0]]), torch.tensor([2]), 3)
    assert ids.tolist() == [[2, 2, 1, 0]]
    assert values[0, 3] == -math.inf


def test_a_certain_token_has_logprob_zero_and_rank_one() -> None:
    values, ids, ranks = token_logprobs(torch.tensor([[100.0, -100.0]]), torch.tensor([0]), 2)
    assert (values[0, 0].item(), ranks[0, 0].item()) == (0.0, 1)
    assert ids.tolist() == [[0, 0, 1]]

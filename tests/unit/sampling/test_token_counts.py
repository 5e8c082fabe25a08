"""Penalties from device counts: those of the token lists, whatever the history; by torch and by the kernels
(under Triton's interpreter)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gapless.kernels import penalty
from gapless.sampling import token_counts
from gapless.sampling.sampler import apply_penalties

SIZE = 12
histories = st.lists(st.integers(0, SIZE - 1), max_size=20)


def functions(name: str) -> Any:
    if name == "kernels":
        pytest.importorskip("triton")
        return penalty
    return token_counts


def values(repetition: list[float], presence: list[float], frequency: list[float]) -> dict[str, Tensor]:
    return {
        "repetition_P": torch.tensor(repetition),
        "presence_P": torch.tensor(presence),
        "frequency_P": torch.tensor(frequency),
    }


cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU tests/gpu covers the kernels")


@cpu_only
@pytest.mark.parametrize("name", ["torch", "kernels"])
@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(histories, histories), min_size=1, max_size=3),
    repetition=st.sampled_from([0.5, 1.0, 1.3]),
    presence=st.sampled_from([-1.0, 0.0, 0.7]),
    frequency=st.sampled_from([-0.5, 0.0, 0.4]),
)
def test_counts_give_the_penalties_of_the_lists(
    name: str,
    rows: list[tuple[list[int], list[int]]],
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    """The last half of every output is counted as it is drawn, the rest is filled in."""
    num = len(rows)
    counts = torch.full((num + 1, SIZE), 77, dtype=torch.int32)
    slots = [num - place for place in range(num)]
    places = torch.arange(num, dtype=torch.int32)
    for slot, (prompt, output) in zip(slots, rows, strict=True):
        known = len(output) // 2
        token_counts.fill_slot(counts, slot, prompt_ids=prompt, output_ids=output[:known])
    for step in range(max(len(output) - len(output) // 2 for _, output in rows)):
        drawn = [out[len(out) // 2 + step] if len(out) // 2 + step < len(out) else -1 for _, out in rows]
        slot_index = torch.tensor(slots, dtype=torch.int32)
        functions(name).count_drawn(counts, torch.tensor(drawn), places, slot_index)
    assert (counts[0] == 77).all(), "a slot of nobody"

    logits = torch.randn(num + 2, SIZE, generator=torch.Generator().manual_seed(num))
    before = logits.clone()
    row_index = torch.tensor([row + 1 for row in range(num)], dtype=torch.int32)
    columns = values([repetition] * num, [presence] * num, [frequency] * num)
    functions(name).penalise_rows(
        logits, counts, row_index, torch.tensor(slots, dtype=torch.int32), **columns
    )
    expected = apply_penalties(
        before[1:-1],
        prompt_ids=[prompt for prompt, _ in rows],
        output_ids=[output for _, output in rows],
        repetition_R=columns["repetition_P"],
        presence_R=columns["presence_P"],
        frequency_R=columns["frequency_P"],
    )
    assert torch.equal(logits[1:-1], expected)
    assert torch.equal(logits[[0, -1]], before[[0, -1]]), "rows without penalties"


@cpu_only
@pytest.mark.parametrize("name", ["torch", "kernels"])
def test_each_row_has_its_own_penalties_and_slot(name: str) -> None:
    counts = torch.zeros(4, 4, dtype=torch.int32)
    for slot, output in ((2, [1]), (0, [1]), (3, [1, 1])):
        token_counts.fill_slot(counts, slot, prompt_ids=[0], output_ids=output)
    logits = torch.ones(3, 4)
    functions(name).penalise_rows(
        logits,
        counts,
        torch.tensor([2, 0, 1], dtype=torch.int32),
        torch.tensor([3, 2, 0], dtype=torch.int32),
        **values([1.0, 2.0, 1.0], [0.0, 0.0, 1.0], [0.25, 0.0, 0.0]),
    )
    assert logits.tolist() == [[0.5, 0.5, 1, 1], [1, 0, 1, 1], [1, 0.5, 1, 1]]


def test_filling_a_slot_forgets_who_had_it() -> None:
    counts = torch.zeros(1, 5, dtype=torch.int32)
    token_counts.fill_slot(counts, 0, prompt_ids=[1, 2], output_ids=[2, 2, 3])
    assert counts.tolist() == [[0, 1, 5, 2, 0]]
    token_counts.fill_slot(counts, 0, prompt_ids=[4], output_ids=[])
    assert counts.tolist() == [[0, 0, 0, 0, 1]]

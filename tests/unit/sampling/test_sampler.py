"""Draws: the right distribution, the right filters (against a slow oracle), no dependence on the batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gapless.graphs.device.emulated import EmulatedDevice
from gapless.sampling.sampler import greedy, sample, sample_unfiltered, uniform

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def uniform_oracle(seed: int, index: int) -> float:
    key = mix((seed + GOLDEN) & MASK)
    return (mix((key + (index + 1) * GOLDEN) & MASK) >> 11) * 2.0**-53


def kept_oracle(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Weights that survive the filters, in plain NumPy with a stable sort."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    order = np.argsort(-logits, kind="stable")
    kept = order[:top_k] if top_k > 0 else order
    if top_p < 1:
        share = np.cumsum(weights[kept]) - weights[kept]
        kept = kept[share < np.float64(np.float32(top_p)) * weights[kept].sum()]
    kept = kept[weights[kept].astype(np.float32) >= np.float32(min_p)]
    result = np.zeros_like(weights)
    result[kept] = weights[kept]
    return result


def draw_oracle(weights: np.ndarray, u: float) -> int:
    upto = np.cumsum(weights)
    return int(np.nonzero((upto > u * upto[-1]) & (weights > 0))[0][0])


def draw(
    logits: Tensor,
    *,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
    seeds: list[int] | None = None,
    indices: list[int] | None = None,
) -> Tensor:
    rows = logits.shape[0]

    def column(value: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=dtype)

    return sample(
        logits,
        temperature_R=column(temperature, torch.float32),
        top_k_R=column(top_k, torch.int32),
        top_p_R=column(top_p, torch.float32),
        min_p_R=column(min_p, torch.float32),
        seed_R=column(seeds if seeds is not None else list(range(rows)), torch.int64),
        index_R=column(indices if indices is not None else [0] * rows, torch.int32),
    )


def draw_unfiltered(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    seeds: list[int] | None = None,
    indices: list[int] | None = None,
) -> Tensor:
    rows = logits.shape[0]
    return sample_unfiltered(
        logits,
        temperature_R=torch.full((rows,), temperature),
        seed_R=torch.tensor(seeds if seeds is not None else list(range(rows))),
        index_R=torch.tensor(indices if indices is not None else [0] * rows, dtype=torch.int32),
    )


# The random numbers


@pytest.mark.parametrize("seed", [0, 1, -1, 12345, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("index", [0, 1, 2, 1000, 2**31 - 1])
def test_uniform_is_splitmix64_bit_for_bit(seed: int, index: int) -> None:
    u = uniform(torch.tensor([seed]), torch.tensor([index], dtype=torch.int32))
    assert u.dtype == torch.float64
    assert u.item() == uniform_oracle(seed, index)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float((((counts - expected) ** 2) / expected).sum())


@pytest.mark.parametrize("vary", ["seed", "index"])
def test_uniform_is_uniform_over_seeds_and_over_indices(vary: str) -> None:
    count = 100_000
    numbers, constant = torch.arange(count), torch.full((count,), 7)
    u = uniform(numbers, constant) if vary == "seed" else uniform(constant, numbers)
    counts = np.histogram(u.numpy(), bins=100, range=(0, 1))[0]
    assert 50 < chi_square(counts, np.full(100, count / 100)) < 160  # 99 degrees of freedom
    assert u.min() >= 0
    assert u.max() < 1


def test_neighbouring_seeds_and_indices_are_uncorrelated() -> None:
    seeds = torch.arange(50_000)
    first, second = uniform(seeds, torch.zeros_like(seeds)), uniform(seeds, torch.ones_like(seeds))
    table = np.histogram2d(first.numpy(), second.numpy(), bins=10, range=[[0, 1], [0, 1]])[0]
    assert chi_square(table, np.full((10, 10), 500.0)) < 160
    assert abs(np.corrcoef(first[1:].numpy(), first[:-1].numpy())[0, 1]) < 0.02


# The distribution


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vocab_size", [7, 1500])
def test_frequencies_follow_the_softmax(vocab_size: int, temperature: float) -> None:
    count = 20_000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0)) * 2
    tokens = torch.cat(
        [
            draw_unfiltered(logits.expand(1000, -1), temperature=temperature, seeds=list(range(i, i + 1000)))
            for i in range(0, count, 1000)
        ]
    )
    expected = torch.softmax(logits.double() / temperature, -1).numpy() * count
    counts = np.bincount(tokens.numpy(), minlength=vocab_size)
    # Rare tokens share one bin, as a chi-square test wants at least a handful per bin.
    often = expected >= 8
    counts = np.append(counts[often], counts[~often].sum())
    expected = np.append(expected[often], expected[~often].sum() + 1e-9)
    degrees = len(counts) - 1
    assert chi_square(counts, expected) < degrees + 5 * math.sqrt(2 * degrees) + 5


def test_successive_tokens_of_one_request_follow_the_softmax_too() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    tokens = draw_unfiltered(logits.expand(8000, -1), seeds=[42] * 8000, indices=list(range(8000)))
    counts = np.bincount(tokens.numpy(), minlength=4)
    assert chi_square(counts, torch.softmax(logits, -1).numpy() * 8000) < 20


@settings(max_examples=50, deadline=None)
@given(
    vocab_size=st.sampled_from([1, 2, 10, 1024, 1025, 3000]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 5000]),
    top_p=st.sampled_from([1.0, 0.01, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    ties=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_filters_equal_a_stable_sort(
    vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float, ties: bool, seed: int
) -> None:
    rows = 6
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    if ties:
        logits = logits.round()
    seeds = [seed * 100 + row for row in range(rows)]
    tokens = draw(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seeds=seeds)
    for row in range(rows):
        weights = kept_oracle(logits[row].numpy(), temperature, top_k, top_p, min_p)
        token = int(tokens[row])
        expected = draw_oracle(weights, uniform_oracle(seeds[row], 0))
        if token != expected:  # only where rounding moves a border of the cumulative distribution
            upto = np.cumsum(weights) / weights.sum()
            gap = abs(upto[min(token, expected)] - uniform_oracle(seeds[row], 0))
            assert weights[token] > 0, f"token {token} should have been filtered out"
            assert gap < 1e-6, (row, token, expected)


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_top_k_keeps_exactly_k_tokens_even_among_ties(k: int) -> None:
    logits = torch.zeros(2000, 9)
    assert set(draw(logits, top_k=k).tolist()) == set(range(k)), "ties go to the lower ids"


@pytest.mark.parametrize(("p", "kept"), [(0.2, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_top_p_keeps_the_token_that_crosses(p: float, kept: int) -> None:
    logits = torch.zeros(2000, 4)
    assert set(draw(logits, top_p=p).tolist()) == set(range(kept))


def test_top_p_counts_what_top_k_left() -> None:
    """Of four equal tokens top-k leaves two; half of that is one."""
    assert set(draw(torch.zeros(500, 4), top_k=2, top_p=0.5).tolist()) == {0}


def test_filters_see_the_distribution_after_temperature() -> None:
    logits = torch.tensor([[2.0, 0.0]]).expand(500, -1)
    assert set(draw(logits, top_p=0.85, temperature=1.0).tolist()) == {0}
    assert set(draw(logits, top_p=0.85, temperature=4.0).tolist()) == {0, 1}
    assert set(draw(logits, min_p=0.3, temperature=1.0).tolist()) == {0}
    assert set(draw(logits, min_p=0.3, temperature=4.0).tolist()) == {0, 1}


def test_min_p_is_relative_to_the_best_token() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(3000, -1)
    assert set(draw(logits, min_p=0.29).tolist()) == {0, 1, 2}
    assert set(draw(logits, min_p=0.59).tolist()) == {0, 1}


def test_filters_off_draw_what_the_unfiltered_function_draws() -> None:
    logits = torch.randn(300, 2500)
    assert torch.equal(draw(logits), draw_unfiltered(logits))


# No dependence on the batch


@pytest.fixture(scope="module")
def mixed() -> dict[str, Any]:
    rows = 24
    generator = torch.Generator().manual_seed(3)
    return {
        "logits": torch.randn(rows, 4000, generator=generator) * 3,
        "temperature": [0.0, 0.7, 1.0, 1.5] * 6,
        "top_k": [0, 5, 50] * 8,
        "top_p": [1.0, 0.9] * 12,
        "min_p": [0.0, 0.0, 0.1] * 8,
        "seeds": [1000 + 7 * row for row in range(rows)],
        "indices": [row % 5 for row in range(rows)],
    }


def select(parameters: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    picked = {k: [v[row] for row in rows] for k, v in parameters.items() if k != "logits"}
    return {"logits": parameters["logits"][rows], **picked}


@pytest.mark.parametrize("permutation_seed", range(4))
def test_permuted_rows_draw_permuted_tokens(mixed: dict[str, Any], permutation_seed: int) -> None:
    order = torch.randperm(24, generator=torch.Generator().manual_seed(permutation_seed)).tolist()
    assert draw(**select(mixed, order)).tolist() == draw(**mixed)[order].tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 8, 17])
def test_tokens_do_not_depend_on_the_batch_size(mixed: dict[str, Any], size: int) -> None:
    whole = draw(**mixed)
    parts = [draw(**select(mixed, list(range(i, min(i + size, 24))))) for i in range(0, 24, size)]
    assert torch.cat(parts).tolist() == whole.tolist()


def test_a_row_is_untouched_by_broken_neighbours(mixed: dict[str, Any]) -> None:
    expected = draw(**mixed)
    broken = {**mixed, "logits": mixed["logits"].clone()}
    for row, value in ((1, math.nan), (2, math.inf), (4, -math.inf)):
        broken["logits"][row] = value
    tokens = draw(**broken)
    healthy = [row for row in range(24) if row not in (1, 2, 4)]
    assert tokens[healthy].tolist() == expected[healthy].tolist()


def test_the_same_seed_and_index_draw_the_same_token_again(mixed: dict[str, Any]) -> None:
    assert torch.equal(draw(**mixed), draw(**mixed))


def test_another_index_or_seed_draws_other_tokens() -> None:
    logits = torch.zeros(64, 4000)
    first = draw_unfiltered(logits)
    assert (draw_unfiltered(logits, indices=[1] * 64) == first).float().mean() < 0.1
    assert (draw_unfiltered(logits, seeds=list(range(64, 128))) == first).float().mean() < 0.1


def test_tokens_come_out_the_same_under_recording(mixed: dict[str, Any]) -> None:
    """No host reads, fixed shapes: the function records, and the replay draws what eager code draws."""
    device = EmulatedDevice()
    pool = device.new_pool()
    static = {
        "logits_RV": mixed["logits"].clone(),
        "temperature_R": torch.tensor(mixed["temperature"]),
        "top_k_R": torch.tensor(mixed["top_k"], dtype=torch.int32),
        "top_p_R": torch.tensor(mixed["top_p"]),
        "min_p_R": torch.tensor(mixed["min_p"]),
        "seed_R": torch.tensor(mixed["seeds"]),
        "index_R": torch.tensor(mixed["indices"], dtype=torch.int32),
    }
    device.begin_segment(pool)
    tokens = sample(**static)
    segment = device.end_segment()
    for step in range(3):
        static["index_R"].fill_(step)
        static["logits_RV"].copy_(mixed["logits"].roll(step, 0))
        segment.replay()
        assert tokens.tolist() == sample(**static).tolist()
    segment.reset()


# Greedy and broken rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_takes_the_best_and_the_lowest_id_among_equals(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 0.0, 5.0]], dtype=dtype)
    assert greedy(logits).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1e-30])
def test_no_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(50, 3000)
    assert torch.equal(draw(logits, temperature=temperature), logits.argmax(-1))
    assert torch.equal(draw_unfiltered(logits, temperature=temperature), logits.argmax(-1))


def test_a_very_high_temperature_is_uniform() -> None:
    tokens = draw_unfiltered(torch.randn(1, 8).expand(8000, -1) * 100, temperature=1e30)
    assert chi_square(np.bincount(tokens.numpy(), minlength=8), np.full(8, 1000.0)) < 30


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize(
    ("row", "possible"),
    [
        ([math.nan, 1.0, 1.0], {1, 2}),
        ([math.nan] * 3, {0}),
        ([-math.inf] * 3, {0}),
        ([-math.inf, 0.0, -math.inf], {1}),
        ([math.inf, 0.0, 1.0], {0}),
        ([math.inf, math.inf, 1.0], {0, 1}),
        ([3e38, -3e38, 3e38], {0, 2}),
    ],
    ids=str,
)
def test_rows_with_nan_and_infinity_draw_something_possible(
    row: list[float], possible: set[int], filtered: bool
) -> None:
    logits = torch.tensor([row]).expand(200, -1)
    tokens = draw(logits, top_k=3, top_p=0.99) if filtered else draw_unfiltered(logits)
    assert set(tokens.tolist()) == possible


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((3000, 2100), -math.inf)
    logits[:, [5, 1030, 2099]] = torch.tensor([0.0, 1.0, 2.0])
    assert set(draw_unfiltered(logits).tolist()) == {5, 1030, 2099}


def test_bfloat16_logits_are_drawn_in_float32() -> None:
    logits = torch.randn(100, 1000).bfloat16()
    assert torch.equal(draw_unfiltered(logits), draw_unfiltered(logits.float()))

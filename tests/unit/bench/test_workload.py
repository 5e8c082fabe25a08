"""Random prompts, length distributions and arrivals."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.bench.workload import Lengths, PromptSource, poisson_arrivals
from gapless.errors import ConfigError


def test_the_same_seed_gives_the_same_prompts_and_the_next_prompt_is_another() -> None:
    one, two = PromptSource(1000, seed=3), PromptSource(1000, seed=3)
    first = one.prompt(20)
    assert first == two.prompt(20)
    assert one.prompt(20) != first
    assert PromptSource(1000, seed=4).prompt(20) != first


def test_prompts_are_those_of_the_scripts_for_other_engines() -> None:
    rng = random.Random(0)
    assert PromptSource(1000).prompts([5, 7]) == [
        [rng.randrange(10, 990) for _ in range(5)],
        [rng.randrange(10, 990) for _ in range(7)],
    ]


@pytest.mark.parametrize("vocab", [1, 2, 20, 40, 41, 100])
def test_every_token_is_in_the_vocabulary(vocab: int) -> None:
    prompt = PromptSource(vocab).prompt(200)
    assert min(prompt) >= 0
    assert max(prompt) < vocab


@pytest.mark.parametrize(
    ("text", "low", "high", "shape"),
    [
        ("512", 512, 512, "uniform"),
        ("128:1024", 128, 1024, "uniform"),
        ("log:16:4096", 16, 4096, "log"),
        ("1:1", 1, 1, "uniform"),
    ],
)
def test_lengths_are_read_and_written(text: str, low: int, high: int, shape: str) -> None:
    lengths = Lengths.parse(text)
    assert (lengths.low, lengths.high, lengths.shape) == (low, high, shape)
    assert Lengths.parse(str(lengths)) == lengths


@pytest.mark.parametrize("text", ["", "abc", "0", "0:5", "9:3", "1:2:3", "-4", "log:", "lin:1:2", "1.5"])
def test_lengths_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--lengths"):
        Lengths.parse(text)


@given(st.integers(1, 500), st.integers(0, 2000), st.sampled_from(["uniform", "log"]), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_draws_lie_within_the_bounds(low: int, more: int, shape: str, seed: int) -> None:
    lengths = Lengths(low=low, high=low + more, shape=shape)  # type: ignore[arg-type]
    drawn = lengths.draw(random.Random(seed), 50)
    assert len(drawn) == 50
    assert all(low <= length <= low + more for length in drawn)


def test_log_lengths_are_mostly_short() -> None:
    drawn = sorted(Lengths.parse("log:16:4096").draw(random.Random(0), 400))
    assert drawn[200] < 512


@pytest.mark.parametrize(
    ("text", "limit", "capped"), [("128:1024", 500, "128:500"), ("128:1024", 50, "50"), ("4:8", 99, "4:8")]
)
def test_lengths_are_capped_at_both_ends(text: str, limit: int, capped: str) -> None:
    assert str(Lengths.parse(text).capped(limit)) == capped


@pytest.mark.parametrize("rate", [0.5, 20.0, 1000.0])
def test_arrivals_start_at_zero_in_order_and_at_the_rate(rate: float) -> None:
    arrivals = poisson_arrivals(random.Random(1), 2000, rate=rate)
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    assert 2000 / arrivals[-1] == pytest.approx(rate, rel=0.1)

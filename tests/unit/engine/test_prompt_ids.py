"""A prompt's ids as an array: only what is exactly a row of integers, and the same refusals either way."""

from __future__ import annotations

import enum
import pickle
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.engine import intake
from gapless.engine.prompt_ids import pack_integers
from gapless.engine.request import Request
from gapless.errors import RequestError
from gapless.sampling.params import SamplingParams

PARAMS = SamplingParams(detokenize=False)
LARGEST = 2**31 - 1


class Small(enum.IntEnum):
    ONE = 1


class Own(int):
    pass


NOT_ROWS = [True, False, 1.0, "1", "i", b"iiii", None, 2**31, -(2**31) - 1, np.int32(1), np.int64(7), Own(3)]
NOT_ROWS += [Small.ONE, (1,), [1], np.float64(1), np.array([1, 2]), 1j, "\ud800", bytearray(b"i")]


def make_request(prompt: object, *, vocab_size: int = 400) -> Request:
    made = intake.Intake(
        tokenizer=None,
        vocab_size=vocab_size,
        eos_token_ids=frozenset(),
        max_model_len=10_000,
        capacity_tokens=10_000,
    )
    return made.make_request("r", prompt, PARAMS)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-(2**31), LARGEST), min_size=1))
def test_integers_of_32_bits_are_packed_as_they_are(ids: list[int]) -> None:
    packed = pack_integers(tuple(ids))
    assert packed is not None
    assert packed.dtype == np.int32
    assert packed.tolist() == ids
    assert packed.base is None


@pytest.mark.parametrize("odd", NOT_ROWS)
@pytest.mark.parametrize("place", [0, 1, 150, 299])
def test_anything_else_anywhere_is_not_packed(odd: object, place: int) -> None:
    ids: list[object] = [5] * 300
    ids[place] = odd
    assert pack_integers(tuple(ids)) is None  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.integers(-2, 2), st.sampled_from(NOT_ROWS)), min_size=1, max_size=30))
def test_a_row_is_packed_exactly_if_every_item_is_a_plain_integer(items: list) -> None:
    is_row = all(type(item) is int and abs(item) <= LARGEST for item in items)
    assert (pack_integers(tuple(items)) is not None) == is_row


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 399), min_size=1, max_size=150),
    st.sampled_from([*NOT_ROWS, -1, 0, 399, 400, LARGEST]),
    st.integers(0, 149),
)
def test_a_prompt_is_taken_or_refused_with_the_words_of_the_slow_way(
    ids: list, odd: object, place: int
) -> None:
    ids[min(place, len(ids) - 1)] = odd
    outcomes = []
    for many in (1, 1000):
        with patch.object(intake, "_MANY_IDS", many):
            try:
                request = make_request(ids)
                outcomes.append((request.prompt_token_ids, request.prompt_ids.tolist()))
            except RequestError as error:
                outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("count", [1, 255, 256, 500])
@pytest.mark.parametrize("make", [list, tuple, iter, np.array, lambda ids: [np.int64(i) for i in ids]])
def test_a_request_holds_its_ids_twice_as_integers_and_as_an_array(count: int, make) -> None:
    ids = [i % 400 for i in range(count)]
    request = make_request(make(ids))
    assert request.prompt_token_ids == tuple(ids)
    assert all(type(token) is int for token in request.prompt_token_ids)
    assert request.prompt_ids.dtype == np.int32
    assert request.prompt_ids.tolist() == ids


def test_a_request_with_other_ids_has_another_array() -> None:
    request = make_request([1] * 100)
    assert replace(request, prompt_token_ids=(2, 3)).prompt_ids.tolist() == [2, 3]
    assert replace(request, prompt="text").prompt_ids.tolist() == [1] * 100
    assert pickle.loads(pickle.dumps(request)).prompt_ids.tolist() == [1] * 100


def test_the_largest_id_of_a_vocabulary_is_in_it() -> None:
    assert make_request([LARGEST - 1] * 300, vocab_size=LARGEST).prompt_ids[0] == LARGEST - 1
    with pytest.raises(
        RequestError, match="prompt token 299 is 2147483647: must be between 0 and 2147483646"
    ):
        make_request([1] * 299 + [LARGEST], vocab_size=LARGEST)

"""Every reason to refuse a request, and that what passes can be served."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_engine import media_prompt
from tokenizer_fakes import byte_level

from gapless.engine.intake import Intake
from gapless.engine.request import make_sequences
from gapless.errors import RequestError
from gapless.multimodal.items import MediaPrompt
from gapless.sampling.params import SamplingParams

TOKENIZER = byte_level()
IDS_ONLY = SamplingParams(detokenize=False)


def make_intake(**changes) -> Intake:
    facts = {
        "tokenizer": TOKENIZER,
        "vocab_size": 400,
        "eos_token_ids": frozenset({2}),
        "max_model_len": 20,
        "capacity_tokens": 30,
    }
    return Intake(**{**facts, **changes})


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty prompt"),
        ([], "empty prompt"),
        ([1, -1], "prompt token 1 is -1: must be between 0 and 399"),
        ([400], "prompt token 0 is 400"),
        ([1, 2.0], "prompt token 1 is 2.0: token ids must be integers"),
        ([True], "prompt token 0 is True"),
        ([1, "2"], "prompt token 1 is '2'"),
        ([None], "prompt token 0 is None"),
        ([[1, 2]], r"prompt token 0 is \[1, 2\]"),
        (7, "prompt=7: must be a string or a list of token ids"),
        (None, "prompt=None"),
        ("\ud800", "not valid Unicode"),
        ([1] * 20, "20 tokens, but the maximum model length is 20"),
        ([1] * 999, "raise max_model_len"),
        ("long text " * 30, "shorten the prompt"),
    ],
)
def test_an_unusable_prompt_is_refused_with_its_reason(prompt, message):
    with pytest.raises(RequestError, match=message):
        make_intake().make_request("r", prompt, SamplingParams())


def test_a_prompt_that_the_whole_cache_cannot_hold_is_refused():
    intake = make_intake(max_model_len=1000, capacity_tokens=16)
    assert intake.make_request("r", [1] * 15, IDS_ONLY).max_total_tokens == 16
    with pytest.raises(RequestError, match=r"whole KV cache holds 16.*raise kv_cache_tokens"):
        intake.make_request("r", [1] * 16, IDS_ONLY)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(stop_token_ids=[400]), "stop_token_ids=400: must be below 400"),
        (
            SamplingParams(stop_token_ids=[t for t in range(400) if t != 2], min_tokens=1),
            "min_tokens=1: every token of the vocabulary of 400 ends the answer",
        ),
        ({"max_tokens": 3}, "must be SamplingParams"),
    ],
)
def test_unusable_parameters_are_refused(params, message):
    with pytest.raises(RequestError, match=message):
        make_intake().make_request("r", [1], params)


def test_more_logprobs_than_tokens_in_the_vocabulary_are_refused():
    with pytest.raises(RequestError, match="logprobs=6 exceeds 5"):
        make_intake(vocab_size=5).make_request("r", [1], SamplingParams(logprobs=6))


@pytest.mark.parametrize(("prompt", "params"), [("text", IDS_ONLY), ([1, 2], SamplingParams())])
def test_text_in_or_out_needs_a_tokenizer(prompt, params):
    with pytest.raises(RequestError, match="no tokenizer"):
        make_intake(tokenizer=None).make_request("r", prompt, params)


def test_ids_in_and_out_need_no_tokenizer():
    assert make_intake(tokenizer=None).make_request("r", [1, 2], IDS_ONLY).prompt_token_ids == (1, 2)


@pytest.mark.parametrize("request_id", ["", None, 5])
def test_a_request_needs_a_name(request_id):
    with pytest.raises(RequestError, match="request_id"):
        make_intake().make_request(request_id, [1], IDS_ONLY)


@pytest.mark.parametrize("prompt", [np.array([1, 2, 3]), (1, 2, 3), range(1, 4), iter([1, 2, 3])])
def test_any_iterable_of_integers_is_a_prompt(prompt):
    request = make_intake().make_request("r", prompt, IDS_ONLY)
    assert request.prompt_token_ids == (1, 2, 3)
    assert all(type(token) is int for token in request.prompt_token_ids)


def test_text_is_encoded_with_special_tokens_and_kept():
    request = make_intake().make_request("r", "hello", SamplingParams())
    assert request.prompt == "hello"
    assert list(request.prompt_token_ids) == TOKENIZER.encode("hello", add_special_tokens=True)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "total"),
    [(5, 3, 8), (5, None, 20), (5, 15, 20), (5, 10**6, 20), (19, 4, 20)],
)
def test_the_length_limit_is_the_least_of_all(num_prompt, max_tokens, total):
    params = SamplingParams(max_tokens=max_tokens, detokenize=False)
    assert make_intake().make_request("r", [1] * num_prompt, params).max_total_tokens == total


@pytest.mark.parametrize(
    ("params", "stops", "eos"),
    [
        ({}, {2}, {2}),
        ({"stop_token_ids": [7]}, {2, 7}, {2}),
        ({"stop_token_ids": [7], "ignore_eos": True}, {7}, set()),
        ({"stop_token_ids": [2], "ignore_eos": True}, {2}, set()),
    ],
)
def test_what_ends_a_request(params, stops, eos):
    request = make_intake().make_request("r", [1], SamplingParams(detokenize=False, **params))
    assert (request.stop_token_ids, request.eos_token_ids) == (stops, eos)


@settings(max_examples=50, deadline=None)
@given(
    prompt=st.lists(st.integers(-2, 402), max_size=25),
    max_tokens=st.none() | st.integers(1, 50),
    capacity=st.integers(2, 40),
)
def test_a_request_that_is_made_can_be_served(prompt, max_tokens, capacity):
    intake = make_intake(capacity_tokens=capacity)
    try:
        request = intake.make_request("r", prompt, SamplingParams(max_tokens=max_tokens, detokenize=False))
    except RequestError:
        usable = prompt and all(0 <= t < 400 for t in prompt)
        assert not usable or len(prompt) >= min(20, capacity)
    else:
        assert all(0 <= token < 400 for token in request.prompt_token_ids)
        assert len(prompt) < request.max_total_tokens <= min(20, capacity)


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [
        (5, [5, 6, 7]),
        (-1, [-1, 0, 1]),
        (2**63 - 1, [2**63 - 1, -(2**63), -(2**63) + 1]),
    ],
)
def test_each_choice_draws_with_a_seed_of_its_own(seed, seeds):
    request = make_intake().make_request("r", [1], SamplingParams(n=3, detokenize=False))
    sequences = make_sequences(request, base_seed=seed)
    assert [s.seed for s in sequences] == seeds
    assert [s.index for s in sequences] == [0, 1, 2]
    assert len({id(s.token_ids) for s in sequences}) == 3


GOOD = media_prompt([1, 2], (b"a", 1, 3), [3])  # eight tokens, placeholders at 3, 4 and 5


def changed(**changes) -> MediaPrompt:
    return replace(GOOD, **changes)


def with_ranges(*ranges: tuple[int, int]) -> MediaPrompt:
    return changed(items=tuple(replace(GOOD.items[0], ranges=(r,)) for r in ranges))


def test_a_prompt_with_media_brings_its_items_and_positions():
    request = make_intake(takes_media=True).make_request("r", GOOD, IDS_ONLY)
    assert (request.media, request.rope_delta, request.media_end) == (GOOD.items, GOOD.rope_delta, 6)
    assert request.rope_positions_3T is GOOD.rope_positions_3T
    assert request.prompt_token_ids == GOOD.token_ids
    assert make_intake().make_request("r", [1, 2], IDS_ONLY).media_end == 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (changed(token_ids=(1, 400)), "prompt token 1 is 400"),
        (changed(token_ids=(1,) * 25), "25 tokens, but the maximum model length is 20"),
        (changed(rope_positions_3T=GOOD.rope_positions_3T[:, 1:]), r"of shape \(3, 7\).* shape \(3, 8\)"),
        (changed(rope_positions_3T=GOOD.rope_positions_3T.astype(np.int64)), "type int64"),
        (changed(rope_positions_3T=GOOD.rope_positions_3T - 1), "a rope position is -1"),
        (changed(rope_delta=-9), "a rope position is -1"),
        (with_ranges((3, 0)), "0 placeholders at prompt token 3"),
        (with_ranges((-1, 2)), "2 placeholders at prompt token -1"),
        (with_ranges((6, 3)), "3 placeholders at prompt token 6: .* within the prompt's 8 tokens"),
        (with_ranges((2, 2), (3, 2)), "2 placeholders at prompt token 3: ranges .* lie apart"),
        (changed(items=(replace(GOOD.items[0], grid_thw=(1, 2, 4)),)), "must be the number of patches"),
        (changed(items=(replace(GOOD.items[0], ranges=()),)), "there must be a placeholder"),
    ],
)
def test_a_prompt_with_media_that_does_not_fit_together_is_refused(prompt, message):
    with pytest.raises(RequestError, match=message):
        make_intake(takes_media=True, vocab_size=300).make_request("r", prompt, IDS_ONLY)


def test_a_model_of_text_refuses_media():
    with pytest.raises(RequestError, match="takes text only"):
        make_intake(vocab_size=300).make_request("r", GOOD, IDS_ONLY)


def test_a_model_without_a_head_makes_vectors_and_no_text():
    intake = make_intake(makes_text=False)
    with pytest.raises(RequestError, match="embeddings only"):
        intake.make_request("r", [1], IDS_ONLY)
    pooled = SamplingParams(max_tokens=1, pooling="last", detokenize=False)
    assert intake.make_request("r", [1], pooled).prompt_token_ids == (1,)


@pytest.mark.parametrize("limit", ["max_model_len", "capacity_tokens"])
def test_an_embedding_may_take_the_whole_context_because_nothing_is_drawn(limit):
    intake = make_intake(**{limit: 12})
    params = SamplingParams(max_tokens=1, detokenize=False, pooling="last")
    assert intake.make_request("r", [1] * 12, params).max_total_tokens == 12
    with pytest.raises(RequestError, match=r"13 tokens, but .* 12; shorten"):
        intake.make_request("r", [1] * 13, params)
    with pytest.raises(RequestError, match=r"12 tokens, but .* 12, at least one of them generated"):
        intake.make_request("r", [1] * 12, IDS_ONLY)

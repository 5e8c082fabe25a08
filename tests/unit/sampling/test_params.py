"""SamplingParams: what is refused, by name and with the limit, and what is brought to one form."""

from __future__ import annotations

import pytest

from gapless.errors import RequestError
from gapless.sampling.params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stop", 5, "stop=5: must be a list"),
        ("stop", b"ab", "stop=b'ab': must be a list"),
        ("stop", ["a", ""], "stop='': stop strings must be non-empty"),
        ("stop", [1], "stop=1: stop strings must be non-empty strings"),
        ("stop_token_ids", 5, "stop_token_ids=5: must be a list"),
        ("stop_token_ids", "5", "stop_token_ids='5': must be a list"),
        ("stop_token_ids", [1.0], "stop_token_ids=1.0: must be an integer"),
        ("stop_token_ids", [-1], "stop_token_ids=-1: must be between 0 and"),
        ("ignore_eos", "no", "ignore_eos='no': must be True or False"),
        ("detokenize", None, "detokenize=None: must be True or False"),
        ("skip_special_tokens", 1, "skip_special_tokens=1: must be True or False"),
        ("include_stop_str_in_output", 0, "include_stop_str_in_output=0: must be True or False"),
        ("temperature", float("nan"), "temperature=nan: must be a finite number"),
        ("temperature", True, "temperature=True: must be a finite number"),
        ("top_p", 0.0, "top_p=0.0: must be above 0.0 and at most 1.0"),
        ("top_k", -2, "top_k=-2: must be between -1 and"),
        ("n", 0, "n=0: must be between 1 and 128"),
        ("max_tokens", 0, "max_tokens=0: must be between 1 and"),
        ("min_tokens", 17, "min_tokens=17 exceeds max_tokens=16"),
        ("seed", 2**63, "seed=9223372036854775808: must be between"),
        ("logprobs", 21, "logprobs=21: must be between 0 and 20"),
    ],
)
def test_a_bad_value_is_a_request_error_that_names_it(field, value, message):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("stop", "expected"), [(None, ()), ("a", ("a",)), (["a", "b"], ("a", "b")), ({"a"}, ("a",)), ((), ())]
)
def test_every_form_of_stop_becomes_a_tuple(stop, expected):
    assert SamplingParams(stop=stop).stop == expected


@pytest.mark.parametrize(("ids", "expected"), [(None, ()), ([1, 2], (1, 2)), (range(2), (0, 1))])
def test_every_form_of_stop_token_ids_becomes_a_tuple(ids, expected):
    assert SamplingParams(stop_token_ids=ids).stop_token_ids == expected


@pytest.mark.parametrize("value", [10**400, -(10**400)])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
def test_an_integer_too_large_for_a_float_is_refused(name: str, value: int) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})

"""The quick way of reading a body takes nothing that the strict one refuses, and both read the same."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.serve import limits
from gapless.serve.errors import ApiError

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.just(10**400)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.sampled_from(['":', 'a": 1', "\\", "é"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
PIECES = st.sampled_from(
    [
        *("{", "}", "[", "]", ",", ":", " ", "\n", '"', '"a"', '"a":', '"a" :1', '"b":2,', '"\\":"', "\\"),
        *("0", "-0", "1.5", "1e999", "01", "1e-999", "NaN", "Infinity", "null", "true", '"\\ud800"', "\x01"),
        "\ufeff",
    ]
)


def outcome(parse, body: bytes) -> str:
    try:
        return repr(parse(body))
    except ApiError as error:
        return f"refused: {error}"


def test_a_repeated_name_that_is_no_unicode_can_be_answered():
    with pytest.raises(ApiError, match="twice") as caught:
        limits.parse_json(b'{"\\ud800":1,"\\ud800":2}')
    assert json.loads(caught.value.body())["error"]["param"] == "\\ud800"


def test_a_text_full_of_what_looks_like_names_costs_no_memory():
    body = b'{"prompt":"' + b'\\"  :' * 200_000 + b'"}'
    tracemalloc.start()
    try:
        value = limits.parse_json(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(value["prompt"]) == 800_000
    assert peak < 5 * len(body)


def test_a_body_of_many_lists_is_read_once(monkeypatch):
    monkeypatch.setattr(limits, "_decode", lambda body: pytest.fail("its names would all be counted"))
    assert len(limits.parse_json(b"[" + b"[]," * 20_000 + b"[]]")) == 20_001


def strictly(body: bytes):
    """As ``parse_json`` without the quick way."""
    value = limits._parsed_slowly(body)
    limits._check_depth(value)
    limits._check_unicode(value)
    return value


@given(
    value=VALUES, separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,", "\n\t:")]), ascii=st.booleans()
)
def test_both_ways_read_json_the_same(value, separators, ascii):
    body = json.dumps(value, separators=separators, ensure_ascii=ascii).encode()
    assert outcome(limits.parse_json, body) == outcome(strictly, body)


@given(pieces=st.lists(PIECES, max_size=9))
def test_both_ways_treat_what_may_be_no_json_the_same(pieces):
    body = "".join(pieces).encode()
    assert outcome(limits.parse_json, body) == outcome(strictly, body)


@given(body=st.binary(max_size=12))
def test_both_ways_treat_any_bytes_the_same(body):
    body = b'{"a":"' + body + b'"}'
    assert outcome(limits.parse_json, body) == outcome(strictly, body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": 1, "a": 1}',
        b'{"a":1,"b":{"c":2,"c" \t:3}}',
        b'[{"a\\\\":1,"a\\\\"\n:1}]',
        b'{"\\u0061": 1, "a": 2, "x": "no name\\": in here"}',
        b'{"s": "\\":", "a": 1, "a": 1}',
    ],
)
def test_a_name_that_occurs_twice_is_refused(body):
    with pytest.raises(ApiError, match="occurs twice"):
        limits.parse_json(body)


def test_a_prompt_of_token_ids_is_read_quickly():
    body = json.dumps(
        {"model": "m: n", "prompt": list(range(500)), "stream_options": {"include_usage": True}}
    )
    assert limits._parsed_quickly(body.encode()) == json.loads(body)

"""Capture sizes: the default ladders, explicit lists, caps, and the size that serves a batch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.errors import ConfigError
from gapless.graphs.ladder import Ladder, check_listed, decode_ladder, prefill_ladder, requests_from_tokens

FEW = settings(max_examples=50, deadline=None)


def prefill_steps_to(top: int) -> list[int]:
    """The documented table, read row by row: (first, last, step)."""
    rows = [(4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256), (4608, 10**6, 512)]
    sizes = {size for first, last, step in rows for size in range(first, last + 1, step) if size <= top}
    return sorted(sizes | {top})


def decode_steps_to(top: int) -> list[int]:
    sizes = {1, 2, 4, 8, *range(16, 257, 8), *range(272, 10**5, 16)}
    return sorted({size for size in sizes if size <= top} | {top})


@pytest.mark.parametrize(
    "top", [1, 3, 4, 5, 32, 33, 47, 48, 255, 256, 257, 512, 1024, 1100, 2048, 4096, 5000, 8192]
)
def test_default_prefill_ladder_follows_the_table_and_ends_at_its_maximum(top):
    assert list(prefill_ladder(limit=top).sizes) == prefill_steps_to(top)


@pytest.mark.parametrize("top", [1, 2, 3, 4, 5, 7, 8, 15, 16, 50, 255, 256, 257, 271, 272, 300, 1024])
def test_default_decode_ladder_follows_the_table_and_ends_at_the_request_limit(top):
    assert list(decode_ladder(max_reqs=top).sizes) == decode_steps_to(top)


@pytest.mark.parametrize(
    "make",
    [lambda m: prefill_ladder(limit=512, max_size=m), lambda m: decode_ladder(max_reqs=512, max_size=m)],
)
@pytest.mark.parametrize("max_size", [1, 7, 37, 511, 512])
def test_a_maximum_flag_ends_the_ladder_there(make, max_size):
    ladder = make(max_size)
    assert ladder.largest == max_size
    assert ladder.dropped == ()


@pytest.mark.parametrize(
    "make",
    [lambda m: prefill_ladder(limit=100, max_size=m), lambda m: decode_ladder(max_reqs=100, max_size=m)],
)
def test_a_maximum_flag_above_the_reachable_limit_is_cut_and_reported(make):
    ladder = make(4096)
    assert ladder.largest == 100
    assert [(lost.size, "above 100" in lost.reason) for lost in ladder.dropped] == [(4096, True)]


def test_the_default_maximum_yields_to_a_named_one():
    assert prefill_ladder(limit=4096, default_max=2048).largest == 2048
    assert prefill_ladder(limit=4096, default_max=2048, max_size=4096).largest == 4096


@pytest.mark.parametrize("max_size", [0, -1, True, 2.5, "8"])
def test_a_maximum_that_is_no_size_is_refused(max_size):
    with pytest.raises(ConfigError, match="--cuda-graph-max-bs-prefill"):
        prefill_ladder(limit=64, max_size=max_size)


@pytest.mark.parametrize(
    ("given_sizes", "expected"),
    [
        ([8, 4, 2], (2, 4, 8)),
        ([4, 4, 4], (4,)),
        ((16, 2, 16, 2), (2, 16)),
        ([64], (64,)),
        ([1, 3, 5], (1, 3, 5)),
    ],
)
def test_listed_sizes_are_sorted_and_made_unique_and_nothing_is_added(given_sizes, expected):
    for ladder in (
        prefill_ladder(limit=64, sizes=given_sizes),
        decode_ladder(max_reqs=64, sizes=given_sizes),
    ):
        assert ladder.sizes == expected
        assert ladder.dropped == ()
        assert ladder.is_explicit


@pytest.mark.parametrize("bad", [0, -4, 2.0, "4", None, True])
def test_a_listed_size_that_is_no_positive_integer_is_refused_by_value(bad):
    with pytest.raises(ConfigError, match=r"--cuda-graph-bs-decode.*not a capture size"):
        decode_ladder(max_reqs=64, sizes=[4, bad])


def test_an_empty_list_is_refused():
    with pytest.raises(ConfigError, match="empty"):
        prefill_ladder(limit=64, sizes=[])


def test_listed_sizes_above_the_limit_are_dropped_each_with_its_reason():
    ladder = prefill_ladder(limit=100, sizes=[50, 100, 101, 400])
    assert ladder.sizes == (50, 100)
    assert [lost.size for lost in ladder.dropped] == [101, 400]
    assert all("100" in lost.reason for lost in ladder.dropped)


def test_a_list_wholly_above_the_limit_is_an_error_that_names_list_and_limit():
    with pytest.raises(ConfigError, match=r"\[200, 400\].*100"):
        prefill_ladder(limit=100, sizes=[400, 200])


@pytest.mark.parametrize("max_size", [8, 32, 100])
def test_a_maximum_that_disagrees_with_the_list_is_an_error_naming_both(max_size):
    with pytest.raises(ConfigError, match=rf"max-bs-prefill={max_size}.*--cuda-graph-bs-prefill.*16"):
        prefill_ladder(limit=64, sizes=[4, 16], max_size=max_size)
    with pytest.raises(ConfigError, match=rf"max-bs-decode={max_size}.*--cuda-graph-bs-decode.*16"):
        check_listed("decode", [4, 16], max_size)


def test_a_maximum_equal_to_the_largest_listed_size_is_accepted():
    assert prefill_ladder(limit=64, sizes=[16, 4], max_size=16).sizes == (4, 16)


@pytest.mark.parametrize("multiple", [2, 3, 4, 8])
def test_every_size_divides_by_the_multiple_and_stays_inside_the_limit(multiple):
    limit = 240
    ladder = prefill_ladder(limit=limit, multiple_of=multiple)
    assert all(size % multiple == 0 for size in ladder.sizes)
    assert ladder.largest == limit


def test_a_limit_that_does_not_divide_is_refused_instead_of_rounded_over_the_budget():
    with pytest.raises(ConfigError, match=r"250 is not a multiple of 4.*248"):
        prefill_ladder(limit=250, multiple_of=4)


def test_listed_sizes_are_rounded_up_to_the_multiple_deduplicated_and_recapped():
    ladder = prefill_ladder(limit=10, sizes=[3, 4, 7, 9], multiple_of=4)
    assert ladder.sizes == (4, 8)
    assert {lost.size: "rounded up" in lost.reason for lost in ladder.dropped} == {3: True, 7: True, 9: False}


def test_token_sizes_become_whole_requests_rounded_up_and_reported():
    sizes, rounded = requests_from_tokens([1, 2, 4, 8, 16, 24], query_len=3, sizes_name="sizes")
    assert sizes == (1, 2, 3, 6, 8)
    assert [lost.size for lost in rounded] == [1, 2, 4, 8, 16]


def test_token_sizes_with_query_length_one_are_request_sizes():
    assert requests_from_tokens([8, 1, 4], query_len=1, sizes_name="sizes") == ((1, 4, 8), ())


@pytest.mark.parametrize("limit", [1, 4, 5, 63])
def test_capping_a_made_ladder_ends_it_at_the_new_limit(limit):
    ladder = decode_ladder(max_reqs=64).capped(limit, reason="the cache holds no more")
    assert ladder.sizes == tuple(decode_steps_to(limit))
    assert {lost.reason for lost in ladder.dropped} == {"the cache holds no more"}


def test_capping_a_listed_ladder_adds_no_size():
    ladder = decode_ladder(max_reqs=64, sizes=[2, 8, 32]).capped(20, reason="cache")
    assert ladder.sizes == (2, 8)
    assert [lost.size for lost in ladder.dropped] == [32]


def test_capping_above_the_largest_changes_nothing():
    ladder = decode_ladder(max_reqs=64)
    assert ladder.capped(64, reason="cache") is ladder


def test_capping_away_every_size_is_an_error():
    with pytest.raises(ConfigError, match="no capture size"):
        decode_ladder(max_reqs=64, sizes=[32]).capped(20, reason="cache")


def test_a_ladder_without_a_size_reports_it():
    ladder = decode_ladder(max_reqs=4)
    assert ladder.without(2, reason="why").sizes == (1, 4)
    assert [(d.size, d.reason) for d in ladder.without(2, reason="why").dropped] == [(2, "why")]
    assert ladder.without(3, reason="why") is ladder


def test_an_empty_ladder_fits_nothing():
    assert Ladder().fit(1) is None
    assert Ladder().largest == 0


@FEW
@given(limit=st.integers(1, 9000), n=st.integers(1, 9500))
def test_fit_is_the_smallest_size_that_holds_n(limit, n):
    ladder = prefill_ladder(limit=limit)
    larger = [size for size in ladder.sizes if size >= n]
    assert ladder.fit(n) == (min(larger) if larger else None)
    assert (ladder.fit(n) is None) == (n > limit)


@FEW
@given(
    limit=st.integers(1, 600),
    max_size=st.none() | st.integers(1, 700),
    multiple=st.sampled_from([1, 2, 3, 4, 8]),
)
def test_any_made_ladder_is_ascending_positive_and_capped(limit, max_size, multiple):
    limit *= multiple
    max_size = None if max_size is None else max_size * multiple
    ladder = prefill_ladder(limit=limit, max_size=max_size, multiple_of=multiple)
    assert list(ladder.sizes) == sorted(set(ladder.sizes))
    assert ladder.sizes[0] > 0
    assert ladder.largest == min(limit, max_size or limit)
    assert all(size % multiple == 0 for size in ladder.sizes)


@FEW
@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=20), limit=st.integers(1, 300))
def test_each_listed_size_is_either_kept_or_reported(sizes, limit):
    try:
        ladder = decode_ladder(max_reqs=limit, sizes=sizes)
    except ConfigError:
        assert min(sizes) > limit
        return
    assert set(ladder.sizes) | {lost.size for lost in ladder.dropped} == set(sizes)
    assert set(ladder.sizes).isdisjoint(lost.size for lost in ladder.dropped)
    assert ladder.largest <= limit


@FEW
@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=12), query_len=st.integers(1, 9))
def test_requests_from_tokens_never_serve_fewer_tokens_than_asked(sizes, query_len):
    requests, _ = requests_from_tokens(sizes, query_len=query_len, sizes_name="sizes")
    for size in sizes:
        assert any(size <= count * query_len < size + query_len for count in requests)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: prefill_ladder(limit=32, sizes=[64], sizes_name="cudagraph_capture_sizes"),
            "cudagraph_capture_sizes=[64]: every size is above 32, the most tokens of one step; list smaller "
            "sizes, or give --cuda-graph-bs-prefill a list of its own, or disable graphs for prefill",
        ),
        (
            lambda: decode_ladder(max_reqs=4, sizes=[6, 21], sizes_name="cudagraph_capture_sizes"),
            "cudagraph_capture_sizes=[6, 21]: every size is above 4, the most requests of one step; list "
            "smaller sizes, or give --cuda-graph-bs-decode a list of its own, or disable graphs for decode",
        ),
        (
            lambda: decode_ladder(max_reqs=4, sizes=[6]),
            "--cuda-graph-bs-decode=[6]: every size is above 4, the most requests of one step; list smaller "
            "sizes, or disable graphs for decode",
        ),
    ],
)
def test_a_list_of_which_nothing_is_left_says_for_which_phase(make, message):
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == message

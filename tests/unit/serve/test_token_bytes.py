"""Tokens that hold part of a character have the bytes of that part."""

from __future__ import annotations

import pytest

from gapless.models.sources import open_tokenizer
from gapless.serve.token_bytes import token_bytes_of


@pytest.mark.parametrize(
    "text", ["🙂", "日本語テキスト🎉", "naïve", "plain words", "\n\t¡~", "👩‍👩‍👧 a\u00ad\u0142"]
)
def test_tokens_of_a_real_vocabulary_put_together_are_the_text(text):
    tokenizer = open_tokenizer("smollm2")
    token_bytes = token_bytes_of(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    assert b"".join(map(token_bytes, ids, texts)).decode() == text


def test_every_byte_has_a_token_of_its_own():
    tokenizer = open_tokenizer("smollm2")
    token_bytes = token_bytes_of(tokenizer)
    found = set()
    for token in range(2000):
        text = tokenizer.decode([token], skip_special_tokens=False)
        found.add(token_bytes(token, text))
    assert {bytes([byte]) for byte in range(0x80, 0xC0)} <= found


class Vocabulary:
    def __init__(self, entry: str | None) -> None:
        self._entry = entry

    def id_to_token(self, token_id: int) -> str | None:
        return self._entry


@pytest.mark.parametrize(
    ("tokenizer", "text", "expected"),
    [
        (Vocabulary("<0xE6>"), "\ufffd", b"\xe6"),
        (Vocabulary("<0xE6>"), "whole", b"whole"),
        (Vocabulary("▁語\u3042"), "\ufffd", "\ufffd".encode()),
        (Vocabulary(None), "\ufffd", "\ufffd".encode()),
        (None, "\ufffd", "\ufffd".encode()),
    ],
    ids=["byte fallback", "whole text", "another alphabet", "no entry", "no tokenizer"],
)
def test_other_vocabularies(tokenizer, text, expected):
    assert token_bytes_of(tokenizer)(7, text) == expected

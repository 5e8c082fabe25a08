"""The bytes of one token, which its text cannot say when it holds part of a character.

A chat's log-probabilities have a ``bytes`` field so that a reader can put such tokens together. Vocabularies
write bytes in one of two ways: byte-level BPE spells each byte as one printable character, and vocabularies
with byte fallback have entries ``<0x00>`` to ``<0xFF>``. Invariant: a token whose text is whole has the bytes
of its text; only where the text has U+FFFD is the vocabulary's entry looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

TokenBytes = Callable[[int, str], bytes]
"""Of a token id and its text."""

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that byte-level BPE writes as the character of the same number; the others follow from U+0100 on."""


def token_bytes_of(tokenizer: Any) -> TokenBytes:
    """For a tokenizer that cannot show its vocabulary (or for none) the bytes are those of the text."""
    entry_of = getattr(tokenizer, "id_to_token", None)

    @lru_cache(maxsize=4096)
    def look_up(token_id: int, text: str) -> bytes:
        entry = entry_of(token_id) if entry_of is not None else None
        return text.encode() if entry is None else _bytes_of_entry(entry, text)

    def token_bytes(token_id: int, text: str) -> bytes:
        return look_up(token_id, text) if "\ufffd" in text else text.encode()

    return token_bytes


def _bytes_of_entry(entry: str, text: str) -> bytes:
    if (fallback := _FALLBACK.fullmatch(entry)) is not None:
        return bytes([int(fallback[1], 16)])
    alphabet = _byte_alphabet()
    if not all(character in alphabet for character in entry):
        return text.encode()
    return bytes(alphabet[character] for character in entry)


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    shifted = {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in _PRINTABLE} | shifted

"""The bytes that each token of a vocabulary stands for.

Grammars are matched byte by byte, so whoever constrains text needs to know what every token adds to it. Three
alphabets exist: byte-level (GPT-2's, a printable character for each byte), byte fallback (Llama 2's, "▁" for
a space and ``<0x0A>`` for a byte), and plain text. Invariant: special tokens are empty, for they add nothing
to the text that a caller sees. Tested against decoding, token by token.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


def token_bytes(backend: Backend) -> list[bytes]:
    """One item per token id; unknown ids and special tokens are empty."""
    kinds = _decoder_kinds(backend)
    alphabet = _byte_level_alphabet() if "ByteLevel" in kinds else None
    has_byte_tokens = "ByteFallback" in kinds
    marks_spaces = has_byte_tokens or "Metaspace" in kinds
    added = backend.get_added_tokens_decoder()
    result = []
    for token_id in range(_num_ids(backend)):
        text = backend.id_to_token(token_id) or ""
        if token_id in added:
            result.append(b"" if added[token_id].special else text.encode())
        elif alphabet is not None:
            result.append(_from_alphabet(text, alphabet))
        elif has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(text)):
            result.append(bytes([int(match[1], 16)]))
        else:
            result.append((text.replace(_SPACE, " ") if marks_spaces else text).encode())
    return result


def _num_ids(backend: Backend) -> int:
    """Ids may have gaps, so the highest counts."""
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _decoder_kinds(backend: Backend) -> set[str]:
    if backend.decoder is None:
        return set()
    kinds: set[str] = set()

    def collect(decoder: dict[str, Any]) -> None:
        kinds.add(decoder["type"])
        for part in decoder.get("decoders", ()):
            collect(part)

    collect(json.loads(backend.decoder.__getstate__()))
    return kinds


def _from_alphabet(text: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes([alphabet[character] for character in text])
    except KeyError:  # an entry that is no bytes decodes to itself
        return text.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Printable Latin-1 stands for itself; the other bytes, in order, for the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet

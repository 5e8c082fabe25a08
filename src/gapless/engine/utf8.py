"""Which tokens keep a text valid UTF-8, for every place inside a character where it may stand.

Grammars are matched byte by byte, and xgrammar lets bytes through that are no characters: surrogates
(ED A0 80) everywhere, and overlong forms (E0 80 80) in the classes ``[^a]`` and ``.`` of a schema's pattern.
Each is one character for the grammar, yet decodes to three U+FFFD: the text would break the very length or
pattern that was asked for. So every mask of a grammar is also one of the eight masks made here, once per
vocabulary. Invariant: what never left these masks and stands at ``START`` is valid UTF-8. The rules are table
3-7 of The Unicode Standard. Read ``grammar.py`` next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

START = 0
"""Between two characters; the other states are inside of one."""
_ONE, _TWO, _THREE = 1, 2, 3
"""So many continuation bytes are missing, each 80 to BF."""
_E0, _ED, _F0, _F4 = 4, 5, 6, 7
"""The next byte has a narrower range: no overlong form, no surrogate, nothing past U+10FFFF."""
NUM_STATES = 8
_INVALID = 8
_TRANSITIONS: tuple[tuple[int, int, int, int], ...] = (
    (START, 0x00, 0x7F, START),
    *((START, 0xC2, 0xDF, _ONE), (START, 0xE0, 0xE0, _E0), (START, 0xE1, 0xEC, _TWO)),
    *((START, 0xED, 0xED, _ED), (START, 0xEE, 0xEF, _TWO), (START, 0xF0, 0xF0, _F0)),
    *((START, 0xF1, 0xF3, _THREE), (START, 0xF4, 0xF4, _F4)),
    *((_ONE, 0x80, 0xBF, START), (_TWO, 0x80, 0xBF, _ONE), (_THREE, 0x80, 0xBF, _TWO)),
    *((_E0, 0xA0, 0xBF, _ONE), (_ED, 0x80, 0x9F, _ONE), (_F0, 0x90, 0xBF, _TWO), (_F4, 0x80, 0x8F, _TWO)),
)
"""State, first and last byte, next state."""


class Utf8Masks:
    """``words_SW[state]``: a bit for every token that may come next, as in ``GrammarMatcher.fill``.

    Tokens without text (those that end a text among them) fit between two characters only. ``vocabulary`` may
    be shorter than ``vocab_size``; what is missing has no text.
    """

    def __init__(self, vocabulary: Sequence[bytes], vocab_size: int) -> None:
        next_SV = _run(vocabulary, vocab_size)
        fits_SV = next_SV != _INVALID
        is_empty_V = np.ones(vocab_size, bool)
        is_empty_V[: len(vocabulary)] = [not text for text in vocabulary]
        fits_SV[START + 1 :, is_empty_V] = False
        padded = np.zeros((NUM_STATES, -(-vocab_size // 32) * 32), bool)
        padded[:, :vocab_size] = fits_SV
        self.words_SW = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
        self._next_SV = next_SV

    def advance(self, state: int, token_id: int) -> int | None:
        """The state behind a token; None when the text would not be valid."""
        following = int(self._next_SV[state, token_id])
        return None if following == _INVALID else following


def _run(vocabulary: Sequence[bytes], vocab_size: int) -> np.ndarray:
    """uint8 ``[S, V]``: where every token leads from every state, all tokens at once, a byte at a time."""
    table = np.full((NUM_STATES + 1, 256), _INVALID, np.uint8)
    for state, first, last, following in _TRANSITIONS:
        table[state, first : last + 1] = following
    lengths_V = np.array([len(text) for text in vocabulary], np.int64)
    starts_V = np.cumsum(lengths_V) - lengths_V
    text = np.frombuffer(b"".join(vocabulary), np.uint8)
    next_SV = np.repeat(np.arange(NUM_STATES, dtype=np.uint8)[:, None], vocab_size, axis=1)
    remaining = np.flatnonzero(lengths_V)
    place = 0
    while len(remaining):
        next_SV[:, remaining] = table[next_SV[:, remaining], text[starts_V[remaining] + place]]
        place += 1
        remaining = remaining[lengths_V[remaining] > place]
    return next_SV

"""Token ids to text, piece by piece, such that the pieces joined equal the decoding of the whole.

Decoding one token by itself is wrong: a character may be spread over several tokens (byte-level BPE), and
tokenizers of the SentencePiece kind drop the space in front of the first token they see. So a short *window*
of tokens is decoded each time and only what is new is emitted; the window starts a few tokens back (at first
inside the prompt) and moves on at places where the text ended in whole characters. Invariant: no U+FFFD is
emitted for a character whose bytes may still arrive. Read ``stop.py`` next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_PROMPT_CONTEXT = 6
"""Prompt tokens in the first window: enough that the first output token keeps its leading space."""
_MAX_WINDOW = 16
_HARD_WINDOW = 64
"""The window moves on here even where no good place was seen (only special tokens, or only broken bytes)."""
_MAX_CHARACTER_TOKENS = 4
"""UTF-8 characters have at most 4 bytes, and a token holds at least one byte of an unfinished one."""


class TokenizerLike(Protocol):
    """What the engine needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[dict], *, add_generation_prompt: bool = True, **kwargs: object
    ) -> str: ...


class Detokenizer:
    """Turns one choice's output into text. ``token_ids`` is the sequence's own growing list (prompt and
    output)."""

    def __init__(
        self,
        tokenizer: TokenizerLike,
        token_ids: list[int],
        *,
        num_prompt_tokens: int,
        skip_special_tokens: bool,
    ) -> None:
        self._tokenizer, self._token_ids, self._skip_special = tokenizer, token_ids, skip_special_tokens
        self._start = max(0, num_prompt_tokens - _PROMPT_CONTEXT)
        self._read = num_prompt_tokens
        self._clean = num_prompt_tokens  # where the text last ended in whole characters
        self._num_emitted = len(self._decode(num_prompt_tokens)) if num_prompt_tokens else 0

    def advance(self, end: int) -> str:
        """Text that tokens up to position ``end`` (exclusive) add to what has been returned so far."""
        if end <= self._read:
            return ""
        self._read = end
        text = self._decode(end)
        num_final = len(text.rstrip(_REPLACEMENT))
        if num_final < len(text) and end - self._clean >= _MAX_CHARACTER_TOKENS:
            num_final = (
                len(text) - 1
            )  # no character is this long: only the last byte group can still be completed
        piece = text[self._num_emitted : num_final]
        self._num_emitted = max(self._num_emitted, num_final)
        self._move_window(end, num_held=len(text) - num_final)
        return piece

    def flush(self) -> str:
        """What was held back for bytes that never came."""
        text = self._decode(self._read)
        piece = text[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(text))
        return piece

    def _move_window(self, end: int, *, num_held: int) -> None:
        """Start the window at the clean place before ``end``: it holds at least one token, for a leading
        space."""
        if end - self._start > _MAX_WINDOW:
            is_forced = end - self._start > _HARD_WINDOW
            start = self._clean if num_held == 0 else end - 2 * _MAX_CHARACTER_TOKENS
            if num_held == 0 or is_forced:
                context = self._tokenizer.decode(
                    self._token_ids[start:end], skip_special_tokens=self._skip_special
                )
                if context or is_forced:
                    self._start, self._num_emitted = start, max(0, len(context) - num_held)
        if num_held == 0:
            self._clean = end

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(
            self._token_ids[self._start : end], skip_special_tokens=self._skip_special
        )

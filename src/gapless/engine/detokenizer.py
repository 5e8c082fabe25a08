"""Token ids to text, piece by piece, such that the pieces joined equal the decoding of the whole.

Decoding one token by itself is wrong: a character may be spread over several tokens (byte-level BPE), and
tokenizers of the SentencePiece kind drop the space in front of the first token they see. So a short *window*
of tokens is decoded each time and only what is new is emitted; the window starts a few tokens back (at first
inside the prompt) and moves on at places where the text ended in whole characters. Invariant: no U+FFFD is
emitted for a character whose bytes may still arrive. Read ``stop.py`` next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

_REPLACEMENT = "\ufffd"
_PROMPT_CONTEXT = 6
"""Prompt tokens in the first window: enough that the first output token keeps its leading space."""
_MAX_WINDOW = 6
"""Decoding costs as much for each token in the window; moving it costs one more decoding."""
_HARD_WINDOW = 64
"""The window moves on here even where no good place was seen (only special tokens, or only broken bytes)."""
_MAX_CHARACTER_TOKENS = 4
"""UTF-8 characters have at most 4 bytes, and a token holds at least one byte of an unfinished one."""
_MAX_BLOCK = 32
"""Tokens decoded at once when many are new (text made only at the end)."""


class TokenizerLike(Protocol):
    """What the engine needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
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
        self._read = num_prompt_tokens
        self._clean = num_prompt_tokens  # where the text last ended in whole characters
        self._start, self._emitted = self._first_window()  # text: of the window, as far as it was emitted

    def advance(self, end: int) -> str:
        """Text that tokens up to position ``end`` (exclusive) add to what has been returned so far."""
        if end == self._read + 1:  # the usual case
            return self._take_token()
        pieces = []
        while self._read < end:
            piece = self._take_block(min(end, self._read + _MAX_BLOCK))
            pieces.append(self._take_token() if piece is None else piece)
        return "".join(pieces)

    def flush(self) -> str:
        """What was held back for bytes that never came."""
        text = self._window_text(self._read)
        piece = text[len(self._emitted) :]
        self._emitted = text
        return piece

    def _first_window(self) -> tuple[int, str]:
        """Where it starts and its text. It should not start within a character: the decoders of byte-fallback
        tokenizers would not read the bytes behind it either, new ones included."""
        first = max(0, self._read - _PROMPT_CONTEXT)
        for start in range(first, max(-1, first - _MAX_CHARACTER_TOKENS), -1):
            text = self._decode(start, self._read)
            if _REPLACEMENT not in text:
                return start, text
        return first, self._decode(first, self._read)

    def _take_block(self, end: int) -> str | None:
        """Many tokens in one go, up to a place near ``end`` where characters are whole. None: go token by
        token."""
        for cut in range(end, max(self._read + 1, end - _MAX_CHARACTER_TOKENS), -1):
            text = self._decode(self._start, cut)
            if text.startswith(self._emitted) and _REPLACEMENT not in text[len(self._emitted) :]:
                return self._emit(text, cut, num_final=len(text))
        return None

    def _take_token(self) -> str:
        end = self._read + 1
        text = self._decode(self._start, end)
        if text.startswith(self._emitted) and not text.endswith(_REPLACEMENT):  # for most tokens: lean
            piece = text[len(self._emitted) :]
            self._read, self._emitted = end, text
            if end - self._start > _MAX_WINDOW:
                self._move_window(0)
            self._clean = end
            return piece
        text = self._window_text(end)
        num_final = len(text.rstrip(_REPLACEMENT))
        if num_final < len(text) and end - self._clean >= _MAX_CHARACTER_TOKENS:
            num_final = len(text) - 1  # no character is this long: only the last byte can still be completed
        return self._emit(text, end, num_final=num_final)

    def _window_text(self, end: int) -> str:
        """The window's text, beginning with what was emitted.

        The decoders of byte-fallback tokenizers turn a whole run of byte tokens into U+FFFD when any of it is
        unreadable, whole characters that were emitted before included. Then only what follows those counts.
        """
        text = self._decode(self._start, end)
        if not text.startswith(self._emitted):
            self._start, self._emitted = self._clean, ""
            text = self._decode(self._start, end)
        return text

    def _emit(self, text: str, end: int, *, num_final: int) -> str:
        piece = text[len(self._emitted) : num_final]
        self._read = end
        self._emitted = text[: max(num_final, len(self._emitted))]
        num_held = len(text) - len(self._emitted)
        self._move_window(num_held)
        if num_held == 0:
            self._clean = end
        return piece

    def _move_window(self, num_held: int) -> None:
        """Start it at the last clean place before its end: it holds at least one token, for a leading
        space."""
        length = self._read - self._start
        is_forced = length > _HARD_WINDOW
        # The prompt may have ended within a character, which is still open then, though nothing is held back.
        is_open = num_held or self._emitted.endswith(_REPLACEMENT)
        if length <= _MAX_WINDOW or (is_open and not is_forced):
            return
        start = self._clean
        if num_held:  # nothing but broken bytes for long: call it clean, the cut may fall into a character
            start, self._clean = self._read - 2 * _MAX_CHARACTER_TOKENS, self._read
        text = self._decode(start, self._read)
        if text or is_forced:
            self._start, self._emitted = start, text[: max(0, len(text) - num_held)]

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._token_ids[start:end], skip_special_tokens=self._skip_special)

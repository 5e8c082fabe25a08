"""Where tokens begin in a text, in code points: ``text_offset`` of completions.

The lengths of tokens' own texts do not add up to it: a character may be spread over tokens, a token decoded
alone may lose its leading space, and special tokens may be left out of the text. So an answer's tokens are
put through the detokenizer that made the text, and a prompt's are looked for in the text that is sent back.
Invariant: a token that goes on with a character has the offset of that character, one that adds nothing has
the offset of what comes next. Read ``engine/detokenizer.py`` for why pieces come as they do.
"""

from __future__ import annotations

from collections.abc import Sequence

from gapless.engine.detokenizer import Detokenizer, TokenizerLike

_REPLACEMENT = "\ufffd"
_CONTEXT = 8
"""Tokens of a prompt that may have a say in how the first ones of its answer are read."""


class AnswerOffsets:
    """Of one choice, token by token; ``start`` is the length of an echo. Without a tokenizer the text is
    empty, and so every token begins at its end."""

    def __init__(
        self,
        tokenizer: TokenizerLike | None,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool,
        start: int = 0,
    ) -> None:
        self._token_ids = list(prompt[-_CONTEXT:])
        self._next = start
        self._is_inside = False  # a character whose last byte has not come
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer,
                self._token_ids,
                num_prompt_tokens=len(self._token_ids),
                skip_special_tokens=skip_special_tokens,
            )

    def add(self, token_id: int, text: str) -> int:
        """The offset of the next token; ``text`` is what it says by itself."""
        if self._detokenizer is None:
            return self._next
        self._token_ids.append(token_id)
        piece = self._detokenizer.advance(len(self._token_ids))
        offset = self._next
        if self._is_inside and piece.strip(_REPLACEMENT):  # bytes that stayed unreadable come before it
            offset += len(piece) - len(piece.lstrip(_REPLACEMENT))
        self._next += len(piece)
        self._is_inside = text.endswith(_REPLACEMENT)
        return offset


def prompt_offsets(
    tokenizer: TokenizerLike | None, token_ids: Sequence[int], text: str, *, is_given_as_text: bool
) -> list[int]:
    """Of a prompt's tokens in ``text``, which is the prompt as it was sent or else what its tokens say.

    What was sent holds the special tokens that somebody wrote, not those that the tokenizer added.
    """
    if not is_given_as_text:
        answer = AnswerOffsets(tokenizer, (), skip_special_tokens=True)
        return [answer.add(token_id, _alone(tokenizer, token_id)) for token_id in token_ids]
    if tokenizer is None:
        return [0] * len(token_ids)
    shared = list(token_ids)
    detokenizer = Detokenizer(tokenizer, shared, num_prompt_tokens=0, skip_special_tokens=False)
    offsets, position = [], 0
    for end, token_id in enumerate(token_ids, start=1):
        piece = detokenizer.advance(end)
        offsets.append(position)
        if text.startswith(piece, position):
            position += len(piece)
        elif tokenizer.decode([token_id], skip_special_tokens=True):  # a normaliser has changed the text
            position = min(len(text), position + len(piece))
    return offsets


def _alone(tokenizer: TokenizerLike | None, token_id: int) -> str:
    return "" if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)

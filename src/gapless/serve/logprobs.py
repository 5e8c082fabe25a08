"""Candidates of tokens in OpenAI's two shapes: a list of objects (chat) and parallel lists (completions).

A candidate is named by its text alone; where two tokens have the same text, as halves of characters do, the
likelier one stands. Minus infinity is no JSON number: it becomes -9999, as elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gapless.serve.messages import TokenLogprob
from gapless.serve.responses import ChatLogprob, ChatLogprobs, TextLogprobs, TopLogprob
from gapless.serve.text_offsets import AnswerOffsets
from gapless.serve.token_bytes import TokenBytes

LOWEST = -9999.0


def chat_logprobs(
    tokens: Iterable[Sequence[TokenLogprob]], *, num_top: int, token_bytes: TokenBytes
) -> ChatLogprobs:
    return ChatLogprobs(content=[_chat_logprob(candidates, num_top, token_bytes) for candidates in tokens])


def answer_logprobs(
    tokens: Iterable[Sequence[TokenLogprob]], *, num_top: int, offsets: AnswerOffsets
) -> TextLogprobs:
    """``offsets``: of the choice whose next tokens these are."""
    result = TextLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for candidates in tokens:
        drawn = candidates[0]
        result.text_offset.append(offsets.add(drawn.token_id, token_text(drawn)))
        _add(result, candidates, num_top)
    return result


def prompt_logprobs(
    tokens: Sequence[Sequence[TokenLogprob] | None],
    *,
    num_top: int,
    offsets: Sequence[int],
    first_token: str,
) -> TextLogprobs:
    """``first_token``: the text of the one that has no candidates."""
    result = TextLogprobs(text_offset=list(offsets), token_logprobs=[], tokens=[], top_logprobs=[])
    for candidates in tokens:
        if candidates:
            _add(result, candidates, num_top)
            continue
        result.tokens.append(first_token)
        result.token_logprobs.append(None)
        result.top_logprobs.append(None)
    return result


def join(parts: Iterable[TextLogprobs]) -> TextLogprobs:
    result = TextLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for part in parts:
        result.text_offset += part.text_offset
        result.token_logprobs += part.token_logprobs
        result.tokens += part.tokens
        result.top_logprobs += part.top_logprobs
    return result


def token_text(candidate: TokenLogprob) -> str:
    """Without a tokenizer tokens have no text; the id names them."""
    return candidate.text if candidate.text is not None else f"token_id:{candidate.token_id}"


def _add(result: TextLogprobs, candidates: Sequence[TokenLogprob], num_top: int) -> None:
    drawn = candidates[0]
    result.tokens.append(token_text(drawn))
    result.token_logprobs.append(_finite(drawn.logprob))
    top: dict[str, float] = {}
    for candidate in (*_top(candidates, num_top), drawn):
        top.setdefault(token_text(candidate), _finite(candidate.logprob))
    result.top_logprobs.append(top)


def _chat_logprob(candidates: Sequence[TokenLogprob], num_top: int, token_bytes: TokenBytes) -> ChatLogprob:
    drawn = candidates[0]
    return ChatLogprob(
        token=token_text(drawn),
        logprob=_finite(drawn.logprob),
        bytes=list(token_bytes(drawn.token_id, token_text(drawn))),
        top_logprobs=[
            TopLogprob(
                token=token_text(c),
                logprob=_finite(c.logprob),
                bytes=list(token_bytes(c.token_id, token_text(c))),
            )
            for c in _top(candidates, num_top)
        ],
    )


def _top(candidates: Sequence[TokenLogprob], num_top: int) -> list[TokenLogprob]:
    """The drawn token is among them only where it is one of the best."""
    return sorted((c for c in candidates if c.rank <= num_top), key=lambda c: c.rank)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)

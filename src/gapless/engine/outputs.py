"""What a caller gets back: one ``RequestOutput`` per prompt, one ``CompletionOutput`` per choice, or only
what is new since the last step as one ``ChoiceDelta`` per choice.

All deltas of a choice, put together, are its last snapshot. Read ``choice.py`` for where both are made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprob:
    """Log-probability of one token; ``rank`` 1 is the most likely; ``decoded_token`` is None without a
    tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One choice. ``finish_reason`` is None while it runs; ``stop_reason`` is the stop string or token id
    that ended it (None for EOS and length); ``logprobs`` has one dict per token when asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """All choices of one prompt. ``prompt`` is None when the request came as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """When asked for: per prompt token, itself first; None for the first token."""
    num_cached_tokens: int = 0
    """Prompt tokens that the first choice found in the prefix cache; they were not computed again."""

    @property
    def finished(self) -> bool:
        return all(o.finish_reason is not None for o in self.outputs)


class ChoiceDelta(NamedTuple):
    """What one choice has gained. A named tuple: one is made per running choice and step."""

    request_id: str
    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    """Per new token, the drawn one first; None when not asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """With the first tokens of choice 0, when asked for: per prompt token, itself first; None for the first
    token."""
    embedding: list[float] | None = None
    """With the last delta of a request for an embedding."""
    num_cached_tokens: int = 0
    """With the last delta of a choice: prompt tokens that it found in the prefix cache."""

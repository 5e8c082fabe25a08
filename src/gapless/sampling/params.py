"""What a request asks of the sampler and of its own end. Checked when made, so a bad value never reaches a
batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from gapless.errors import RequestError
from gapless.sampling.structured import StructuredOutputsParams

MAX_LOGPROBS = 20
"""As OpenAI and vLLM: more log-probabilities per token than this are refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request (names and meaning as in vLLM).

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1 means all. ``min_p`` keeps tokens whose probability is at
    least ``min_p`` times the best one's. ``logprobs`` k returns the k best and the sampled token's
    log-probabilities (of the model's own distribution, before temperature and penalties). Raises
    ``RequestError`` naming the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 16
    """None: up to the model's maximum length."""
    min_tokens: int = 0
    """EOS and stop token ids are not sampled before this many tokens."""
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """k: also the log-probabilities of the prompt's own tokens, and of the k best beside each."""
    pooling: Literal["last"] | None = None
    """``last``: the last hidden state, normalised, instead of text (an embedding)."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the text must match: a JSON schema, a regular expression, a grammar."""
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        _check_int("n", self.n, 1, 128)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above_low=True)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.pooling not in (None, "last"):
            raise RequestError(f"pooling={self.pooling!r}: must be last, or None for text")
        if self.structured_outputs is not None:
            _check_structured(self.structured_outputs, self.pooling)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop={text!r}: stop strings must be non-empty strings")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, 2**31 - 1)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r}: must be True or False")
        if stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True: without text nothing can be matched")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def _check_structured(wanted: object, pooling: str | None) -> None:
    if not isinstance(wanted, StructuredOutputsParams):
        raise RequestError(f"structured_outputs={wanted!r}: must be StructuredOutputsParams")
    if pooling is not None:
        raise RequestError(
            f"structured_outputs and pooling={pooling!r}: an embedding has no text to constrain"
        )


def _as_tuple(name: str, value: object) -> tuple[Any, ...]:
    """None, as clients of other engines send it, is an empty list."""
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise RequestError(f"{name}={value!r}: must be a list")
    return tuple(value)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name}={value!r}: must be an integer")
    if not low <= value <= high:
        raise RequestError(f"{name}={value}: must be between {low} and {high}")


def _check_float(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise RequestError(f"{name}={value!r}: must be a finite number")
    assert isinstance(value, (int, float))
    if not low <= value <= high or (above_low and value == low):
        bound = f"above {low}" if above_low else f"at least {low}"
        raise RequestError(f"{name}={value}: must be {bound} and at most {high}")

"""From what a caller passes to a checked ``Request``: every reason to refuse one is here, before it can reach
a batch.

Invariant: a ``Request`` that was made can be served: its tokens exist in the vocabulary, it leaves room for
at least one token, and its whole length fits the cache, so a step never fails because of what one request
asked for. Read ``core.py`` next.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gapless.engine.detokenizer import TokenizerLike
from gapless.engine.grammar import GrammarCompiler
from gapless.engine.prompt_ids import pack_integers
from gapless.engine.request import Request
from gapless.errors import RequestError
from gapless.multimodal.items import MediaPrompt
from gapless.sampling.params import SamplingParams

_MANY_IDS = 256
"""Fewer are looked at one by one: the calls of numpy take longer, where none was made just before."""

Prompt = str | Iterable[int] | MediaPrompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Intake:
    """Makes requests for one engine. ``capacity_tokens`` is what the whole KV cache holds."""

    tokenizer: TokenizerLike | None
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    capacity_tokens: int
    grammars: GrammarCompiler | None = None
    takes_media: bool = False
    makes_text: bool = True

    def make_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        prompt_text: str | None = None,
        cache_extra: bytes = b"",
    ) -> Request:
        """Raises ``RequestError``. ``prompt_text`` is the text that given token ids came from, for the
        output."""
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id={request_id!r}: must be a non-empty string")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params={params!r}: must be SamplingParams")
        if isinstance(prompt, str):
            prompt_text, prompt = prompt, self.encode(prompt)
        shown: MediaPrompt | None = None
        if isinstance(prompt, MediaPrompt):
            shown, prompt = prompt, prompt.token_ids
        token_ids, prompt_ids = self._check_token_ids(prompt)
        if not token_ids:
            raise RequestError("empty prompt: at least one token is needed")
        self._check_params(params)
        self._check_length(len(token_ids), draws=params.pooling is None)
        if shown is not None:
            self._check_media(shown)
        longest = min(self.max_model_len, self.capacity_tokens)
        if params.max_tokens is not None:
            longest = min(longest, len(token_ids) + params.max_tokens)
        eos = frozenset[int]() if params.ignore_eos else self.eos_token_ids
        stops = eos.union(params.stop_token_ids)
        if params.min_tokens and len(stops) >= self.vocab_size:
            raise RequestError(
                f"min_tokens={params.min_tokens}: every token of the vocabulary of {self.vocab_size} ends "
                "the answer, so none can be drawn before; name fewer stop_token_ids"
            )
        grammar, end_ids = None, frozenset[int]()
        if params.structured_outputs is not None:
            if self.grammars is None:
                raise RequestError("structured_outputs: this engine compiles no grammars")
            grammar = self.grammars.compile(params.structured_outputs)
            end_ids = self.grammars.end_ids(params.stop_token_ids)
        return Request(
            request_id=request_id,
            prompt=prompt_text,
            prompt_token_ids=token_ids,
            given_ids=prompt_ids,
            params=params,
            max_total_tokens=longest,
            stop_token_ids=stops,
            eos_token_ids=eos,
            grammar=grammar,
            grammar_end_ids=end_ids,
            cache_extra=cache_extra,
            media=() if shown is None else shown.items,
            rope_positions_3T=None if shown is None else shown.rope_positions_3T,
            rope_delta=0 if shown is None else shown.rope_delta,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt's text. Raises ``RequestError``."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer: pass the prompt as token ids")
        if not text:
            raise RequestError("empty prompt: at least one token is needed")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a lone surrogate; tokenizers only say that it is no string
            raise RequestError(f"the prompt is not valid Unicode text: {error}") from None
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_token_ids(self, prompt: Iterable[int]) -> tuple[tuple[int, ...], np.ndarray | None]:
        """The ids, and what they are as an array, where there are enough to make it the faster way."""
        try:
            token_ids = tuple(prompt)
        except TypeError:
            raise RequestError(f"prompt={prompt!r}: must be a string or a list of token ids") from None
        if len(token_ids) >= _MANY_IDS:
            prompt_ids = pack_integers(token_ids)
            if prompt_ids is not None:
                furthest = token_ids[prompt_ids.view(np.uint32).argmax()]  # a negative one, or the largest
                if 0 <= furthest < self.vocab_size:
                    return token_ids, prompt_ids
        if not {int}.issuperset(map(type, token_ids)):
            token_ids = tuple(_as_int(position, token_id) for position, token_id in enumerate(token_ids))
        if token_ids and min(token_ids) >= 0 and max(token_ids) < self.vocab_size:
            return token_ids, None
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"prompt token {position} is {token_id}: must be between 0 and {self.vocab_size - 1}, "
                    "the model's vocabulary"
                )
        return token_ids, None

    def _check_length(self, num_tokens: int, *, draws: bool) -> None:
        """``draws``: room for one token more is needed; an embedding takes all there is."""
        most = num_tokens + int(draws)
        drawn = ", at least one of them generated" if draws else ""
        if most > self.max_model_len:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, but the maximum model length is {self.max_model_len}"
                f"{drawn}; shorten the prompt or raise max_model_len"
            )
        if most > self.capacity_tokens:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, but the whole KV cache holds {self.capacity_tokens}"
                f"{drawn}; shorten the prompt or raise kv_cache_tokens"
            )

    def _check_media(self, prompt: MediaPrompt) -> None:
        if not self.takes_media:
            raise RequestError("this model takes text only: it has no encoder for images and videos")
        num_tokens = len(prompt.token_ids)
        shape = (3, num_tokens)
        if prompt.rope_positions_3T.shape != shape or prompt.rope_positions_3T.dtype != np.int32:
            raise RequestError(
                f"rope positions of shape {prompt.rope_positions_3T.shape} and type "
                f"{prompt.rope_positions_3T.dtype}: {num_tokens} prompt tokens need int32 of shape {shape}"
            )
        lowest = min(int(prompt.rope_positions_3T.min()), num_tokens + prompt.rope_delta)
        if lowest < 0:
            raise RequestError(f"a rope position is {lowest}: none may be below 0")
        ranges = sorted(r for item in prompt.items for r in item.ranges)
        end = 0
        for start, length in ranges:
            if start < end or length < 1 or start + length > num_tokens:
                raise RequestError(
                    f"{length} placeholders at prompt token {start}: ranges of media must hold at least one "
                    f"token, lie apart and within the prompt's {num_tokens} tokens"
                )
            end = start + length
        for item in prompt.items:
            if math.prod(item.grid_thw) != item.num_patches or not item.num_tokens:
                raise RequestError(
                    f"a {item.kind} of grid {item.grid_thw} has {item.num_patches} patches and "
                    f"{item.num_tokens} placeholders: the grid's product must be the number of patches, and "
                    "there must be a placeholder"
                )

    def _check_params(self, params: SamplingParams) -> None:
        if params.pooling is None and not self.makes_text:
            raise RequestError("this model makes embeddings only, no text: ask a server's /v1/embeddings")
        if params.detokenize and self.tokenizer is None:
            raise RequestError("this model has no tokenizer: set detokenize=False to get token ids only")
        for token_id in params.stop_token_ids:
            if token_id >= self.vocab_size:
                raise RequestError(
                    f"stop_token_ids={token_id}: must be below {self.vocab_size}, the size of the vocabulary"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.vocab_size:
                raise RequestError(
                    f"{name}={getattr(params, name)} exceeds {self.vocab_size}, the size of the vocabulary"
                )


def _as_int(position: int, token_id: object) -> int:
    """Also takes other integer types, such as numpy's; never a bool or a float."""
    if type(token_id) is int:
        return token_id
    try:
        if isinstance(token_id, bool):
            raise TypeError
        return operator.index(token_id)  # type: ignore[arg-type]
    except TypeError:
        raise RequestError(f"prompt token {position} is {token_id!r}: token ids must be integers") from None

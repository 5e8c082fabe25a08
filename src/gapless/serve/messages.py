"""What the HTTP process and the engine process say to each other, as msgspec structs.

Prompts cross as token ids: the HTTP process owns templates and tokenising, the engine process owns
detokenising, so text is made where the tokens are and nothing is sent twice. Output crosses as *deltas*: one
``StepOutput`` per engine step with what is new in every stream, so a long answer costs no more per token than
a short one. Arrays of structs are encoded without field names, those of which each step makes hundreds are
kept from the garbage collector (they hold no other struct in a circle), and the patches of images travel
beside their message (``frames.py``). Read ``client.py`` for the seam that the HTTP side programs against.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from gapless.engine.outputs import FinishReason
from gapless.multimodal.items import MediaItem, MediaKind, MediaPrompt, Normalisation


class GenerateRequest(msgspec.Struct, tag="generate", frozen=True, kw_only=True):
    """Generate from ``prompt_token_ids``. ``request_id`` is nobody else's, also later: the last deltas of a
    request that was given up may still be on their way.

    ``params``: fields of ``SamplingParams`` that are not at their default. ``stream`` false: only the last
    delta of each choice is sent, with all of it. ``prompt_logprobs`` k asks for the log-probabilities of the
    prompt's own tokens and of the k best beside them. ``grammar`` constrains the text. Requests with another
    ``cache_extra`` share no cached prefix with this one. ``media``: what the placeholders among the tokens
    stand for. Between HTTP side and client only: ``is_whole``, its reader passes nothing on before the end;
    ``num_deaths``, how many replicas have died with it.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any] = {}
    stream: bool = True
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    cache_extra: bytes = b""
    media: Media | None = None
    is_whole: bool = False
    num_deaths: int = 0


class MediaPart(msgspec.Struct, frozen=True, kw_only=True):
    """One image or video, as ``MediaItem``."""

    kind: MediaKind
    patches_PC: np.ndarray
    grid_thw: tuple[int, int, int]
    content_hash: bytes
    ranges: list[tuple[int, int]]
    normalisation: Normalisation | None = None


class Media(msgspec.Struct, frozen=True, kw_only=True):
    """The images and videos of a prompt and what the decoder needs besides, as ``MediaPrompt``. A client that
    has sent ``parts`` empties them: they are megabytes."""

    parts: list[MediaPart]
    rope_positions_3T: np.ndarray
    rope_delta: int

    @classmethod
    def of(cls, prompt: MediaPrompt) -> Media:
        """Hashes what nobody has hashed, which takes its time."""
        parts = [
            MediaPart(
                kind=item.kind,
                patches_PC=item.array_PC,
                grid_thw=item.grid_thw,
                content_hash=item.content_hash,
                ranges=list(item.ranges),
                normalisation=item.normalisation,
            )
            for item in prompt.items
        ]
        return cls(parts=parts, rope_positions_3T=prompt.rope_positions_3T, rope_delta=prompt.rope_delta)

    def prompt(self, token_ids: list[int]) -> MediaPrompt:
        items = (
            MediaItem(
                kind=part.kind,
                patches_PC=part.patches_PC,
                grid_thw=part.grid_thw,
                known_hash=part.content_hash,
                ranges=tuple(part.ranges),
                normalisation=part.normalisation,
            )
            for part in self.parts
        )
        return MediaPrompt(
            token_ids=tuple(token_ids),
            items=tuple(items),
            rope_positions_3T=self.rope_positions_3T,
            rope_delta=self.rope_delta,
        )

    @property
    def num_bytes(self) -> int:
        return sum(part.patches_PC.nbytes for part in self.parts)


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on the text: a JSON schema (as JSON text), any JSON object, a regular expression, EBNF."""

    kind: Literal["json_schema", "json_object", "regex", "ebnf"]
    text: str = ""


class EmbedRequest(msgspec.Struct, tag="embed", frozen=True, kw_only=True):
    """Pool the hidden states of ``prompt_token_ids`` into one vector."""

    request_id: str
    prompt_token_ids: list[int]
    cache_extra: bytes = b""


class AbortRequest(msgspec.Struct, tag="abort", frozen=True, kw_only=True):
    """End a request now. Unknown ids are ignored: it may just have finished."""

    request_id: str


class Query(msgspec.Struct, tag="query", frozen=True, kw_only=True):
    """Ask for ``what``: the report, or the statistics since the start. Answered by ``Answer``."""

    query_id: int
    what: Literal["report", "stats"]


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache", frozen=True, kw_only=True):
    """Forget all cached prefixes. Answered by ``Answer``, once it is done."""

    query_id: int


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True, kw_only=True):
    """Finish what runs within ``drain_s`` seconds, abort the rest, end the process."""

    drain_s: float


ToEngine = GenerateRequest | EmbedRequest | AbortRequest | Query | ResetPrefixCache | Shutdown


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One candidate at one position; ``text`` is the token alone, decoded."""

    token_id: int
    logprob: float
    rank: int
    text: str | None = None


class Delta(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What is new in choice ``index`` of a request since its last delta.

    ``logprobs``: per new token its candidates, the drawn one first. ``prompt_logprobs`` comes once, with the
    first delta: per prompt token its candidates, the token itself first; None for the first token.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[list[TokenLogprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache; final delta only."""


class StepOutput(msgspec.Struct, tag="step", frozen=True):
    """Everything one engine step has changed."""

    deltas: list[Delta]


class Embedding(msgspec.Struct, tag="embedding", frozen=True):
    request_id: str
    values: list[float]
    error: str | None = None


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The request was not accepted; ``message`` says why. The caller's fault."""

    request_id: str
    message: str


class Answer(msgspec.Struct, tag="answer", frozen=True):
    query_id: int
    value: dict[str, Any]


class Ready(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """The engine serves from now on."""

    info: EngineInfo


class Failed(msgspec.Struct, tag="failed", frozen=True, kw_only=True):
    """The engine could not start, or its loop has died. Nothing follows."""

    message: str
    is_user_error: bool = False
    """A wrong option or model, not a fault of the program."""


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """While starting: stage, how much is done, how much there is."""

    stage: str
    done: int
    total: int


class Heartbeat(msgspec.Struct, tag="heartbeat", frozen=True):
    """The loop is alive. Sent once a second and with the statistics that metrics need."""

    stats: dict[str, Any]


FromEngine = Ready | Failed | Progress | Heartbeat | StepOutput | Embedding | Refused | Answer


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a started engine."""

    model: str
    """What ``--model-path`` named."""
    vocab_size: int
    max_model_len: int
    max_running_requests: int
    block_size: int
    num_blocks: int
    eos_token_ids: list[int]
    device: str
    takes_media: bool = False
    """Whether images and videos may stand in prompts."""
    config: dict[str, Any]
    """The resolved options."""
    plan: dict[str, Any]
    """The graph plan with its decisions, as ``GraphPlan.to_dict``."""
    startup_s: float

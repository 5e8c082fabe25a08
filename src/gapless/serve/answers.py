"""A whole answer from its deltas: what arrived for each choice, and the usage of a request.

Both forms of an answer count with this: the streamed one needs the same numbers at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from gapless.serve.client import EngineClient, ReplicaLostError
from gapless.serve.deltas import Deltas, deltas_of
from gapless.serve.messages import Delta, GenerateRequest, TokenLogprob
from gapless.serve.metrics import RequestClock
from gapless.serve.responses import PromptDetails, Usage


@dataclass(slots=True)
class Choice:
    """Everything that came for one choice of one prompt."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        if delta.logprobs:
            self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason = "length" if delta.finish_reason == "length" else "stop"
            self.stop_reason = delta.stop_reason


class UsageCounter:
    """``num_prompt_tokens``: of each prompt. A prompt counts once, however many choices it has."""

    def __init__(self, num_prompt_tokens: Sequence[int]) -> None:
        self._num_prompt_tokens = sum(num_prompt_tokens)
        self._num_cached = [0] * len(num_prompt_tokens)
        self.num_completion_tokens = 0

    def add(self, position: int, delta: Delta) -> None:
        self.num_completion_tokens += len(delta.token_ids)
        if delta.num_cached_tokens > self._num_cached[position]:
            self._num_cached[position] = delta.num_cached_tokens

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self.num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self.num_completion_tokens,
            prompt_tokens_details=PromptDetails(cached_tokens=sum(self._num_cached)),
        )


@dataclass(slots=True)
class Collected:
    """``choices[position][index]``; ``prompt_logprobs[position]`` where they were asked for."""

    choices: list[list[Choice]]
    prompt_logprobs: dict[int, list[list[TokenLogprob] | None]]
    usage: UsageCounter


async def collect_whole(
    client: EngineClient, requests: Sequence[GenerateRequest], *, clock: RequestClock, n: int
) -> Collected:
    """Answers of which their caller sees nothing before the end: so all begin anew, once, when a replica dies
    in the middle. Under other names: the first attempt of some may still be running."""
    lengths = [len(request.prompt_token_ids) for request in requests]
    whole = [msgspec.structs.replace(request, is_whole=True) for request in requests]
    try:
        return await collect(deltas_of(client, whole, clock=clock), num_prompt_tokens=lengths, n=n)
    except ReplicaLostError as error:
        if not error.may_restart:
            raise
    clock.restart()
    again = [
        msgspec.structs.replace(request, request_id=f"{request.request_id}-again", num_deaths=1)
        for request in requests
    ]
    return await collect(deltas_of(client, again, clock=clock), num_prompt_tokens=lengths, n=n)


async def collect(deltas: Deltas, *, num_prompt_tokens: Sequence[int], n: int) -> Collected:
    """Read to the end. Raises what ``deltas`` raises; cancelling it aborts the request."""
    collected = Collected(
        choices=[[Choice() for _ in range(n)] for _ in num_prompt_tokens],
        prompt_logprobs={},
        usage=UsageCounter(num_prompt_tokens),
    )
    try:
        async for position, items in deltas:
            for delta in items:
                collected.choices[position][delta.index].add(delta)
                collected.usage.add(position, delta)
                if delta.prompt_logprobs is not None:
                    collected.prompt_logprobs[position] = delta.prompt_logprobs
    finally:
        await deltas.aclose()
    return collected

"""Requests that arrive over time, run through the engine's step loop, with the moment of every token.

It drives ``EngineCore`` as a server does: whatever has arrived is queued, one step runs, and what it returned
gets the time at which it did. The clock of a request starts when it *arrives*, so waiting counts even while
the loop was busy with a step. Tokens that one step returns together share the time since the last one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from gapless.bench.stats import percentiles
from gapless.sampling.params import SamplingParams

if TYPE_CHECKING:
    from gapless.engine.core import EngineCore


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A prompt and the second at which it comes."""

    at_s: float
    prompt: list[int]
    params: SamplingParams


@dataclass(kw_only=True, slots=True)
class Served:
    """One request: when each of its tokens was there, in seconds since it arrived."""

    num_prompt_tokens: int
    token_times_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0]

    def gaps_s(self) -> list[float]:
        times = self.token_times_s
        return [later - earlier for earlier, later in pairwise(times)]

    def add(self, num_tokens: int, at_s: float) -> None:
        """``num_tokens`` more at ``at_s``; several at once are spread over the time since the last one."""
        last = self.token_times_s[-1] if self.token_times_s else at_s
        for index in range(1, num_tokens + 1):
            self.token_times_s.append(last + (at_s - last) * index / num_tokens)


def serve(
    core: EngineCore,
    arrivals: Sequence[Arrival],
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[Served], float]:
    """Run ``arrivals`` (in order of time) to their end; the requests, and the seconds it took in all.

    Raises ``RuntimeError`` if one of them fails: a benchmark of failures would look fast.
    """
    served = [Served(num_prompt_tokens=len(arrival.prompt)) for arrival in arrivals]
    start = clock()
    next_index = 0
    while next_index < len(arrivals) or core.has_unfinished():
        now = clock() - start
        while next_index < len(arrivals) and arrivals[next_index].at_s <= now:
            arrival = arrivals[next_index]
            core.add_request(str(next_index), arrival.prompt, arrival.params)
            next_index += 1
        if not core.has_unfinished():
            sleep(arrivals[next_index].at_s - now)
            continue
        outputs = core.step()
        now = clock() - start
        for output in outputs:
            index = int(output.request_id)
            (choice,) = output.outputs
            if choice.error is not None:
                raise RuntimeError(f"request {index} failed: {choice.error}")
            one = served[index]
            one.add(len(choice.token_ids) - len(one.token_times_s), now - arrivals[index].at_s)
    return served, clock() - start


def latencies(served: Sequence[Served]) -> dict[str, Any]:
    """Percentiles in milliseconds: time to the first token, between tokens, and of a whole request."""
    return {
        "ttft_ms": percentiles([1e3 * one.ttft_s for one in served]),
        "itl_ms": percentiles([1e3 * gap for one in served for gap in one.gaps_s()]),
        "e2e_ms": percentiles([1e3 * one.token_times_s[-1] for one in served]),
    }

"""What benchmarks feed an engine: fresh random token ids, and prompt lengths from a distribution.

Prompts are drawn anew for every repeat, so that nothing can be served from a cache of earlier ones. All
draws come from one generator in a fixed order: the same seed gives the same prompts here and in a run of
another engine that draws in that order. Nothing here imports torch, so a process that holds another engine
can use it too.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, replace
from typing import Literal

from gapless.errors import ConfigError

_SPECIAL_TOKENS = 10
"""Ids left out at both ends of the vocabulary, where special tokens lie."""


class PromptSource:
    """Random prompts for a vocabulary."""

    def __init__(self, vocab_size: int, *, seed: int = 0) -> None:
        margin = _SPECIAL_TOKENS if vocab_size > 4 * _SPECIAL_TOKENS else 0
        self._low, self._high = margin, vocab_size - margin
        self.rng = random.Random(seed)

    def prompt(self, num_tokens: int) -> list[int]:
        return [self.rng.randrange(self._low, self._high) for _ in range(num_tokens)]

    def prompts(self, lengths: list[int]) -> list[list[int]]:
        return [self.prompt(length) for length in lengths]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Prompt lengths between two bounds, uniform or log-uniform (many short ones, few long ones)."""

    low: int
    high: int
    shape: Literal["uniform", "log"] = "uniform"

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """``512``, ``128:1024`` or ``log:16:4096``. Raises ``ConfigError``."""
        found = re.fullmatch(r"(log:)?(\d+)(?::(\d+))?", text)
        if found is None:
            raise ConfigError(f"--lengths={text!r}: must be like 512, 128:1024 or log:16:4096")
        low = int(found[2])
        high = low if found[3] is None else int(found[3])
        if not 1 <= low <= high:
            raise ConfigError(f"--lengths={text}: the shortest must be at least 1 and not above the longest")
        return cls(low=low, high=high, shape="log" if found[1] else "uniform")

    def draw(self, rng: random.Random, count: int) -> list[int]:
        if self.shape == "uniform":
            return [rng.randint(self.low, self.high) for _ in range(count)]
        low, high = math.log(self.low), math.log(self.high)
        return [min(self.high, round(math.exp(rng.uniform(low, high)))) for _ in range(count)]

    def capped(self, limit: int) -> Lengths:
        """The same with nothing above ``limit``."""
        return replace(self, low=min(self.low, limit), high=min(self.high, limit))

    def __str__(self) -> str:
        text = str(self.low) if self.low == self.high else f"{self.low}:{self.high}"
        return f"log:{text}" if self.shape == "log" else text


def poisson_arrivals(rng: random.Random, count: int, *, rate: float) -> list[float]:
    """Seconds at which ``count`` requests arrive, ``rate`` a second on average; the first one at 0."""
    arrivals, now = [], 0.0
    for _ in range(count):
        arrivals.append(now)
        now += rng.expovariate(rate)
    return arrivals

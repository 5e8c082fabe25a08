"""Which part of a model one of several ranks holds: arithmetic alone, no process group.

A ``Shard`` is carried by ``models.layers.Placement`` to every parameter that is split. Sizes that may carry
zeros behind their end (a vocabulary, an intermediate size) are split into equal parts of which the last ones
are partly or wholly padding; what may not (attention heads) must divide. Invariants: the parts of all ranks
are disjoint, in the order of the ranks, and cover everything; with one rank the part is the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gapless.errors import ConfigError


class Span(NamedTuple):
    """``length`` items from ``start`` on."""

    start: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Rank ``rank`` of ``size`` that hold a model together."""

    rank: int = 0
    size: int = 1
    group: int = 0
    """Names the ranks' process group in ``collectives.py``; without meaning for one rank."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} of {self.size}: must be between 0 and {self.size - 1}")

    @property
    def is_whole(self) -> bool:
        """This rank holds everything."""
        return self.size == 1

    def split(self, total: int, *, what: str) -> Span:
        """This rank's part of ``total`` items. Raises ``ConfigError`` where they do not divide."""
        if total % self.size:
            raise ConfigError(
                f"--tensor-parallel-size={self.size} does not divide {what}={total}; "
                f"sizes that do: {_divisors_text(total)}"
            )
        length = total // self.size
        return Span(self.rank * length, length)

    def split_kv_heads(self, num_kv_heads: int) -> Span:
        """This rank's key/value heads: divided, or one that several ranks hold where there are fewer heads
        than ranks. Raises ``ConfigError`` where neither works out."""
        if num_kv_heads % self.size == 0:
            return self.split(num_kv_heads, what="num_key_value_heads")
        if self.size % num_kv_heads:
            raise ConfigError(
                f"--tensor-parallel-size={self.size} is neither a divisor nor a multiple of "
                f"num_key_value_heads={num_kv_heads}"
            )
        return Span(self.rank // (self.size // num_kv_heads), 1)

    def padded_length(self, total: int) -> int:
        """Items of every rank's part, padding included, where ``total`` need not divide."""
        return -(-total // self.size)

    def split_padded(self, total: int) -> Span:
        """The real items in this rank's part of ``padded_length(total)``; the rest of it is padding."""
        length = self.padded_length(total)
        start = min(self.rank * length, total)
        return Span(start, min(length, total - start))


WHOLE = Shard()
"""One rank that holds everything."""


def _divisors_text(total: int) -> str:
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    shown = ", ".join(map(str, divisors[:12]))
    return shown if len(divisors) <= 12 else f"{shown}, …"

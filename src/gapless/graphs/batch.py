"""A step as it is (``BatchShape``) and the key of the graph that serves it (``BatchDescriptor``).

The shape is what the scheduler produced: real counts. The descriptor is padded and is the *least* that
identifies a graph; capture and lookup build it through the same functions of the dispatcher, so a captured
graph is always found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class BatchDescriptor(NamedTuple):
    """Key of one captured graph. All counts are padded counts."""

    num_tokens: int
    num_reqs: int
    uniform: bool = False
    """All query lengths equal (pure decode; with speculation 1 + number of draft tokens)."""
    has_lora: bool = False
    variant: int = 0
    """Tells graphs of equal counts apart, where something else is frozen in them: an encoder's boundaries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """One step before padding. ``query_lens`` are the real query lengths, one per request."""

    query_lens: tuple[int, ...]
    has_lora: bool = False
    uses_cascade: bool = False
    """Shared-prefix attention: never inside a full graph."""

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def num_reqs(self) -> int:
        return len(self.query_lens)

    def is_uniform(self, query_len: int) -> bool:
        """True when every request has exactly ``query_len`` tokens (looks at lengths, never only at
        totals)."""
        return bool(self.query_lens) and self.query_lens.count(query_len) == len(self.query_lens)

"""The vocabulary of encoder graphs: modes, options, and reasons for eager runs."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from gapless.errors import ConfigError
from gapless.graphs.encoder_budgets import (
    DEFAULT_FINE_FROM,
    DEFAULT_SMALLEST,
    budget_ladder,
    ceil_to,
    normalise_budgets,
)


class EncoderMode(enum.StrEnum):
    """How an encoder runs; ``off`` is eager."""

    BUDGET = "budget"
    EXACT = "exact"
    OFF = "off"


class EncoderFallback(enum.StrEnum):
    """Why items ran eagerly."""

    DISABLED = "disabled"
    LARGER_THAN_LARGEST = "larger_than_largest_budget"
    LONGER_THAN_BUFFERS = "longer_than_max_content_len"
    CAPTURE_FAILED = "capture_failed"
    GRAPH_TOO_LARGE = "graph_larger_than_max_bytes"
    INSIDE_CAPTURE = "inside_capture"
    PADDED_EAGER = "padded_eager"
    RELEASED = "released"


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderOptions:
    """``max_tokens`` is the largest run in a graph: the largest budget of budget mode, ``max_content_len`` of
    exact mode. ``budgets`` is an explicit list instead of the ladder that starts at ``smallest_budget``,
    doubles, and from ``fine_from`` on also has sizes in between: steps of a quarter up to twice that, of a
    half above (None: it only doubles). ``max_graphs`` and ``max_bytes`` (of the pool) bound the graphs of
    either mode: exact ones are evicted, budgets that do not fit are given up, the largest first. Raises
    ``ConfigError``.
    """

    mode: EncoderMode = EncoderMode.BUDGET
    max_tokens: int = 8192
    smallest_budget: int = DEFAULT_SMALLEST
    fine_from: int | None = DEFAULT_FINE_FROM
    budgets: tuple[int, ...] | None = None
    max_graphs: int = 64
    max_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        for name in ("max_tokens", "smallest_budget", "max_graphs", "max_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ConfigError(f"{name}={value!r} of encoder graphs must be a positive number, and whole")
        if self.fine_from is not None and self.fine_from <= 0:
            raise ConfigError(f"fine_from={self.fine_from} of encoder graphs must be positive, or None")
        if self.budgets is not None and not isinstance(self.budgets, (tuple, list)):
            raise ConfigError(f"budgets={self.budgets!r} of encoder graphs must be a list of sizes")
        if self.budgets is not None and self.mode is not EncoderMode.BUDGET:
            raise ConfigError(f"budgets={self.budgets} mean nothing in encoder mode {self.mode}")

    def ladder(self, granule: int) -> tuple[int, ...]:
        """The sizes that static memory is made for, ascending: the budgets, or the maximum alone.

        Raises ``ConfigError`` for more budgets than ``max_graphs``.
        """
        if self.mode is not EncoderMode.BUDGET:
            return (ceil_to(self.max_tokens, granule),)
        if self.budgets is not None:
            ladder = normalise_budgets(self.budgets, granule=granule)
        else:
            smallest = min(self.smallest_budget, self.max_tokens)
            ladder = budget_ladder(
                smallest=smallest, largest=self.max_tokens, granule=granule, fine_from=self.fine_from
            )
        if len(ladder) > self.max_graphs:
            raise ConfigError(
                f"{len(ladder)} token budgets exceed max_graphs={self.max_graphs}; raise it, or start at a "
                f"larger smallest_budget than {ladder[0]}"
            )
        return ladder

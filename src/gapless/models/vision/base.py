"""What the engine needs from a vision tower: embeddings for media items, from graphs where there are any.

Invariant: what ``encode`` returns is the caller's own memory, never a view of a graph's output, so it may be
cached for as long as the caller likes. ``N`` placeholder tokens of an item, ``E`` the decoder's hidden size,
``L`` layers that take deepstack features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from gapless.multimodal.items import MediaItem


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedMedia:
    """One item's rows, on the model's device and in its dtype."""

    embeds_NE: Tensor
    deepstack_LNE: Tensor | None = None
    """Qwen3-VL: what is added to the hidden states behind each of the first ``L`` decoder layers."""


class MediaEncoder(Protocol):
    """A vision tower with its graphs."""

    def encode(self, items: Sequence[MediaItem]) -> list[EncodedMedia]:
        """Embeddings of ``items``, in their order; several may share one replay."""

    def capture(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Capture what is captured at start-up (token budgets); nothing in exact mode or without graphs.
        ``on_progress`` is told how many are done, and of how many."""

    def report(self) -> dict[str, Any]:
        """The schema of ``graphs/report.py`` for its part, and ``encoder`` with what only encoders have."""

    def release(self) -> None:
        """Give graphs and buffers back. Safe to call twice."""

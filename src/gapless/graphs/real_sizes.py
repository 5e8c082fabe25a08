"""The real sizes of a step, on the device: for code inside a graph that must know where padding begins.

Shapes inside a graph are the bucket's. What cannot do without the real count (a mean over tokens, a router,
a statistic) reads ``num_real("tokens")``, a 0-d tensor that is refreshed before every replay. Eager runs get
the same, so the callable has one code path. Read ``graphed.py`` next.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gapless.errors import GraphError
from gapless.graphs.context import get_forward_context


class RealSizes:
    """What the forward context of a graphed callable carries. ``counts`` is static memory, one per symbol."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        device: torch.device,
        *,
        counts: Tensor | None = None,
    ) -> None:
        self._sizes, self._device, self._counts = dict(sizes), device, counts
        self.was_read = False

    def of(self, symbol: str) -> Tensor:
        if symbol not in self._sizes:
            raise GraphError(f"num_real({symbol!r}): the dynamic dimensions are {', '.join(self._sizes)}")
        self.was_read = True
        if self._counts is not None:
            return self._counts[list(self._sizes).index(symbol)]
        return torch.full((), self._sizes[symbol], dtype=torch.int32, device=self._device)


def num_real(symbol: str) -> Tensor:
    """How many entries of a dynamic dimension are real in this step: a 0-d int32 tensor on the device.

    To be called from within a graphed callable. Raises ``GraphError`` elsewhere and for an unknown dimension.
    """
    try:
        batch = get_forward_context().batch
    except RuntimeError:
        batch = None
    if not isinstance(batch, RealSizes):
        raise GraphError(f"num_real({symbol!r}) works inside a callable made by gapless.graphed only")
    return batch.of(symbol)

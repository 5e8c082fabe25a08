"""The real sizes of a step, on the device: for code inside a graph that must know where padding begins.

Shapes inside a graph are the bucket's. What cannot do without the real count (a mean over tokens, a router,
a statistic) reads ``num_real("tokens")``, a 0-d tensor that is refreshed before every replay. Eager runs get
the same, so the callable has one code path. Read ``graphed.py`` next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gapless.errors import GraphError
from gapless.graphs.context import get_forward_context


class RealSizes:
    """What the forward context of a graphed callable carries: host sizes of an eager run, or ``counts``,
    static memory with one entry per symbol. Without either nothing can be read."""

    def __init__(
        self,
        symbols: Sequence[str],
        *,
        sizes: Mapping[str, int] | None = None,
        device: torch.device | None = None,
        counts: Tensor | None = None,
    ) -> None:
        self._symbols, self._sizes, self._device, self._counts = tuple(symbols), sizes, device, counts
        self.was_read = False

    def of(self, symbol: str) -> Tensor:
        if symbol not in self._symbols:
            raise GraphError(f"num_real({symbol!r}): the dynamic dimensions are {', '.join(self._symbols)}")
        self.was_read = True
        if self._counts is not None:
            return self._counts[self._symbols.index(symbol)]
        if self._sizes is not None:
            return torch.full((), self._sizes[symbol], dtype=torch.int32, device=self._device)
        raise GraphError(
            f"num_real({symbol!r}) was not called in the first runs, from which the graphs were planned; "
            "call it at every size"
        )


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

"""GraphWrapper: adds capture and replay to a callable, and otherwise stays out of the way.

A wrapper belongs to one runtime mode and trusts the forward context: another mode, or none, means call
through. So a full graph may wrap a model whose pieces are wrapped too, and only one of them acts in any step.
Warm-up is never done here; the runner does it in mode NONE.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gapless.errors import GraphError, StaleAddressError
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.context import get_forward_context
from gapless.graphs.modes import Phase, RuntimeMode, Strategy
from gapless.graphs.store import GraphKey, GraphStore


class GraphWrapper:
    """``fn`` with graphs of one runtime mode. ``fn``'s arguments must be static: a replay does not look at
    them."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        runtime_mode: RuntimeMode,
        phase: Phase,
        strategy: Strategy,
        store: GraphStore,
    ) -> None:
        if runtime_mode is RuntimeMode.NONE:
            raise GraphError("a wrapper needs a runtime mode in which it acts: PIECEWISE or FULL")
        self.fn = fn
        self.runtime_mode = runtime_mode
        self._phase, self._strategy, self._store = phase, strategy, store
        self._captured: dict[BatchDescriptor, tuple[GraphKey, list[int | None]]] = {}
        """With the addresses of the arguments of the capture."""

    def __call__(self, *args: Any) -> Any:
        """Call through, capture (only while the store is open) or replay, as the forward context says.

        Outputs of a replay are static memory: valid until the next run. Raises ``CaptureClosedError`` when
        the context names a graph that does not exist and captures are closed, and ``StaleAddressError`` when
        an argument is not the tensor that the graph reads.
        """
        context = get_forward_context()
        if context.mode is not self.runtime_mode or context.descriptor is None:
            return self.fn(*args)
        key, captured_addresses = self._captured.get(context.descriptor, (None, None))
        if key is None:
            key = GraphKey(self._phase, self.runtime_mode, context.descriptor)
        entry = self._store.get(key)
        addresses = [arg.data_ptr() if isinstance(arg, Tensor) else None for arg in args]
        if entry is None:
            entry = self._store.capture(key, lambda: self.fn(*args), self._strategy)
            self._captured[context.descriptor] = key, addresses
            return entry.outputs
        if captured_addresses is not None and addresses != captured_addresses:
            raise StaleAddressError(
                f"an argument of {key} lies at another address than when it was captured: graphs read static "
                "inputs, so copy the new values into the tensors of the capture"
            )
        if self._store.is_capturing and self._strategy is Strategy.TC_PIECEWISE:
            raise GraphError(
                f"{key} is captured already: pieces replay only after the capture stage has ended"
            )
        entry.program.replay()
        return entry.outputs

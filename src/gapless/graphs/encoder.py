"""The encoder runner: images and videos of any size run as graphs, each getting back rows of its own.

*Budget* mode packs several items into one replay of a token budget (``encoder_packed.py``); *exact* mode has
a graph for every size and segmentation it has seen (``encoder_exact.py``). Items that no graph serves run
eagerly and are counted with their reason. Invariants: results are copies, never views of a graph's memory;
the order of items is kept; packing costs no more than separate runs would (``encoder_budgets.py``). An
encoder comes in as an adapter (``encoder_adapter.py``); ``encoder_graphs`` is the way in for libraries.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from gapless.errors import ConfigError, GraphError
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.capture import capture_turn
from gapless.graphs.device import get_device
from gapless.graphs.device.base import GraphDevice
from gapless.graphs.device.exclusive import is_recording_here
from gapless.graphs.encoder_adapter import EncoderAdapter, ImageBatch, Values
from gapless.graphs.encoder_budgets import Pack, Sizes, greedy_packs, total
from gapless.graphs.encoder_exact import ExactGraphs
from gapless.graphs.encoder_graphs import EncoderMemory, Generation, owned_rows, run_fresh
from gapless.graphs.encoder_options import EncoderFallback, EncoderMode, EncoderOptions
from gapless.graphs.encoder_packed import BudgetGraphs
from gapless.graphs.modes import Phase, RuntimeMode, Strategy
from gapless.graphs.report import StepLog, build_report
from gapless.graphs.store import SharedPool

__all__ = [
    "EncoderFallback",
    "EncoderMode",
    "EncoderOptions",
    "EncoderRunner",
    "ImageBatch",
    "encoder_graphs",
]

ItemT = TypeVar("ItemT")
Rows = tuple[Tensor, ...]
"""One item's results: a tensor per output."""


class EncoderRunner(Generic[ItemT]):
    """Runs an encoder's items. ``capture`` first, or the first ``run`` does it. A context manager that
    releases; threads take turns."""

    def __init__(
        self,
        adapter: EncoderAdapter[ItemT],
        *,
        device: GraphDevice,
        options: EncoderOptions | None = None,
        log: StepLog | None = None,
        pool: SharedPool | None = None,
    ) -> None:
        """``log``: where runs are counted (an engine's own). ``pool``: graph memory shared with others that
        never run at the same time; by default the encoder has its own. Raises ``ConfigError``."""
        self.adapter, self.device = adapter, device
        self.options = options or EncoderOptions()
        self.log = log or StepLog()
        self.ladder = self.options.ladder(adapter.granule)
        self._lock = threading.RLock()
        self._is_captured = self._is_released = False
        self._memory: EncoderMemory | None = None
        self._graphs: BudgetGraphs | ExactGraphs | None = None
        if self.mode is EncoderMode.OFF:
            return
        self._memory = EncoderMemory(adapter, max_sizes=adapter.most(self.ladder[-1]), device=device)
        if self.mode is EncoderMode.BUDGET:
            self._graphs = BudgetGraphs(
                self._memory, ladder=self.ladder, max_bytes=self.options.max_bytes, pool=pool
            )
        else:
            bounds = {"max_graphs": self.options.max_graphs, "max_bytes": self.options.max_bytes}
            self._graphs = ExactGraphs(self._memory, **bounds, pool=pool)

    @property
    def mode(self) -> EncoderMode:
        return self.options.mode

    @property
    def graphs(self) -> BudgetGraphs | ExactGraphs:
        """The graphs of this mode. Raises ``GraphError`` where there are none."""
        if self._graphs is None:
            why = "was released" if self._is_released else f"runs in mode {self.mode}"
            raise GraphError(f"this encoder {why}, so it has no graphs")
        return self._graphs

    @property
    def generation(self) -> Generation | None:
        return self._graphs.generation if self._graphs is not None else None

    @property
    def static_bytes(self) -> int:
        """Inputs, workspaces and outputs: what graphs need beside their pool."""
        if self._memory is None or self.generation is None:
            return 0
        return self._memory.num_bytes + self.generation.output_bytes

    def buffers(self) -> dict[str, Tensor]:
        """All static memory by name: inputs, workspaces, outputs."""
        if self._memory is None or self.generation is None:
            return {}
        return self._memory.buffers() | self.generation.outputs

    def capture(self, *, on_progress: Callable[[int, int], None] | None = None) -> Self:
        """Capture the token budgets, largest first, and time them on a GPU; nothing in the other modes. A
        budget whose capture fails stays eager and is in the report."""
        if not self._is_captured:
            with capture_turn(), self._lock, torch.no_grad():
                if not self._is_captured and isinstance(self._graphs, BudgetGraphs):
                    self._graphs.capture(on_progress)
                self._is_captured = True
        return self

    def run(self, items: Sequence[ItemT]) -> list[Rows]:
        """Rows of every item, in order; the caller's own."""
        if not items:
            return []
        sizes = [self.adapter.sizes_of(item) for item in items]
        if self._reason_for_none() is None:
            return self._with_graphs(items, sizes, RuntimeMode.FULL)
        with self._lock, torch.no_grad():
            return self._joined_eager(items, sizes)

    def eager(self, items: Sequence[ItemT]) -> list[Rows]:
        """Every item by itself, at its real size, without graphs and padding. Not counted."""
        results: list[Rows] = []
        with torch.no_grad():
            for item in items:
                sizes = self.adapter.sizes_of(item)
                results += owned_rows(self._fresh([item], sizes), self.adapter, [sizes])
        return results

    def padded_eager(self, items: Sequence[ItemT]) -> list[Rows]:
        """The packs in the budgets (or the exact sizes) that ``run`` would replay, without their graphs: what
        a replay equals bit for bit. What no graph serves runs eagerly here, too."""
        sizes = [self.adapter.sizes_of(item) for item in items]
        assert self.graphs is not None  # raises without
        return self._with_graphs(items, sizes, RuntimeMode.NONE)

    def report(self) -> dict[str, Any]:
        """The report schema of ``report.py``, and ``encoder`` with what only encoders have."""
        is_budget = self.mode is EncoderMode.BUDGET
        plan: dict[str, Any] = {
            "mode": None,
            "strategy": str(Strategy.DISABLED if self.mode is EncoderMode.OFF else Strategy.FULL),
            "sizes": {self.adapter.symbol: list(self.ladder) if is_budget else []},
            "decisions": [],
        }
        with self._lock:  # a run on another thread adds to the counts, a release takes the store away
            store = self.generation.store if self.generation is not None else None
            return build_report(plan=plan, store=store, log=self.log) | {"encoder": self.summary()}

    def summary(self) -> dict[str, Any]:
        """Mode, budgets with their costs and seconds at start-up, waste by padding, and what the exact cache
        did."""
        seen = list(self.log.replays.items())  # threads that run add to it
        replays = [counts for (phase, _, _), counts in seen if phase is Phase.ENCODER]
        tokens, padding = sum(c.tokens for c in replays), sum(c.padding for c in replays)
        found: dict[str, Any] = {
            "mode": str(self.mode),
            "max_tokens": self.ladder[-1],
            "static_bytes": self.static_bytes,
            "tokens": tokens,
            "padding": padding,
            "padding_share": round(padding / (tokens + padding), 4) if padding else 0.0,
        }
        if isinstance(self._graphs, BudgetGraphs):
            found["budgets"] = [{"tokens": b.tokens, "cost": b.cost} for b in self._graphs.budgets]
            found["start_up_s"] = {name: round(s, 3) for name, s in self._graphs.start_up_s.items()}
        if isinstance(self._graphs, ExactGraphs):
            found |= asdict(self._graphs.counts)
        return found

    def release(self) -> None:
        """Give graphs and buffers back; runs are eager from then on. Safe to call twice."""
        with self._lock:
            self._is_released = True
            if self._graphs is not None:
                self._graphs.release()
            self._graphs = self._memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _reason_for_none(self) -> EncoderFallback | None:
        """Why no graph may serve this call at all."""
        if self._is_released:
            return EncoderFallback.RELEASED
        if self.mode is EncoderMode.OFF:
            return EncoderFallback.DISABLED
        return EncoderFallback.INSIDE_CAPTURE if is_recording_here() else None

    def _with_graphs(self, items: Sequence[ItemT], sizes: Sequence[Sizes], mode: RuntimeMode) -> list[Rows]:
        """One that may capture takes the lock of all captures first, for a capture may contain this encoder:
        taken the other way round, each could wait for the other."""
        self.capture()
        with self._lock, _no_grad():
            graphs = self._graphs
            if not isinstance(graphs, ExactGraphs):
                return self._run(items, sizes, mode)
            if len(items) == 1:
                found = graphs.known(sizes[0], self.adapter.bounds_of(items))
                known = [] if found is None else [found]
            else:
                bounds = (self.adapter.bounds_of([item]) for item in items)
                known = [found for found in map(graphs.known, sizes, bounds) if found is not None]
            if len(known) == len(items):
                return [
                    rows
                    for item, own, found in zip(items, sizes, known, strict=True)
                    for rows in self._run_known(graphs, item, own, found, mode)
                ]
        with capture_turn(), self._lock, torch.no_grad():
            return self._run(items, sizes, mode)

    def _joined_eager(self, items: Sequence[ItemT], sizes: Sequence[Sizes]) -> list[Rows]:
        reason = self._reason_for_none() or EncoderFallback.RELEASED
        packs = greedy_packs(sizes, self.adapter.most(self.ladder[-1]))
        return [rows for p in packs for rows in self._eager(items[p.own], sizes[p.own], reason)]

    def _run(self, items: Sequence[ItemT], sizes: Sequence[Sizes], mode: RuntimeMode) -> list[Rows]:
        if self._graphs is None:  # released since it was asked for
            return self._joined_eager(items, sizes)
        if isinstance(self._graphs, ExactGraphs):
            graphs = self._graphs
            return [
                rows
                for item, own in zip(items, sizes, strict=True)
                for rows in self._run_exact(graphs, item, own, mode)
            ]
        packs = self._graphs.plan(sizes)
        return [
            rows
            for pack in packs
            for rows in self._run_pack(self._graphs, pack, items[pack.own], sizes[pack.own], mode)
        ]

    def _run_pack(
        self,
        graphs: BudgetGraphs,
        pack: Pack,
        items: Sequence[ItemT],
        sizes: Sequence[Sizes],
        mode: RuntimeMode,
    ) -> list[Rows]:
        if pack.budget is None:
            return self._eager(items, sizes, EncoderFallback.LARGER_THAN_LARGEST)
        reason = graphs.reason_for_none(pack.budget)
        if reason is not None:
            return self._eager(items, sizes, reason)
        real = total(sizes)
        outputs = graphs.run(pack.budget, mode, self.adapter.prepare(items), num_real=real)
        self._count(graphs.budgets[pack.budget].tokens, real, mode)
        return owned_rows(outputs, self.adapter, sizes)

    def _run_exact(self, graphs: ExactGraphs, item: ItemT, sizes: Sizes, mode: RuntimeMode) -> list[Rows]:
        values = self.adapter.prepare([item])
        found = graphs.find(sizes, self.adapter.bounds_of([item]), values)
        if isinstance(found, EncoderFallback):
            return self._eager([item], [sizes], found)
        return self._run_found(graphs, item, sizes, found, values, mode)

    def _run_known(
        self,
        graphs: ExactGraphs,
        item: ItemT,
        sizes: Sizes,
        known: BatchDescriptor | EncoderFallback,
        mode: RuntimeMode,
    ) -> list[Rows]:
        if isinstance(known, EncoderFallback):
            return self._eager([item], [sizes], known)
        graphs.counts.hits += 1
        return self._run_found(graphs, item, sizes, known, self.adapter.prepare([item]), mode)

    def _run_found(
        self,
        graphs: ExactGraphs,
        item: ItemT,
        sizes: Sizes,
        found: BatchDescriptor,
        values: Values,
        mode: RuntimeMode,
    ) -> list[Rows]:
        outputs = graphs.generation.run(found, mode, values, num_real=sizes)
        self._count(found.num_tokens, sizes, mode)
        return owned_rows(outputs, self.adapter, [sizes])

    def _eager(self, items: Sequence[ItemT], sizes: Sequence[Sizes], reason: EncoderFallback) -> list[Rows]:
        real = total(sizes)
        self.log.count_eager(Phase.ENCODER, reason, num_real=real[self.adapter.symbol])
        return owned_rows(self._fresh(items, real), self.adapter, sizes)

    def _fresh(self, items: Sequence[ItemT], sizes: Sizes) -> tuple[Tensor, ...]:
        return run_fresh(self.adapter, items, sizes, self.device.torch_device)

    def _count(self, bucket: int, real: Sizes, mode: RuntimeMode) -> None:
        num_real = real[self.adapter.symbol]
        if mode is RuntimeMode.NONE:
            self.log.count_eager(Phase.ENCODER, EncoderFallback.PADDED_EAGER, num_real=num_real)
        else:
            self.log.count_replay(Phase.ENCODER, Strategy.FULL, bucket, num_real)


def _no_grad() -> AbstractContextManager[None]:
    """Entering the mode anew is not free, and engines are in it already."""
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


def encoder_graphs(
    encoder: EncoderAdapter[ItemT],
    *,
    device: str | torch.device = "cpu",
    mode: str = "budget",
    **options: Any,
) -> EncoderRunner[ItemT]:
    """An encoder with graphs, captured and ready: ``encoder_graphs(adapter).run(items)``.

    ``encoder`` is an ``ImageBatch`` or an adapter of its own; ``mode`` is ``budget``, ``exact`` or ``off``;
    ``options`` are those of ``EncoderOptions``. Raises ``ConfigError`` for options that make no sense.
    """
    if mode not in list(EncoderMode):
        known = ", ".join(EncoderMode)
        raise ConfigError(f"mode={mode!r} of encoder graphs does not exist; choose from {known}")
    chosen = EncoderOptions(mode=EncoderMode(mode), **options)
    return EncoderRunner(encoder, device=get_device(device), options=chosen).capture()

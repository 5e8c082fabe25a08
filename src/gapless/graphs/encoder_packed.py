"""Budget mode: a graph per token budget, captured at start-up, that serves any items that fit it.

Boundaries, positions and everything else about items are refreshed inputs; only worst-case numbers are
frozen. What a replay costs is measured once on a GPU (elsewhere its tokens stand for it), and the cheapest
packs win. A budget whose capture fails keeps its place in the ladder, at the price per token of the dearest
graph: what it would have served goes to a larger graph where that is cheaper, or runs eagerly and is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from torch import Tensor

from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.capture import garbage_set_aside
from gapless.graphs.encoder_adapter import CompilesAhead, Values
from gapless.graphs.encoder_budgets import Budget, Pack, Sizes, plan_packs
from gapless.graphs.encoder_graphs import EncoderMemory, Generation
from gapless.graphs.encoder_options import EncoderFallback
from gapless.graphs.modes import RuntimeMode
from gapless.graphs.products import ProductsLeftOut
from gapless.graphs.store import SharedPool

_TIMED_REPLAYS = 3
_MAX_PLANS, _MAX_ITEMS_KEPT = 256, 32
"""Plans that are kept, and items of one."""


class BudgetGraphs:
    """The graphs of one encoder, for every budget of ``ladder`` (ascending)."""

    def __init__(
        self,
        memory: EncoderMemory,
        *,
        ladder: Sequence[int],
        max_bytes: int,
        pool: SharedPool | None = None,
    ) -> None:
        """Raises ``ConfigError`` for an encoder that has no graphs for any items."""
        self.memory, self.max_bytes = memory, max_bytes
        self.budgets: list[Budget] = []
        """Empty before ``capture``."""
        self.start_up_s: dict[str, float] = {}
        """Seconds of ``capture`` by stage: ``launches`` (forwards for the kernels they launch), ``compile``
        (until these are compiled; meanwhile libraries load theirs), ``warm_up`` (eager runs of every size),
        ``capture``, ``price``, ``trim``."""
        self._pool = pool
        self._ladder = tuple(ladder)
        self._bounds = [memory.adapter.worst_bounds(tokens) for tokens in ladder]
        self._descriptors = [
            BatchDescriptor(num_tokens=tokens, num_reqs=memory.adapter.most(tokens).get("segments", tokens))
            for tokens in ladder
        ]
        self._plans: dict[Hashable, list[Pack]] = {}
        self._reasons: dict[int, EncoderFallback] = {}
        """Budgets that stay eager, by index."""
        self.generation = self._new_generation()

    def capture(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Capture every budget, largest first, and price them. While the pool exceeds ``max_bytes`` the
        largest budget is given up and the others are captured again."""
        stages = _Stages(self.start_up_s)
        with ExitStack() as stack:
            self._compile_kernels(stages, stack)
            self._capture_all(stages, on_progress)
        self._plans.clear()
        self.memory.device.trim()  # of what eager runs of every size have left beside the pool
        stages.end("trim")

    def _capture_all(self, stages: _Stages, on_progress: Callable[[int, int], None] | None) -> None:
        while True:
            chosen = [i for i in range(len(self._ladder)) if i not in self._reasons]
            failed = self._capture(chosen, on_progress)
            stages.end("warm_up", less=sum(row.capture_s for row in self.generation.store.ledger))
            too_large = self.generation.store.pool_bytes > self.max_bytes
            if not too_large or not chosen:
                break
            self._reasons[chosen[-1]] = EncoderFallback.GRAPH_TOO_LARGE
            self.generation.release()
            self.generation = self._new_generation()
        self._reasons |= dict.fromkeys(failed, EncoderFallback.CAPTURE_FAILED)
        self.budgets = self._price()
        stages.end("price")

    def plan(self, sizes: Sequence[Mapping[str, int]]) -> list[Pack]:
        """The cheapest packs of items with these sizes, in order. Not to be written: they are kept."""
        key = tuple([(*item.values(),) for item in sizes])
        packs = self._plans.get(key)
        if packs is None:
            packs = plan_packs(sizes, self.budgets)
            if len(key) <= _MAX_ITEMS_KEPT:
                if len(self._plans) >= _MAX_PLANS:
                    self._plans.clear()
                self._plans[key] = packs
        return packs

    def reason_for_none(self, budget: int) -> EncoderFallback | None:
        """Why ``budget`` has no graph; None where it has one."""
        return self._reasons.get(budget)

    def run(self, budget: int, mode: RuntimeMode, values: Values, *, num_real: Sizes) -> tuple[Tensor, ...]:
        """Replay a budget, or with mode NONE the same without its graph: rows in static memory."""
        return self.generation.run(self._descriptors[budget], mode, values, num_real=num_real)

    def release(self) -> None:
        self.generation.release()
        self._plans.clear()
        self.budgets = []

    def _compile_kernels(self, stages: _Stages, until_captured: ExitStack) -> None:
        """One after another, at their first launches, they would take most of the start. Of the sizes, the
        smallest and the largest: kernels depend on them by rules with few cases. While they compile, there is
        time for what else a first run waits for: libraries of matrix products, and the collector."""
        adapter = self.memory.adapter
        ahead = adapter.compiling_ahead() if isinstance(adapter, CompilesAhead) else None
        if ahead is None:
            return
        with ahead as begin:
            with ProductsLeftOut():
                self.generation.compile(dict.fromkeys((self._descriptors[0], self._descriptors[-1])))
            begin()
            stages.end("launches")
            self.generation.compile(reversed(self._descriptors))
            until_captured.enter_context(garbage_set_aside())
        stages.end("compile")

    def _capture(self, chosen: Sequence[int], on_progress: Callable[[int, int], None] | None) -> list[int]:
        """Capture budgets by index; returns those that failed."""
        done = 0

        def count(_: BatchDescriptor) -> None:
            nonlocal done
            done += 1
            if on_progress is not None:
                on_progress(done, len(chosen))

        failed = self.generation.capture([self._descriptors[i] for i in chosen], on_done=count)
        return [self._descriptors.index(descriptor) for descriptor in failed]

    def _price(self) -> list[Budget]:
        """A budget without a graph costs what its tokens would in the dearest one: it attracts nothing."""
        adapter, seconds = self.memory.adapter, self._replay_seconds()
        per_token = max((s / self._ladder[i] for i, s in seconds.items()), default=1.0)
        return [
            Budget(tokens=tokens, sizes=adapter.most(tokens), cost=seconds.get(index, tokens * per_token))
            for index, tokens in enumerate(self._ladder)
        ]

    def _replay_seconds(self) -> dict[int, float]:
        """By index, of the budgets that have a graph; nothing where seconds mean nothing."""
        if self.memory.device.torch_device.type != "cuda":
            return {}
        return {
            index: self.generation.time(descriptor, repeats=_TIMED_REPLAYS)
            for index, descriptor in enumerate(self._descriptors)
            if index not in self._reasons
        }

    def _new_generation(self) -> Generation:
        generation, adapter = Generation(self.memory, pool=self._pool), self.memory.adapter
        for tokens, descriptor, bounds in zip(self._ladder, self._descriptors, self._bounds, strict=True):
            sizes = adapter.most(tokens)
            generation.plan(descriptor, sizes=sizes, bounds=bounds, make_dummy=partial(adapter.dummy, sizes))
        return generation


class _Stages:
    """Adds up the seconds between one mark and the next, by name."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds, self._last = seconds, time.perf_counter()

    def end(self, name: str, *, less: float = 0.0) -> None:
        """``less``: seconds of it that were spent capturing."""
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last - less
        if less:
            self._seconds["capture"] = self._seconds.get("capture", 0.0) + less
        self._last = now

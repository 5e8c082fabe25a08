"""Budget mode: a graph per token budget, captured at start-up, that serves any items that fit it.

Boundaries, positions and everything else about items are refreshed inputs; only worst-case numbers are
frozen. What a replay costs is measured once on a GPU (elsewhere its tokens stand for it), and the cheapest
packs win. A budget whose capture fails keeps its place in the ladder: what it would have served runs eagerly,
and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.encoder_adapter import Bounds, Values
from gapless.graphs.encoder_budgets import Budget, Pack, Sizes, plan_packs
from gapless.graphs.encoder_graphs import EncoderMemory, Generation
from gapless.graphs.modes import RuntimeMode
from gapless.graphs.store import SharedPool

_TIMED_REPLAYS = 5


class BudgetGraphs:
    """The graphs of one encoder, for every budget of ``ladder`` (ascending)."""

    def __init__(
        self, memory: EncoderMemory, *, ladder: Sequence[int], pool: SharedPool | None = None
    ) -> None:
        self.memory = memory
        self.generation = Generation(memory, pool=pool)
        self.budgets: list[Budget] = []
        """Empty before ``capture``."""
        self._descriptors: list[BatchDescriptor] = []
        self._failed: set[BatchDescriptor] = set()
        adapter = memory.adapter
        planned: list[tuple[BatchDescriptor, Sizes, Bounds]] = []
        for tokens in ladder:
            sizes = adapter.most(tokens)
            descriptor = BatchDescriptor(num_tokens=tokens, num_reqs=sizes.get("segments", tokens))
            planned.append((descriptor, sizes, adapter.worst_bounds(tokens)))
        for descriptor, sizes, bounds in planned:
            self._descriptors.append(descriptor)
            self.generation.plan(
                descriptor, sizes=sizes, bounds=bounds, make_dummy=partial(adapter.dummy, sizes)
            )

    def capture(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Capture every budget, largest first, and price them."""
        done = 0

        def count(_: BatchDescriptor) -> None:
            nonlocal done
            done += 1
            if on_progress is not None:
                on_progress(done, len(self._descriptors))

        self._failed = set(self.generation.capture(self._descriptors, on_done=count))
        self.budgets = self._price()

    def plan(self, sizes: Sequence[Mapping[str, int]]) -> list[Pack]:
        """The cheapest packs of items with these sizes, in order."""
        return plan_packs(sizes, self.budgets)

    def has_graph(self, budget: int) -> bool:
        return self._descriptors[budget] not in self._failed

    def run(self, budget: int, mode: RuntimeMode, values: Values, *, num_real: Sizes) -> tuple[Tensor, ...]:
        """Replay a budget, or with mode NONE the same without its graph: rows in static memory."""
        return self.generation.run(self._descriptors[budget], mode, values, num_real=num_real)

    def release(self) -> None:
        self.generation.release()
        self.budgets = []

    def _price(self) -> list[Budget]:
        """A budget without a graph costs what its tokens would in the dearest one: it attracts nothing."""
        adapter = self.memory.adapter
        seconds: dict[BatchDescriptor, float] = {}
        if self.memory.device.torch_device.type == "cuda":
            for descriptor in self._descriptors:
                if descriptor not in self._failed:
                    seconds[descriptor] = self.generation.time(descriptor, repeats=_TIMED_REPLAYS)
        per_token = max((s / d.num_tokens for d, s in seconds.items()), default=1.0)
        return [
            Budget(
                tokens=descriptor.num_tokens,
                sizes=adapter.most(descriptor.num_tokens),
                cost=seconds.get(descriptor, descriptor.num_tokens * per_token),
            )
            for descriptor in self._descriptors
        ]

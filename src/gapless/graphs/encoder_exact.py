"""Exact mode: a graph for every size and segmentation that was seen, made at first sight.

The key is everything that a graph freezes: all counts, the host numbers its kernels are launched with, and
the boundaries themselves where the attention needs them on the host (a key of the length alone gave wrong
embeddings for other images of the same total, SGLang 16902). The store stays open, so a capture happens
between steps and under the capture lock. The number of graphs and their bytes are bounded: a new key beyond
the bound closes the generation (fence, reset all, drop the pool), and what is still in use is captured again
on demand. Static inputs and workspaces have their largest size from the start and outlive generations.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.encoder_adapter import Bounds, Values
from gapless.graphs.encoder_budgets import Sizes, fits
from gapless.graphs.encoder_graphs import EncoderMemory, Generation
from gapless.graphs.encoder_options import EncoderFallback
from gapless.graphs.store import SharedPool


@dataclass(kw_only=True, slots=True)
class ExactCounts:
    """What the cache did since it was made."""

    hits: int = 0
    captures: int = 0
    evictions: int = 0
    evicted_graphs: int = 0


class ExactGraphs:
    """The cache of one encoder."""

    def __init__(
        self, memory: EncoderMemory, *, max_graphs: int, max_bytes: int, pool: SharedPool | None = None
    ) -> None:
        self.memory = memory
        self.max_graphs, self.max_bytes = max_graphs, max_bytes
        self.counts = ExactCounts()
        self._pool = pool
        self._known: dict[Hashable, BatchDescriptor] = {}
        self._reasons: dict[Hashable, EncoderFallback] = {}
        """Keys of this generation that stay eager."""
        self._num_variants = 0
        self.generation = self._new_generation()

    def known(self, sizes: Sizes, bounds: Bounds) -> BatchDescriptor | EncoderFallback | None:
        """What ``find`` answers without a capture. It counts nothing."""
        key = _key(sizes, bounds)
        found = self._known.get(key)
        if found is not None:
            return found
        if not fits(sizes, self.memory.max_sizes):
            return EncoderFallback.LONGER_THAN_BUFFERS
        return self._reasons.get(key)

    def find(self, sizes: Sizes, bounds: Bounds, values: Values) -> BatchDescriptor | EncoderFallback:
        """The graph for a run, captured now if it is new, or why there is none."""
        key = _key(sizes, bounds)
        descriptor = self._known.get(key)
        if descriptor is not None:
            self.counts.hits += 1
            return descriptor
        if not fits(sizes, self.memory.max_sizes):
            return EncoderFallback.LONGER_THAN_BUFFERS
        reason = self._reasons.get(key)
        return reason if reason is not None else self._capture(key, sizes, bounds, values)

    def evict(self) -> None:
        """Close the generation: all its graphs and their pool go. The next sight of a key captures again."""
        if self.generation.num_graphs:
            self.counts.evictions += 1
            self.counts.evicted_graphs += self.generation.num_graphs
        self.release()
        self.generation = self._new_generation()

    def release(self) -> None:
        self._known.clear()
        self._reasons.clear()
        self.generation.release()

    def _capture(
        self, key: Hashable, sizes: Sizes, bounds: Bounds, values: Values
    ) -> BatchDescriptor | EncoderFallback:
        is_full = len(self._known) + len(self._reasons) >= self.max_graphs
        if is_full or (self._known and self.generation.store.pool_bytes >= self.max_bytes):
            self.evict()
        descriptor = self._try_capture(key, sizes, bounds, values)
        if self.generation.store.pool_bytes <= self.max_bytes or isinstance(descriptor, EncoderFallback):
            return descriptor
        # One graph too many in bytes: the others go, and this one gets a pool of its own.
        was_alone = self.generation.num_graphs == 1
        self.evict()
        if not was_alone:
            descriptor = self._try_capture(key, sizes, bounds, values)
            if self.generation.store.pool_bytes <= self.max_bytes:
                return descriptor
            self.evict()
        self._reasons[key] = EncoderFallback.GRAPH_TOO_LARGE
        return EncoderFallback.GRAPH_TOO_LARGE

    def _try_capture(
        self, key: Hashable, sizes: Sizes, bounds: Bounds, values: Values
    ) -> BatchDescriptor | EncoderFallback:
        self._num_variants += 1
        descriptor = BatchDescriptor(
            num_tokens=sizes[self.memory.adapter.symbol],
            num_reqs=max(sizes.get("segments", 1), 1),
            variant=self._num_variants,
        )
        self.generation.plan(descriptor, sizes=sizes, bounds=bounds, make_dummy=lambda: values)
        try:
            failed = self.generation.capture([descriptor])
        except (
            BaseException
        ):  # the encoder's own, before it was captured: passed on, and tried again next time
            self.generation.forget(descriptor)
            raise
        if failed:
            self._reasons[key] = EncoderFallback.CAPTURE_FAILED
            return EncoderFallback.CAPTURE_FAILED
        self.counts.captures += 1
        self._known[key] = descriptor
        return descriptor

    def _new_generation(self) -> Generation:
        return Generation(self.memory, pool=self._pool, stays_open=True)


def _key(sizes: Sizes, bounds: Bounds) -> Hashable:
    return (*sizes.values(), None, *bounds.limits.values(), bounds.segmentation)

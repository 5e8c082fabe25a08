"""Verification of an engine's graphs: every runner as a target of ``graphs/check.py``, with random batches.

Batches are legal and as mixed as they come: requests of random lengths with contexts of random lengths, in
random blocks of the cache, which is filled with random keys and values first. Blocks alternate between two
halves, so that a batch run in between overwrites nothing that the other one reads. No request may be running;
the cache's contents are lost. Read ``graph_set.py`` for the runners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from gapless.attention.base import SINK_BLOCK
from gapless.engine.build import OpenedEngine
from gapless.engine.graph_set import GraphSet
from gapless.engine.inputs import NEEDS_LOGITS, logits_flag, select_inputs
from gapless.engine.parallel_runner import ParallelRunner
from gapless.engine.runner import ModelRunner
from gapless.engine.verify_media import check_encoder, check_stale_rows, fill_media, may_be_media
from gapless.errors import ConfigError
from gapless.graphs.audit import Change, Snapshot
from gapless.graphs.batch import BatchDescriptor, BatchShape
from gapless.graphs.check import CheckTarget, check
from gapless.graphs.check_report import CheckReport, merge
from gapless.graphs.compare import tolerance_for
from gapless.graphs.modes import Phase
from gapless.graphs.runner import GraphRunner, Values

T = TypeVar("T")
_CONTEXT_BLOCKS = 64
"""Cache blocks for contexts, beside those of the step's own tokens and one that each context may begin."""


def verify_engine(
    opened: OpenedEngine, *, seed: int = 0, tolerance: float | None = None, only_few_sizes: bool = False
) -> CheckReport:
    """Check every phase that has graphs. ``only_few_sizes``: the smallest, a middle and the largest."""
    runner, model = opened.runner, opened.loaded.model
    if isinstance(runner, ParallelRunner):
        raise ConfigError("graphs are verified on one rank only: give --tensor-parallel-size=1")
    graphs, store = runner.graphs, runner.graphs.store
    with torch.no_grad():
        cache = _RandomCache.fill(opened, seed=seed)
        if graphs.media is not None:
            fill_media(graphs.media)
    bound = tolerance_for([opened.loaded.info.dtype]) if tolerance is None else tolerance
    roots: dict[str, object] = {"model": model}
    start = Snapshot(roots)
    # A backend plans its steps in Python: its op runs as one opaque node, so what it keeps there is live.
    noted = (start, graphs.captured_model or start)
    live = {name for known in noted for name in (*known.tensors, *known.values) if ".backend." in name}
    reports = []
    for part in (graphs.prefill, graphs.decode, graphs.head, graphs.sample, graphs.sample_filtered):
        captured = sorted((r.key.descriptor for r in store.ledger if r.key.phase is part.phase), reverse=True)
        descriptors = few_of(captured) if only_few_sizes else captured
        is_row_stage = part.phase not in (Phase.PREFILL, Phase.DECODE)
        batches = _RowBatches(graphs, part) if is_row_stage else _TokenBatches(runner, part, cache)
        with torch.no_grad():
            for states in graphs.state_buffers:
                states.normal_()
            graphs.logits.normal_(std=3)
        target = CheckTarget(
            name=str(part.phase),
            runner=part,
            descriptors=descriptors,
            real_descriptors=batches.real_descriptors,
            make_values=batches.make_values,
            run_plain=part.run_eager,
            find=batches.find,
            roots=roots,
            audit=lambda: [c for c in _changes(graphs, start, Snapshot(roots)) if c.name not in live],
            live_names=live,
            choices=_choices(part, graphs),
        )
        reports.append(check(target, seed=seed, tolerance=bound))
        if graphs.media is not None and part.phase is Phase.PREFILL:
            check_stale_rows(target, graphs.media, reports[-1], seed=seed)
    if runner.media is not None:
        reports.append(check_encoder(runner.media.encoder, tolerance=bound, seed=seed))
    with torch.no_grad():
        cache.clear()
        graphs.tokens.zero_()
    return merge("engine", [report for report in reports if report.results])


def _changes(graphs: GraphSet, start: Snapshot, now: Snapshot) -> list[Change]:
    """Tensors that have moved since they were captured, and values that have changed since ``start``: before,
    serving may have counted on."""
    moved = (graphs.captured_model or start).changes_to(now)
    return [
        *(change for change in moved if change.kind in ("moved", "gone")),
        *(change for change in start.changes_to(now) if change.kind == "value"),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _RandomCache:
    """The part of the KV cache that batches use: blocks 1 to ``num_blocks``. Batches take turns with its
    halves, so that none writes over what the one before has in the cache."""

    num_blocks: int
    block_size: int
    layers: Sequence[object]

    @classmethod
    def fill(cls, opened: OpenedEngine, *, seed: int) -> _RandomCache:
        runner = opened.runner
        own = -(-runner.max_num_batched_tokens // runner.block_size) + 2 * runner.max_num_reqs
        layers = opened.loaded.model.attention_layers()
        made = cls(
            num_blocks=min(runner.num_blocks - 1, 2 * (own + _CONTEXT_BLOCKS)),
            block_size=runner.block_size,
            layers=layers,
        )
        torch.manual_seed(seed)
        for part in made._parts():
            part.normal_()
        return made

    def clear(self) -> None:
        for part in self._parts():
            part.zero_()

    def _parts(self) -> list[torch.Tensor]:
        caches = [cache for layer in self.layers for cache in (layer.k_cache, layer.v_cache)]  # type: ignore[attr-defined]
        return [cache[SINK_BLOCK + 1 : self.num_blocks + 1] for cache in caches]


@dataclass(kw_only=False, slots=True)
class _TokenBatches:
    """Batches of the prefill and decode runners."""

    runner: ModelRunner
    part: GraphRunner
    cache: _RandomCache
    half: int = field(default=0, init=False)

    def find(self, descriptor: BatchDescriptor) -> BatchDescriptor | None:
        """What dispatch chooses for a batch of exactly that size; a graph of a higher mode is as good."""
        count = descriptor.num_reqs if descriptor.uniform else self._fewest_reqs(descriptor.num_tokens)
        lens = np.full(count, descriptor.num_tokens // count)
        lens[: descriptor.num_tokens - lens.sum()] += 1
        if self.part.phase is Phase.DECODE and not descriptor.uniform:
            lens = np.full(descriptor.num_tokens, self.runner.plan.uniform_query_len)
        found = self.runner.dispatcher.dispatch(BatchShape(query_lens=tuple(lens.tolist())))
        is_better = found.mode > self.part.strategy.runtime_mode or found.owner is not self.part.phase
        return descriptor if is_better and found.descriptor is not None else found.descriptor

    def real_descriptors(self, bucket: BatchDescriptor) -> list[BatchDescriptor]:
        """The largest batch of the bucket and smaller ones, as far as the cache has blocks for them."""
        if bucket.uniform:
            per_request = bucket.num_tokens // bucket.num_reqs
            blocks = -(-per_request // self.cache.block_size)
            most = min(bucket.num_reqs, max(1, self.cache.num_blocks // 2 // blocks))
            counts = dict.fromkeys((most, max(1, 2 * most // 3), most // 2 + 1))
            return [BatchDescriptor(n * per_request, n, uniform=True) for n in counts if n <= most]
        found: list[BatchDescriptor] = []
        for tokens in (bucket.num_tokens, max(1, 2 * bucket.num_tokens // 3)):
            fewest = self._fewest_reqs(tokens)
            half = self.cache.num_blocks // 2
            most = min(bucket.num_reqs, tokens, max(fewest, half // 2))
            for count in (most, fewest):
                # Every request may leave its last block partly empty.
                room = (half - count + 1) * self.cache.block_size
                found.append(BatchDescriptor(max(count, min(tokens, room)), count))
        return list(dict.fromkeys(found))

    def make_values(self, real: BatchDescriptor, generator: torch.Generator) -> Values:
        rng = np.random.default_rng(int(torch.randint(2**31, (), generator=generator)))
        lens = self._lengths(real, rng)
        contexts, tables = self._contexts(lens, rng)
        starts = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum(lens, out=starts[1:])
        positions = np.concatenate([c + np.arange(n) for c, n in zip(contexts, lens, strict=True)])
        blocks = np.concatenate(
            [
                table[(c + np.arange(n)) // self.cache.block_size]
                for c, n, table in zip(contexts, lens, tables, strict=True)
            ]
        )
        widest = max(len(table) for table in tables)
        block_table = np.full((len(lens), widest), SINK_BLOCK, dtype=np.int32)
        for row, table in zip(block_table, tables, strict=True):
            row[: len(table)] = table
        values = {
            NEEDS_LOGITS.name: logits_flag(is_needed=True),  # graphs are compared by them
            "input_ids": rng.integers(self.runner.vocab_size, size=real.num_tokens).astype(np.int32),
            "drawn_rows": np.full(real.num_tokens, self.runner.max_num_reqs, dtype=np.int32),
            "positions": positions.astype(np.int32),
            "rope_positions": (positions + rng.integers(8, size=(3, len(positions)))).astype(np.int32),
            "is_media": np.where(rng.integers(2, size=real.num_tokens), may_be_media(real.num_tokens), 0),
            "slot_mapping": (blocks * self.cache.block_size + positions % self.cache.block_size).astype(
                np.int32
            ),
            "query_start_loc": starts,
            "seq_lens": (contexts + lens).astype(np.int32),
            "block_table": block_table,
        }
        return select_inputs(values, self.part.inputs)

    def _fewest_reqs(self, num_tokens: int) -> int:
        return max(1, -(-num_tokens // self.runner.max_model_len))

    def _lengths(self, real: BatchDescriptor, rng: np.random.Generator) -> np.ndarray:
        """``num_reqs`` lengths of at least 1 that add up to ``num_tokens``, none above the model's length."""
        if real.uniform:
            return np.full(real.num_reqs, real.num_tokens // real.num_reqs, dtype=np.int32)
        cuts = np.sort(rng.choice(np.arange(1, real.num_tokens), size=real.num_reqs - 1, replace=False))
        lens = np.diff(np.concatenate([[0], cuts, [real.num_tokens]])).astype(np.int32)
        if lens.max() <= self.runner.max_model_len:
            return lens
        even = np.full(real.num_reqs, real.num_tokens // real.num_reqs, dtype=np.int32)
        even[: real.num_tokens - even.sum()] += 1
        return even

    def _contexts(self, lens: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, list[np.ndarray]]:
        """Tokens that each request has in the cache already, and its blocks: from one half of the cache, or
        from all of it where a cache is so small that a batch does not fit."""
        block_size = self.cache.block_size
        own = -(-lens // block_size)
        half = self.cache.num_blocks // 2
        spare = half - int(own.sum())
        contexts = np.zeros_like(lens)
        first, count = 1, self.cache.num_blocks
        if spare >= 0:
            self.half = 1 - self.half
            first, count = 1 + self.half * half, half
            spare = max(0, spare - len(lens))  # a context may cross one more block boundary
            room = np.minimum(self.runner.max_model_len - lens, spare // len(lens) * block_size)
            contexts = rng.integers(0, room + 1).astype(np.int32)
        free = rng.permutation(np.arange(first, first + count)).astype(np.int32)
        needed = -(-(contexts + lens) // block_size)
        ends = np.cumsum(needed)
        return contexts, [free[end - n : end] for end, n in zip(ends, needed, strict=True)]


@dataclass(kw_only=False, slots=True)
class _RowBatches:
    """Batches of the head and of sampling: rows of the hidden states and of the logits that lie there."""

    graphs: GraphSet
    part: GraphRunner

    def find(self, descriptor: BatchDescriptor) -> BatchDescriptor | None:
        return descriptor  # the smallest size that fits; there is one shape, and no key to get wrong

    def real_descriptors(self, bucket: BatchDescriptor) -> list[BatchDescriptor]:
        counts = dict.fromkeys((bucket.num_reqs, max(1, 2 * bucket.num_reqs // 3)))
        return [BatchDescriptor(n, n, uniform=True) for n in counts]

    def make_values(self, real: BatchDescriptor, generator: torch.Generator) -> Values:
        rng = np.random.default_rng(int(torch.randint(2**31, (), generator=generator)))
        n, vocab_size = real.num_reqs, self.graphs.vocab_size
        values: dict[str, np.ndarray] = {
            NEEDS_LOGITS.name: logits_flag(is_needed=True),
            "hidden_rows": rng.integers(self.graphs.limits.max_num_tokens, size=n).astype(np.int32),
            "temperature": rng.uniform(0.2, 1.5, n).astype(np.float32),
            "seed": rng.integers(2**62, size=n),
            "index": rng.integers(1000, size=n).astype(np.int32),
            "top_k": rng.integers(vocab_size, size=n).astype(np.int32),
            "top_p": rng.uniform(0.1, 1.0, n).astype(np.float32),
            "min_p": rng.uniform(0.0, 0.2, n).astype(np.float32),
        }
        return {f.name: values[f.name] for f in self.part.inputs.fields}


def _choices(part: GraphRunner, graphs: GraphSet) -> tuple[int, ...]:
    """Outputs that are tokens: the last bits of logits flip them, so only the same bucket can be compared."""
    if part.phase is Phase.HEAD or (part.phase is Phase.DECODE and graphs.decode_makes_logits):
        return (1,)
    return (0,) if part.phase in (Phase.SAMPLE, Phase.SAMPLE_FILTERED) else ()


def few_of(items: Sequence[T]) -> list[T]:
    """The first, a middle and the last."""
    indices = sorted({0, len(items) // 2, len(items) - 1}) if items else []
    return [items[i] for i in indices]

"""What the CPU does from a batch to its launched graph: dispatch, fill the static inputs, launch.

Part of ``host_time.py``. A host that is busy for a second would spoil whatever is measured in that second, so
all sizes are measured in rounds, a few turns of each per round, and every figure is the median over all
rounds; ``spread`` shows what lies around it (least, first and third quartile): a median far from the first
quartile is noise of the host. In each round the first turns of a size find another size's batches in the
slots of the staging ring and write more for it: they are ``switched``, and what comes behind is ``total``.
Batches are what the engine builds (``engine_arrays``): how much a step writes depends on its block tables.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from gapless import SamplingParams
from gapless.engine.build import OpenedEngine
from gapless.engine.inputs import BatchArrays, BatchBuilder
from gapless.engine.request import Request, Sequence, make_sequences
from gapless.engine.runner import ModelRunner
from gapless.engine.step import DecodeRun, ScheduledBatch, ScheduledSequence
from gapless.graphs.batch import BatchDescriptor, BatchShape
from gapless.graphs.context import use_forward_context
from gapless.graphs.program import EagerStep, Program
from gapless.graphs.runner import GraphRunner
from gapless.graphs.store import GraphKey

ROUNDS = 5
SLOTS = 8
"""Of the staging ring: so many turns of a size have written to all of them."""
PARTS = ("switched", "total", "dispatch", "fill", "launch")
DECODE_TOKENS = 170
"""Of each request of a decode step, its new one among them."""


def replay_figures(opened: OpenedEngine, *, steps: int, cold_mib: int = 0) -> dict[str, dict[str, Any]]:
    """Microseconds by phase and size, with an idle GPU: ``total``, and ``dispatch``, ``fill`` and ``launch``
    of it also alone. ``steps``: turns of each, over all rounds. ``cold_mib``: memory that is walked before
    each turn."""
    walked = np.zeros(cold_mib << 20, dtype=np.uint8)
    paths: dict[str, ReplayPath] = {}
    for phase in ("decode", "prefill"):
        runner = getattr(opened.runner.graphs, phase)
        for descriptor in spread_of(opened.runner.dispatcher.capture_descriptors(runner.phase)):
            paths[f"{phase} {descriptor.num_tokens}"] = ReplayPath(opened, runner, descriptor, walked)
    rounds = min(ROUNDS, steps)
    with opened.runner.graphs.store.device.stream_scope(), torch.no_grad():
        for index in range(rounds):
            for path in paths.values():
                path.take_turns(steps * (index + 1) // rounds - steps * index // rounds)
        return {name: path.figures() for name, path in paths.items()}


class ReplayPath:
    """One size, its batch and what its turns took."""

    def __init__(
        self, opened: OpenedEngine, runner: GraphRunner, descriptor: BatchDescriptor, walked: np.ndarray
    ) -> None:
        self._runner, self._descriptor, self._walked = runner, descriptor, walked
        self._dispatcher, self._device = opened.runner.dispatcher, runner.store.device
        arrays = engine_arrays(opened.runner, descriptor)
        own = opened.runner.graphs.inputs_of(runner, arrays.values, needs_logits=False)
        # The dummy has what the builder does not make: which tokens are an image's (none).
        self._values = {**runner.dummy(descriptor), **own}
        self._query_lens, num_reqs = arrays.query_lens, len(arrays.query_lens)
        self._sizes = {"tokens": descriptor.num_tokens, "reqs": num_reqs, "rows": num_reqs}
        self._decode_shape = BatchShape(query_lens=self._query_lens)  # the same throughout a run
        entry = runner.store.get(GraphKey(runner.phase, runner.strategy.runtime_mode, descriptor))
        assert entry is not None
        self._entry = entry
        self._launch = entry.program.launch or entry.program.replay  # as the runner does
        self._context = runner._bucket(descriptor).contexts[runner.strategy.runtime_mode]  # breaks read it
        self._views = runner.inputs.views(runner.sizes_of(descriptor))
        self._took: dict[str, list[float]] = defaultdict(list)

    def take_turns(self, turns: int) -> None:
        """One round. The stream is the device's own. Nothing but what is timed stands between two readings of
        the clock: from cold caches a call of our own would be a microsecond or two."""
        run, values, took, now = self._runner.run, self._values, self._took, time.perf_counter
        dispatch, load, launch = self._dispatcher.dispatch, self._runner.inputs.load, self._launch
        with use_forward_context(self._context):
            for turn in range(SLOTS + turns):
                shape = self._wait()
                start = now()
                found = dispatch(shape)
                run(self._descriptor, found.mode, values, num_real=self._sizes)
                end = now()
                took["switched" if turn < SLOTS else "total"].append(1e6 * (end - start))
            for _ in range(turns):
                shape = self._wait()
                start = now()
                dispatch(shape)
                end = now()
                took["dispatch"].append(1e6 * (end - start))
            for _ in range(turns):
                self._wait()
                start = now()
                load(self._views, values)
                end = now()
                took["fill"].append(1e6 * (end - start))
            for _ in range(turns):
                self._wait()
                start = now()
                launch()
                end = now()
                took["launch"].append(1e6 * (end - start))

    def figures(self) -> dict[str, Any]:
        """Medians, ``spread`` of each, and facts of the graph; behind all rounds."""
        figures: dict[str, Any] = {part: round(statistics.median(self._took[part]), 1) for part in PARTS}
        figures["spread"] = {part: spread(self._took[part]) for part in PARTS}
        figures["memsets"] = self._entry.row.num_memsets
        num_segments = self._entry.row.num_segments
        if num_segments > 1:
            figures["segments"] = num_segments
            with use_forward_context(self._context):
                took = without_breaks(self._entry.program, self._device)
            figures["per_segment"] = round(took / num_segments, 2)
        return figures

    def _wait(self) -> BatchShape:
        """For the GPU, and for cold caches if they are asked for; returns the shape of the next batch."""
        self._device.synchronize()
        if len(self._walked):
            self._walked[::64] += 1
        if self._descriptor.uniform:
            return self._decode_shape
        return BatchShape(query_lens=self._query_lens)


def engine_arrays(runner: ModelRunner, descriptor: BatchDescriptor) -> BatchArrays:
    """A batch that fills ``descriptor``, from the engine's own builder.

    Decode: the second step of a run, its tokens unknown where steps overlap; every request has
    ``DECODE_TOKENS``. Prefill: one prompt, or as many of the longest as so many tokens need.
    """
    builder = BatchBuilder(
        block_size=runner.block_size,
        max_num_reqs=runner.max_num_reqs,
        max_num_tokens=runner.max_num_batched_tokens,
        max_blocks=-(-runner.max_model_len // runner.block_size),
        rope_axes=runner.graphs.rope_axes,
        makes_slots=runner.graphs.makes_slots,
    )
    if descriptor.uniform:
        last, num_outputs = min(DECODE_TOKENS, runner.max_model_len) - 1, 1 - runner.max_steps_ahead
        sequences = [make_sequence(runner, last, num_outputs) for _ in range(descriptor.num_reqs)]
        run = DecodeRun(num_steps_left=1)
        first, second = (
            tuple(scheduled(runner, sequence, start=start, num_new_tokens=1) for sequence in sequences)
            for start in (last - 1, last)
        )
        builder.build(ScheduledBatch(step_id=0, entries=first, run=run))
        return builder.build(ScheduledBatch(step_id=1, entries=second, run=run))
    full, rest = divmod(descriptor.num_tokens, runner.max_model_len)
    lens = [runner.max_model_len] * full + [rest] * (rest > 0)
    entries = tuple(scheduled(runner, make_sequence(runner, n), start=0, num_new_tokens=n) for n in lens)
    return builder.build(ScheduledBatch(step_id=0, entries=entries))


def make_sequence(runner: ModelRunner, num_prompt_tokens: int, num_output_tokens: int = 0) -> Sequence:
    request = Request(
        request_id="timed",
        prompt=None,
        prompt_token_ids=tuple(index % runner.vocab_size for index in range(num_prompt_tokens)),
        params=SamplingParams(temperature=0.0),
        max_total_tokens=runner.max_model_len,
    )
    (sequence,) = make_sequences(request, base_seed=0)
    sequence.token_ids.extend([0] * num_output_tokens)
    return sequence


def scheduled(
    runner: ModelRunner, sequence: Sequence, *, start: int, num_new_tokens: int
) -> ScheduledSequence:
    """Its blocks come from no allocator: they are those of every other sequence too."""
    num_blocks = -(-(start + num_new_tokens) // runner.block_size)
    blocks = itertools.islice(itertools.cycle(range(1, runner.num_blocks)), num_blocks)
    return ScheduledSequence(
        sequence=sequence,
        start=start,
        num_new_tokens=num_new_tokens,
        samples=True,
        generation=sequence.generation,
        block_table=list(blocks),
    )


def spread(samples: Iterable[float]) -> dict[str, float]:
    """The least of ``samples``, and where a quarter and three quarters of them lie below."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    places = {"min": 0, "p25": round(last / 4), "p75": round(3 * last / 4)}
    return {name: round(ordered[place], 1) for name, place in places.items()}


def spread_of(descriptors: tuple[BatchDescriptor, ...]) -> list[BatchDescriptor]:
    """The smallest, the largest and two between."""
    picked = {round(i * (len(descriptors) - 1) / 3) for i in range(4)} if descriptors else set()
    return [descriptors[i] for i in sorted(picked, reverse=True)]


def without_breaks(program: Program, device: Any) -> float:
    """Median microseconds of a replay whose breaks do nothing: their bodies are not ours to time."""
    bodies = [(step, step._body) for step in program.steps if isinstance(step, EagerStep)]
    took: list[float] = []
    try:
        for step, _ in bodies:
            step._body = lambda *args, **kwargs: None
        for _ in range(20):
            device.synchronize()
            start = time.perf_counter()
            program.replay()
            took.append(1e6 * (time.perf_counter() - start))
    except Exception as error:  # a break that must return a tensor
        print(f"segments cannot be timed alone: {error}", file=sys.stderr)
        return 0.0
    finally:
        for step, body in bodies:
            step._body = body
    return statistics.median(took)

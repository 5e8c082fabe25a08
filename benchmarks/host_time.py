"""What the CPU does in a step, stage by stage, and how long the path to a replay takes.

A model folder is opened with dummy weights. Three things are timed, waiting for the GPU left out: decode
steps of the engine by batch size, split by stage (the stages are methods, wrapped for the run); one request
through ``LLM.generate`` up to its only token, beside the GPU time of its graphs; and the runner's replay path
(dispatch, fill the static inputs, launch; ``replay_path.py``) alone, for breakable graphs also per segment
without the breaks.
After a long wait for the GPU the caches of a CPU are cold, and what a replay costs is how much it touches:
``--cold-mib 32`` makes them cold before every turn of that part, whatever the size of the graph.

    python benchmarks/host_time.py --model DIR --batch 1 8 32 128 [--prefill breakable] [--keep-memsets]

Prints tables to stderr and one line of JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from replay_path import replay_figures, spread

from gapless import LLM, SamplingParams
from gapless.config import EngineConfig
from gapless.engine.build import OpenedEngine, open_engine
from gapless.engine.core import EngineCore
from gapless.engine.graph_set import GraphSet
from gapless.engine.readback import Readback
from gapless.engine.runner import ModelRunner
from gapless.graphs.batch import BatchDescriptor, BatchShape
from gapless.graphs.buffers import StaticInputs
from gapless.graphs.device.cuda_runtime import CudaRuntime
from gapless.graphs.device.memset_nodes import UNKNOWN
from gapless.graphs.device.pinned import PinnedRing, PinnedSlot
from gapless.graphs.dispatcher import Dispatcher
from gapless.graphs.program import Program
from gapless.graphs.runner import GraphRunner
from gapless.graphs.store import GraphKey

WARM_UP = 5


def main() -> None:
    arguments = parse_arguments()
    if arguments.keep_memsets:
        CudaRuntime.replace_memsets = lambda self, graph: UNKNOWN  # type: ignore[method-assign]
    opened = open_model(arguments)
    result: dict[str, Any] = {
        "benchmark": "host_time",
        "model": Path(arguments.model).name,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "plan": {p: opened.runner.report()["plan"][p]["strategy"] for p in ("prefill", "decode")},
        "decode": {},
        "first_token": {},
    }
    sections: list[tuple[str, list[int], Callable[[OpenedEngine, int, int], dict[str, Any]]]] = [
        ("decode", arguments.batch, decode_steps),
        ("first_token", arguments.prompt_tokens, first_token),
    ]
    for name, sizes, measure in sections:
        for size in sizes:
            result[name][size] = figures = measure(opened, size, arguments.steps)
            show(f"{name} {size}", figures)
    result["replay"] = replay_figures(opened, steps=arguments.steps, cold_mib=arguments.cold_mib)
    for name, figures in result["replay"].items():
        show(f"replay {name}", figures)
    opened.runner.shutdown()
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder with config.json; its weights are dummies")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--prompt-tokens", type=int, nargs="*", default=[16, 128])
    parser.add_argument("--steps", type=int, default=60, help="steps per measurement")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prefill", help="strategy of prefill steps")
    parser.add_argument("--decode", help="strategy of decode steps")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument("--kv-cache-tokens", type=int)
    parser.add_argument("--prefill-sizes", type=int, nargs="*", help="sizes to capture, for a short start")
    parser.add_argument("--decode-sizes", type=int, nargs="*")
    parser.add_argument("--keep-memsets", action="store_true", help="leave memset nodes in graphs")
    parser.add_argument("--cold-mib", type=int, default=0, help="memory to walk before each replay")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def open_model(arguments: argparse.Namespace) -> OpenedEngine:
    options = {
        "model": arguments.model,
        "load_format": "dummy",
        "device": arguments.device,
        "max_model_len": arguments.max_model_len,
        "max_running_requests": arguments.max_running_requests,
        "kv_cache_tokens": arguments.kv_cache_tokens,
        "cuda_graph_backend_prefill": arguments.prefill,
        "cuda_graph_backend_decode": arguments.decode,
        "cuda_graph_bs_prefill": arguments.prefill_sizes,
        "cuda_graph_bs_decode": arguments.decode_sizes,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return open_engine(EngineConfig.from_sources(python=given))


class Stages:
    """Microseconds spent in wrapped methods, each without the wrapped ones it calls."""

    def __init__(self) -> None:
        self.us: dict[str, float] = defaultdict(float)
        self._children = [0.0]
        self._undo: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, method: str, stage: str) -> None:
        """``owner``: a class, or an object that holds a function in ``method``."""
        original = vars(owner).get(method) if isinstance(owner, type) else getattr(owner, method)
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._children.append(0.0)
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                took = 1e6 * (time.perf_counter() - start)
                self.us[stage] += took - self._children.pop()
                self._children[-1] += took

        setattr(owner, method, timed)
        self._undo.append((owner, method, original))

    def unwrap(self) -> None:
        for owner, method, original in reversed(self._undo):
            if original is None:
                delattr(owner, method)  # it was inherited
            else:
                setattr(owner, method, original)


def watch_waits(stages: Stages) -> None:
    if torch.cuda.is_available():
        stages.wrap(PinnedSlot, "wait", "wait")
        stages.wrap(PinnedRing, "_wait", "wait")
    else:
        stages.wrap(Readback, "wait", "wait")


@contextmanager
def watched(graphs: GraphSet | None) -> Iterator[Stages]:
    """Without ``graphs`` only the waiting is timed, which costs next to nothing."""
    stages = Stages()
    watch_waits(stages)
    try:
        if graphs is not None:
            from gapless.engine.draw import DrawnTokens, TokenDrawer
            from gapless.engine.inputs import BatchBuilder
            from gapless.engine.scheduler import Scheduler

            stages.wrap(Scheduler, "schedule", "schedule")
            stages.wrap(BatchBuilder, "build", "build")
            stages.wrap(Dispatcher, "dispatch", "dispatch")
            stages.wrap(StaticInputs, "load", "fill")
            stages.wrap(PinnedRing, "submit", "copy call")
            stages.wrap(Program, "replay", "replay call")
            for bucket in known_buckets(graphs):
                if bucket.launch is not None:
                    stages.wrap(bucket, "launch", "replay call")
            stages.wrap(GraphRunner, "run", "run (rest)")
            stages.wrap(ModelRunner, "launch", "launch (rest)")
            stages.wrap(TokenDrawer, "draw", "draw")
            stages.wrap(DrawnTokens, "wait", "readback")
            stages.wrap(EngineCore, "_accept", "accept")
            stages.wrap(EngineCore, "_collect", "collect")
            stages.wrap(EngineCore, "prepare", "prepare")
            stages.wrap(EngineCore, "add", "add")
            stages.wrap(EngineCore, "step", "step (rest)")
        yield stages
    finally:
        stages.unwrap()


def known_buckets(graphs: GraphSet) -> list[Any]:
    runners = (graphs.prefill, graphs.decode, graphs.head, graphs.sample, graphs.sample_filtered)
    return [bucket for runner in runners for bucket in runner._buckets.values()]


def repeat(step: Callable[[], object], steps: int, graphs: GraphSet | None = None) -> dict[str, Any]:
    """Medians per call: wall time, CPU time (wall without waiting; its spread too); of a step over ``graphs``
    the stages of it."""
    rows: list[dict[str, float]] = []
    with watched(graphs) as stages:
        for _ in range(steps):
            stages.us.clear()
            start = time.perf_counter()
            step()
            wall = 1e6 * (time.perf_counter() - start)
            rows.append({"wall": wall, "cpu": wall - stages.us["wait"], **stages.us})
    names = {name for row in rows for name in row}
    cpu_us = [row["cpu"] for row in rows]
    around = {"cpu_max": round(max(cpu_us), 1), "spread": spread(cpu_us)}  # garbage, and other processes
    return around | {
        name: round(statistics.median(row.get(name, 0.0) for row in rows), 1) for name in sorted(names)
    }


def decode_steps(opened: OpenedEngine, batch: int, steps: int) -> dict[str, Any]:
    core = EngineCore(opened.runner)
    for index in range(batch):
        core.add_request(str(index), random_prompt(opened, 100), greedy(2 * steps + 40), streams=False)
    while core.scheduler.waiting or any(s.num_output_tokens < WARM_UP for s in core.scheduler.running):
        core.step()
    figures = repeat(core.step, steps)
    figures["stages"] = repeat(core.step, steps, opened.runner.graphs)
    for index in range(batch):
        core.abort_request(str(index))
    while core.has_unfinished():
        core.step()
    return figures


def first_token(opened: OpenedEngine, tokens: int, steps: int) -> dict[str, Any]:
    llm = LLM._from_parts(opened.runner, None)
    prompts = [random_prompt(opened, tokens) for _ in range(8)]
    params, count = greedy(1), iter(range(1 << 30))

    def generate() -> None:
        llm.generate([prompts[next(count) % len(prompts)]], params)

    for _ in range(WARM_UP):
        generate()
    figures = repeat(generate, steps)
    figures["gpu"] = round(gpu_us(opened, tokens), 1)
    figures["stages"] = repeat(generate, steps, opened.runner.graphs)
    return figures


def gpu_us(opened: OpenedEngine, tokens: int) -> float:
    """Of the prefill graph and the head's, back to back; 0 where there is none."""
    graphs, store = opened.runner.graphs, opened.runner.graphs.store
    found = opened.runner.dispatcher.dispatch(BatchShape(query_lens=(tokens,)))
    if found.descriptor is None or not torch.cuda.is_available():
        return 0.0
    head = BatchDescriptor(num_tokens=1, num_reqs=1, uniform=True)
    entries = [
        store.get(GraphKey(graphs.prefill.phase, found.mode, found.descriptor)),
        store.get(GraphKey(graphs.head.phase, graphs.head.strategy.runtime_mode, head)),
    ]
    if graphs.prefill.strategy.name != "FULL":
        entries = entries[1:]
    programs = [entry.program for entry in entries if entry is not None]

    def ten_times() -> None:
        for program in programs * 10:
            program.replay()

    with store.device.stream_scope():
        return 1e6 * store.device.time(ten_times, repeats=5) / 10


def random_prompt(opened: OpenedEngine, length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(opened.runner.vocab_size) for _ in range(length)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def show(title: str, figures: dict[str, Any]) -> None:
    stages = figures.get("stages", {})
    rest = {name: value for name, value in figures.items() if name != "stages"}
    print(f"{title}: {rest}", file=sys.stderr, flush=True)
    if stages:
        print("    " + ", ".join(f"{n} {v}" for n, v in stages.items()), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

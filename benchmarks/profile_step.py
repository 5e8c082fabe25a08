"""Where the time of a step goes: GPU kernels by name, gaps between them, and the host.

A model folder is opened with dummy weights. Decode steps of a batch and prefill steps of a prompt run through
the engine's own loop, first unobserved (wall and CPU time), then under ``torch.profiler``: GPU activities are
merged into busy time, and what lies between them is gaps. On a CPU the table lists operators instead.
``--host`` adds Python functions by their own time.

    python benchmarks/profile_step.py --model DIR --batch 1 8 32 --prompt-tokens 16 512

Prints tables to stderr and one line of JSON to stdout.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gapless import SamplingParams
from gapless.config import EngineConfig
from gapless.engine.build import OpenedEngine, open_engine
from gapless.engine.core import EngineCore
from gapless.kernels import select
from gapless.models import decoder

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
WAITS = ("Synchronize", "cudaEventQuery")
NAME_LENGTH = 60


def main() -> None:
    arguments = parse_arguments()
    opened = open_model(arguments)
    result: dict[str, Any] = {
        "benchmark": "profile_step",
        "model": Path(arguments.model).name,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "options": {name: getattr(arguments, name) for name in ("unfused", "no_early_launch")},
        "plan": {p: opened.runner.report()["plan"][p]["strategy"] for p in ("prefill", "decode")},
        "nodes": largest_graphs(opened),
        "decode": {},
        "prefill": {},
    }
    for batch in arguments.batch:
        if batch > opened.runner.max_num_reqs:
            print(f"batch {batch} is above --max-running-requests, left out", file=sys.stderr)
            continue
        decode = DecodeSteps(opened, batch=batch, context=arguments.context, steps=arguments.steps)
        result["decode"][batch] = profile(decode, arguments, title=f"decode, batch {batch}")
    for tokens in arguments.prompt_tokens:
        if tokens >= opened.runner.max_model_len:
            print(f"a prompt of {tokens} tokens is too long for the model, left out", file=sys.stderr)
            continue
        prefill = PrefillSteps(opened, tokens=tokens, steps=arguments.steps)
        result["prefill"][tokens] = profile(prefill, arguments, title=f"prefill, {tokens} tokens")
    opened.runner.shutdown()
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder with config.json; its weights are dummies")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8], help="requests of decode steps")
    parser.add_argument("--prompt-tokens", type=int, nargs="*", default=[128], help="tokens of prefill steps")
    parser.add_argument("--context", type=int, default=128, help="cached tokens before the decode steps")
    parser.add_argument("--steps", type=int, default=20, help="steps per measurement")
    parser.add_argument("--rows", type=int, default=16, help="rows of each table")
    parser.add_argument("--host", action="store_true", help="also list Python functions by their own time")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument("--kv-cache-tokens", type=int)
    parser.add_argument("--prefill", help="strategy of prefill steps")
    parser.add_argument("--decode", help="strategy of decode steps")
    parser.add_argument("--unfused", action="store_true", help="torch operations, to compare with")
    parser.add_argument("--no-early-launch", action="store_true", help="kernels wait for the one ahead")
    parser.add_argument("--trace", type=Path, help="folder that keeps the profiler's traces")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def open_model(arguments: argparse.Namespace) -> OpenedEngine:
    if arguments.unfused:
        decoder.has_fused_kernels = lambda device: False
    if arguments.no_early_launch:
        select.has_early_launch = lambda device: False  # type: ignore[assignment]
    options = {
        "model": arguments.model,
        "load_format": "dummy",
        "device": arguments.device,
        "dtype": arguments.dtype,
        "max_model_len": arguments.max_model_len,
        "max_running_requests": arguments.max_running_requests,
        "kv_cache_tokens": arguments.kv_cache_tokens,
        "cuda_graph_backend_prefill": arguments.prefill,
        "cuda_graph_backend_decode": arguments.decode,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return open_engine(EngineConfig.from_sources(python=given))


def largest_graphs(opened: OpenedEngine) -> dict[str, int]:
    """Recorded nodes of each phase's largest graph; empty where nothing was captured."""
    nodes: dict[str, int] = {}
    for graph in opened.runner.report()["graphs"]:
        nodes[graph["phase"]] = max(nodes.get(graph["phase"], 0), graph["nodes"])
    return nodes


class DecodeSteps:
    """``batch`` requests past their prompts; a step draws one token for each."""

    def __init__(self, opened: OpenedEngine, *, batch: int, context: int, steps: int) -> None:
        self._opened, self._batch, self.steps = opened, batch, steps
        longest = opened.runner.max_model_len - 3 * steps - 8
        if longest < 1:
            raise SystemExit(f"--steps {steps} does not fit into {opened.runner.max_model_len} positions")
        self._context = min(context, longest)

    @contextmanager
    def ready(self) -> Iterator[Callable[[], object]]:
        core = EngineCore(self._opened.runner)
        prompts = [random_prompt(self._opened, self._context) for _ in range(self._batch)]
        for index, prompt in enumerate(prompts):
            core.add_request(str(index), prompt, greedy(3 * self.steps + 8), streams=False)
        while core.scheduler.waiting or any(not s.output_token_ids for s in core.scheduler.running):
            core.step()
        for _ in range(3):
            core.step()
        yield core.step
        for index in range(self._batch):
            core.abort_request(str(index))
        while core.has_unfinished():
            core.step()


class PrefillSteps:
    """One request with a fresh prompt, of which one token is drawn: all steps until it has been read."""

    def __init__(self, opened: OpenedEngine, *, tokens: int, steps: int) -> None:
        self._opened, self._tokens, self.steps = opened, tokens, steps

    @contextmanager
    def ready(self) -> Iterator[Callable[[], object]]:
        core = EngineCore(self._opened.runner)
        prompts = [random_prompt(self._opened, self._tokens) for _ in range(8)]
        count = 0

        def prefill() -> None:
            nonlocal count
            count += 1
            core.add_request(str(count), prompts[count % len(prompts)], greedy(1), streams=False)
            while core.has_unfinished():
                core.step()

        for _ in range(3):
            prefill()
        yield prefill


def random_prompt(opened: OpenedEngine, length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(opened.runner.vocab_size) for _ in range(length)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def profile(
    workload: DecodeSteps | PrefillSteps, arguments: argparse.Namespace, *, title: str
) -> dict[str, Any]:
    """Time ``workload`` unobserved, then profile it; prints the tables and returns the figures."""
    with workload.ready() as step:
        walls, cpu_us = time_steps(step, workload.steps)
    with workload.ready() as step:
        events, trace_us = trace_steps(step, workload.steps, keep=trace_path(arguments, title))
    figures: dict[str, Any] = {
        "wall_us": round(statistics.median(walls), 1),
        "wall_us_min_max": [round(min(walls), 1), round(max(walls), 1)],
        "cpu_us": round(cpu_us, 1),
        **analyse(events, workload.steps),
        "profiled_wall_us": round(trace_us, 1),
    }
    print_table(title, figures, arguments.rows)
    if arguments.host:
        with workload.ready() as step:
            print_host_functions(step, workload.steps, arguments.rows)
    return figures


def time_steps(step: Callable[[], object], steps: int) -> tuple[list[float], float]:
    """Wall microseconds of each step, and CPU microseconds (all threads; includes busy waiting) per step."""
    synchronize()
    cpu_start, walls = time.process_time(), []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        walls.append(1e6 * (time.perf_counter() - start))
    synchronize()
    return walls, 1e6 * (time.process_time() - cpu_start) / steps


def trace_steps(
    step: Callable[[], object], steps: int, *, keep: Path | None
) -> tuple[list[dict[str, Any]], float]:
    """The profiler's events of ``steps`` steps, and the wall microseconds a step took under it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize()
        wall_us = 1e6 * (time.perf_counter() - start) / steps
    with tempfile.TemporaryDirectory() as folder:
        path = keep or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"], wall_us


def analyse(events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Per step: GPU busy time and gaps, host time spent waiting, and the busiest kernels or operators."""
    on_gpu = sorted((e for e in events if e.get("cat") in GPU_CATEGORIES), key=lambda e: e["ts"])
    waits = [e["dur"] for e in events if e.get("cat") == "cuda_runtime" and is_wait(e["name"])]
    launches = [e for e in events if e.get("cat") == "cuda_runtime" and "Launch" in e["name"]]
    if not on_gpu:
        own = own_times([e for e in events if e.get("cat") == "cpu_op"])
        return {"operators": top(own, steps), "num_operators": round(sum(n for n, _ in own.values()) / steps)}
    busy, gaps, end = 0.0, [], on_gpu[0]["ts"]
    by_name: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in on_gpu:
        start, stop = event["ts"], event["ts"] + event["dur"]
        if start > end:
            gaps.append(start - end)
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
        count, total = by_name[short_name(event["name"])]
        by_name[short_name(event["name"])] = (count + 1, total + event["dur"])
    span = end - on_gpu[0]["ts"]
    return {
        "gpu_busy_us": round(busy / steps, 1),
        "gpu_span_us": round(span / steps, 1),
        "gpu_gap_us": round(sum(gaps) / steps, 1),
        "gaps_over_20_us": round(sum(g > 20 for g in gaps) / steps, 2),
        "gaps_over_20_us_total": round(sum(g for g in gaps if g > 20) / steps, 1),
        "largest_gap_us": round(max(gaps, default=0.0), 1),
        "num_gpu_activities": round(len(on_gpu) / steps, 1),
        "num_launches": round(len(launches) / steps, 1),
        "host_wait_us": round(sum(waits) / steps, 1),
        "kernels": top(by_name, steps),
    }


def is_wait(name: str) -> bool:
    return any(word in name for word in WAITS)


def own_times(events: list[dict[str, Any]]) -> dict[str, tuple[int, float]]:
    """Operator name -> (calls, microseconds without the operators it called)."""
    totals: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    by_thread: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        by_thread[event["tid"]].append(event)
    for thread in by_thread.values():
        open_events: list[dict[str, Any]] = []
        for event in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
            while open_events and open_events[-1]["ts"] + open_events[-1]["dur"] <= event["ts"]:
                open_events.pop()
            count, total = totals[event["name"]]
            totals[event["name"]] = (count + 1, total + event["dur"])
            if open_events:
                parent = open_events[-1]["name"]
                totals[parent] = (totals[parent][0], totals[parent][1] - event["dur"])
            open_events.append(event)
    return totals


def short_name(name: str) -> str:
    """A kernel's name without template arguments and parameters."""
    name = re.sub(r"^void ", "", name)
    name = re.sub(r"\(anonymous namespace\)::", "", name)
    head = re.split(r"[<(]", name, maxsplit=1)[0]
    functor = re.search(r"(\w+[Ff]unctor\w*|\w+Ops?)\b", name[len(head) :])
    return (head + (f" {functor.group(1)}" if functor else ""))[:NAME_LENGTH]


def top(totals: dict[str, tuple[int, float]], steps: int) -> list[dict[str, Any]]:
    """Everything per step, most time first."""
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])
    return [
        {"name": name, "count": round(count / steps, 2), "us": round(us / steps, 2)}
        for name, (count, us) in ordered[:40]
    ]


def print_table(title: str, figures: dict[str, Any], num_rows: int) -> None:
    print(f"\n{title} (per step)", file=sys.stderr)
    for name, value in figures.items():
        if name not in ("kernels", "operators"):
            print(f"  {name:24} {value}", file=sys.stderr)
    rows = figures.get("kernels") or figures["operators"]
    total = sum(row["us"] for row in rows) or 1.0
    for row in rows[:num_rows]:
        share = 100 * row["us"] / total
        each = row["us"] / row["count"]
        print(
            f"  {row['us']:10.1f} us {share:5.1f}%  {row['count']:7.1f} x {each:8.2f} us  {row['name']}",
            file=sys.stderr,
        )


def print_host_functions(step: Callable[[], object], steps: int, num_rows: int) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        step()
    profiler.disable()
    stats = pstats.Stats(profiler, stream=sys.stderr)
    print(f"  Python functions by own time ({steps} steps)", file=sys.stderr)
    stats.strip_dirs().sort_stats("tottime").print_stats(num_rows)


def trace_path(arguments: argparse.Namespace, title: str) -> Path | None:
    if arguments.trace is None:
        return None
    arguments.trace.mkdir(parents=True, exist_ok=True)
    return arguments.trace / (re.sub(r"\W+", "_", title) + ".json")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

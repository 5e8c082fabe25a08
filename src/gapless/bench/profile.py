"""Where the time of a step goes: decode steps of a batch, prefill steps of a prompt, seen from both sides.

The steps run through the engine's own loop, first unobserved (wall and CPU time), then under
``torch.profiler``, whose events ``trace.py`` turns into kernels, gaps and host lanes; ``host_functions`` is a
third run under ``cProfile``. An observed step is slower than an unobserved one, so ``wall_us`` is the figure
and the rest are its parts.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from gapless.bench.latency import greedy
from gapless.bench.trace import Event, analyse, cpu_lanes
from gapless.engine.core import EngineCore
from gapless.errors import ConfigError

if TYPE_CHECKING:
    from gapless.engine.step import StepRunner

Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    batches: tuple[int, ...] = (1, 8)
    prompt_tokens: tuple[int, ...] = (128,)
    context: int = 128
    """Cached tokens before the decode steps."""
    steps: int = 20
    trace_folder: Path | None = None
    """Keeps the profiler's traces, for a trace viewer."""
    host_rows: int = 0
    """Python functions to list, by their own time; 0: none."""


def profile_steps(
    runner: StepRunner,
    options: ProfileOptions,
    *,
    on_case: Callable[[str, dict[str, Any]], None] = lambda title, figures: None,
) -> dict[str, Any]:
    """Figures of every decode batch and prompt length that fits; ``on_case`` gets each when it is ready."""
    result: dict[str, Any] = {"decode": {}, "prefill": {}, "nodes": largest_graphs(runner), "notes": []}
    for batch in options.batches:
        if batch > runner.max_num_reqs:
            result["notes"].append(
                f"batch {batch} left out: a step holds {runner.max_num_reqs} (--max-running-requests)"
            )
            continue
        decode = DecodeSteps(runner, batch=batch, context=options.context, steps=options.steps)
        result["decode"][batch] = profile_case(decode, options, title=f"decode, batch {batch}")
        on_case(f"decode, batch {batch}", result["decode"][batch])
    for tokens in options.prompt_tokens:
        if tokens >= runner.max_model_len:
            result["notes"].append(
                f"a prompt of {tokens} tokens left out: the model has {runner.max_model_len} positions"
            )
            continue
        prefill = PrefillSteps(runner, tokens=tokens, steps=options.steps)
        result["prefill"][tokens] = profile_case(prefill, options, title=f"prefill, {tokens} tokens")
        on_case(f"prefill, {tokens} tokens", result["prefill"][tokens])
    return result


def largest_graphs(runner: StepRunner) -> dict[str, int]:
    """Recorded nodes of each phase's largest graph; empty where nothing was captured."""
    nodes: dict[str, int] = {}
    for graph in runner.report()["graphs"]:
        nodes[graph["phase"]] = max(nodes.get(graph["phase"], 0), graph["nodes"])
    return nodes


class Workload(Protocol):
    steps: int

    def ready(self) -> Any:
        """A context whose value runs one step."""


class DecodeSteps:
    """``batch`` requests past their prompts; a step draws one token for each."""

    def __init__(self, runner: StepRunner, *, batch: int, context: int, steps: int) -> None:
        self._runner, self._batch, self.steps = runner, batch, steps
        longest = runner.max_model_len - 3 * steps - 8
        if longest < 1:
            raise ConfigError(f"--steps={steps} does not fit into {runner.max_model_len} positions")
        self._context = min(context, longest)

    @contextmanager
    def ready(self) -> Iterator[Step]:
        core = EngineCore(self._runner)
        for index in range(self._batch):
            prompt = random_prompt(self._runner, self._context)
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

    def __init__(self, runner: StepRunner, *, tokens: int, steps: int) -> None:
        self._runner, self._tokens, self.steps = runner, tokens, steps

    @contextmanager
    def ready(self) -> Iterator[Step]:
        core = EngineCore(self._runner)
        prompts = [random_prompt(self._runner, self._tokens) for _ in range(8)]
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


def random_prompt(runner: StepRunner, length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(runner.vocab_size) for _ in range(length)]


def profile_case(workload: Workload, options: ProfileOptions, *, title: str) -> dict[str, Any]:
    """Time ``workload`` unobserved, then profile it."""
    with workload.ready() as step:
        walls, cpu_us = time_steps(step, workload.steps)
    with workload.ready() as step:
        events, trace_us = trace_steps(step, workload.steps, keep=_trace_path(options, title))
    figures: dict[str, Any] = {
        "wall_us": round(statistics.median(walls), 1),
        "wall_us_min_max": [round(min(walls), 1), round(max(walls), 1)],
        "cpu_us": round(cpu_us, 1),
        **analyse(events, workload.steps),
        "cpu_lanes": cpu_lanes(events, workload.steps),
        "profiled_wall_us": round(trace_us, 1),
    }
    if options.host_rows:
        with workload.ready() as step:
            figures["host_functions"] = host_functions(step, workload.steps, options.host_rows)
    return figures


def time_steps(step: Step, steps: int) -> tuple[list[float], float]:
    """Wall microseconds of each step, and CPU microseconds (all threads; includes busy waiting) per step."""
    synchronize()
    cpu_start, walls = time.process_time(), []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        walls.append(1e6 * (time.perf_counter() - start))
    synchronize()
    return walls, 1e6 * (time.process_time() - cpu_start) / steps


def trace_steps(step: Step, steps: int, *, keep: Path | None) -> tuple[list[Event], float]:
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


def host_functions(step: Step, steps: int, num_rows: int) -> list[str]:
    """Python functions by own time, as lines of ``cProfile``."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        step()
    profiler.disable()
    text = StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(num_rows)
    return [line for line in text.getvalue().splitlines() if line.strip()]


def table_lines(title: str, figures: dict[str, Any], num_rows: int) -> list[str]:
    """The figures of one case, and its busiest kernels or operators, as text."""
    lines = [f"{title} (per step)"]
    for name, value in figures.items():
        if name not in ("kernels", "operators", "host_functions", "cpu_lanes"):
            lines.append(f"  {name:24} {value}")
    for lane in figures["cpu_lanes"][:4]:
        lines.append(f"  {'host thread':24} {lane['busy_us']} us in operators and CUDA calls")
    rows = figures.get("kernels") or figures.get("operators") or []
    total = sum(row["us"] for row in rows) or 1.0
    for row in rows[:num_rows]:
        share, each = 100 * row["us"] / total, row["us"] / row["count"]
        count = f"{row['count']:7.1f} x {each:8.2f} us"
        lines.append(f"  {row['us']:10.1f} us {share:5.1f}%  {count}  {row['name']}")
    return lines + [f"  {line}" for line in figures.get("host_functions", [])]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _trace_path(options: ProfileOptions, title: str) -> Path | None:
    if options.trace_folder is None:
        return None
    options.trace_folder.mkdir(parents=True, exist_ok=True)
    return options.trace_folder / (re.sub(r"\W+", "_", title) + ".json")

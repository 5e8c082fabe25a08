"""Graphs: what each strategy costs at start and what it does with a mix of requests.

Every strategy gets an engine of its own and the same requests; the rest is the engine's report: seconds and
memory of its captures, which sizes were replayed how often, how much of them was padding, and which steps ran
eagerly and why. The engines start one after the other in one process, so the first also pays for compiling
kernels; ``notes`` say so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gapless.bench.latency import timed_generate
from gapless.bench.throughput import ThroughputOptions, fitting_lengths
from gapless.bench.workload import Lengths, PromptSource
from gapless.errors import ConfigError, GaplessError

if TYPE_CHECKING:
    from gapless.llm import LLM

Row = dict[str, Any]
Open = Callable[[Mapping[str, Any]], AbstractContextManager["LLM"]]
"""Opens an engine with these options besides the caller's own."""

STRATEGIES: dict[str, dict[str, Any]] = {
    "default": {},
    "full": {"cuda_graph_backend_prefill": "full", "cuda_graph_backend_decode": "full"},
    "breakable": {"cuda_graph_backend_prefill": "breakable", "cuda_graph_backend_decode": "full"},
    "tc_piecewise": {"cuda_graph_backend_prefill": "tc_piecewise", "cuda_graph_backend_decode": "full"},
    "disabled": {"cuda_graph_backend_prefill": "disabled", "cuda_graph_backend_decode": "disabled"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphsOptions:
    strategies: tuple[str, ...] = ("full", "breakable", "tc_piecewise", "disabled")
    requests: int = 64
    lengths: Lengths = field(default_factory=lambda: Lengths(low=16, high=1024, shape="log"))
    output_tokens: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.strategies:
            if name not in STRATEGIES:
                raise ConfigError(f"--strategies: there is no {name!r}; choose from {', '.join(STRATEGIES)}")


def measure_graphs(
    open_engine: Open, options: GraphsOptions, *, on_row: Callable[[Row], None] = lambda row: None
) -> dict[str, Any]:
    """A row per strategy, with its report; one that cannot start has ``error`` instead."""
    rows: list[Row] = []
    notes = ["engines started one after the other in one process: the first also compiled kernels"]
    for strategy in options.strategies:
        try:
            start = time.perf_counter()
            with open_engine(STRATEGIES[strategy]) as llm:
                ready_s = time.perf_counter() - start
                row, cut = _measure(llm, strategy, ready_s, options)
                notes += [note for note in cut if note not in notes]
        except GaplessError as error:
            row = {"strategy": strategy, "error": " ".join(str(error).split())}
        rows.append(row)
        on_row(row)
    if all("error" in row for row in rows):
        raise ConfigError(f"no strategy could start; {rows[0]['strategy']}: {rows[0]['error']}")
    return {
        "rows": rows,
        "requests": options.requests,
        "lengths": str(options.lengths),
        "output_tokens": options.output_tokens,
        "notes": notes,
    }


def _measure(llm: LLM, strategy: str, ready_s: float, options: GraphsOptions) -> tuple[Row, list[str]]:
    fitting = ThroughputOptions(lengths=options.lengths, output_tokens=options.output_tokens)
    lengths, notes = fitting_lengths(llm.runner.max_model_len, fitting)
    source = PromptSource(llm.runner.vocab_size, seed=options.seed)
    prompts = source.prompts(lengths.draw(source.rng, options.requests))
    llm.reset_report()
    seconds = timed_generate(llm, prompts, options.output_tokens)
    report = llm.report()
    return {
        "strategy": strategy,
        "plan": {phase: report["plan"][phase]["strategy"] for phase in ("prefill", "decode")},
        "ready_s": round(ready_s, 3),
        "capture_s": report["memory"]["capture_s"],
        "graphs": len(report["graphs"]),
        "pool_bytes": report["memory"]["pool_bytes"],
        "driver_bytes": report["memory"]["driver_bytes"],
        "run_s": round(seconds, 4),
        "replays": sum(step["count"] for step in report["steps"]),
        "eager_steps": sum(row["count"] for row in report["eager"]),
        "padding": padding_by_phase(report["steps"]),
        "report": report,
    }, notes


def padding_by_phase(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Of all rows that the replays of a phase computed, the part that was padding."""
    slots: dict[str, int] = {}
    padded: dict[str, int] = {}
    for step in steps:
        slots[step["phase"]] = slots.get(step["phase"], 0) + step["count"] * step["bucket"]
        padded[step["phase"]] = padded.get(step["phase"], 0) + step["padding"]
    return {phase: round(padded[phase] / count, 4) if count else 0.0 for phase, count in slots.items()}

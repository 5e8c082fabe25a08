"""What graphs cost at start-up, by strategy: seconds, memory and their number, each in a process of its own.

A driver keeps what the first graphs of a process made it allocate, so a second engine in the same process
looks cheaper than it is; hence one subprocess per model and strategy. ``--strategies`` names what prefill
uses; decode is captured full, or with the same strategy under ``--decode same``. Weights are dummies.

Figures to stay below (H200): capture with tracing 3 s full, 4 s breakable, 15 s tc_piecewise for
Qwen3-0.6B and 1.3 times that for Llama-3.1-8B; graph memory (pool and driver) 0.5 and 1.0 GiB.

Usage: graph_costs.py --configs DIR... [--strategies full breakable tc_piecewise] [--output FILE]
The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from gpu_acceptance import metadata

STRATEGIES = ("full", "breakable", "tc_piecewise")
MAX_SECONDS = {"full": 3.0, "breakable": 4.0, "tc_piecewise": 15.0}
LARGE_MODEL_FACTOR = 1.3
MAX_GIB = {False: 0.5, True: 1.0}
"""Of graph memory, by whether the model is a large one."""
LARGE_HIDDEN_SIZE = 2048
"""Models at least this wide are held to the figures of the 8B model."""
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", required=True, help="config folders, run with dummy weights")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--decode", choices=("full", "same"), default="full")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-model-len", type=int, default=8448)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one subprocess")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--here", action="store_true", help="measure the first pair in this process")
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure(args, args.configs[0], args.strategies[0])))
        return
    result: dict[str, Any] = {"benchmark": "graph_costs", "decode": args.decode, "ok": True, "runs": []}
    for config in args.configs:
        for strategy in args.strategies:
            run = in_a_process(args, config, strategy)
            print_run(run)
            result["runs"].append(run)
            result["ok"] = result["ok"] and run["ok"]
            if args.output:  # what has been measured survives a run that is cut short
                args.output.write_text(json.dumps(result, indent=1) + "\n")
    result["meta"] = metadata()
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def in_a_process(args: argparse.Namespace, config: str, strategy: str) -> dict[str, Any]:
    command = [
        sys.executable, __file__, "--here", "--configs", config, "--strategies", strategy,
        "--decode", args.decode, "--device", args.device, "--max-model-len", str(args.max_model_len),
    ]  # fmt: skip
    name = {"model": Path(config).name, "strategy": strategy}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=args.timeout)
    except subprocess.TimeoutExpired:
        return {**name, "ok": False, "error": f"no result after {args.timeout:g} s"}
    if done.returncode:
        return {**name, "ok": False, "error": done.stderr[-2000:]}
    return json.loads(done.stdout.splitlines()[-1])


def measure(args: argparse.Namespace, config: str, strategy: str) -> dict[str, Any]:
    import torch

    from gapless import LLM

    is_cuda = torch.cuda.is_available() and args.device != "cpu"
    stamps: list[float] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "capture":
            stamps.append(time.perf_counter())

    start = time.perf_counter()
    decode = strategy if args.decode == "same" else "full"
    with LLM(
        model=config,
        load_format="dummy",
        device=args.device,
        max_model_len=args.max_model_len,
        cuda_graph_backend_prefill=strategy,
        cuda_graph_backend_decode=decode,
        progress=progress,
    ) as llm:
        ready_s = time.perf_counter() - start
        report = llm.report()
    seconds, memory = report["startup"]["seconds"], report["memory"]
    hidden_size = json.loads((Path(config) / "config.json").read_text())["hidden_size"]
    is_large = hidden_size >= LARGE_HIDDEN_SIZE
    total_s = seconds["capture"] + seconds.get("compile", 0.0)
    max_s = MAX_SECONDS[strategy] * (LARGE_MODEL_FACTOR if is_large else 1.0)
    graph_bytes = memory["pool_bytes"] + memory["driver_bytes"]
    return {
        "model": Path(config).name,
        "strategy": strategy,
        "decode": decode,
        "ok": not report["failures"]
        and total_s <= max_s
        and (not is_cuda or graph_bytes <= MAX_GIB[is_large] * GIB),
        "ready_s": round(ready_s, 2),
        "capture_s": seconds["capture"],
        "compile_s": seconds.get("compile", 0.0),
        "max_s": round(max_s, 2),
        "graph_gib": round(graph_bytes / GIB, 3),
        "max_gib": MAX_GIB[is_large],
        "pool_bytes": memory["pool_bytes"],
        "driver_bytes": memory["driver_bytes"],
        "estimate": report["startup"]["memory"]["estimate"],
        "ledger_capture_s": memory["capture_s"],
        "num_graphs": len(report["graphs"]),
        "phases": by_phase(report["graphs"], stamps if not report["failures"] else []),
        "costliest": costliest(report["graphs"]),
        "seconds": seconds,
        "compile": report.get("compile"),
        "failures": report["failures"],
    }


def by_phase(graphs: list[dict[str, Any]], stamps: list[float]) -> dict[str, dict[str, float]]:
    """The ledger, summed by phase; ``warm_up_s`` is the time between two captures (``stamps``) without the
    capture itself, of all graphs but the first."""
    names = ("segments", "nodes", "capture_s", "pool_bytes", "driver_bytes")
    phases: dict[str, dict[str, float]] = defaultdict(
        lambda: dict.fromkeys(("graphs", "warm_up_s", *names), 0)
    )
    for graph, before, after in zip(graphs[1:], stamps, stamps[1:], strict=False):
        row = phases[graph["phase"]]
        row["warm_up_s"] = round(row["warm_up_s"] + after - before - graph["capture_s"], 6)
    for graph in graphs:
        row = phases[graph["phase"]]
        row["graphs"] += 1
        for name in names:
            row[name] = round(row[name] + graph[name], 6)
    return dict(phases)


def costliest(graphs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The graphs that took most of the driver's memory: a few large ones are lazy work, not graphs."""
    names = ("phase", "num_tokens", "nodes", "capture_s", "pool_bytes", "driver_bytes")
    rows = sorted(graphs, key=lambda graph: -graph["driver_bytes"])[:6]
    return [{name: row[name] for name in names} for row in rows]


def print_run(run: dict[str, Any]) -> None:
    title = f"{run['model']} {run['strategy']}"
    if "error" in run:
        print(f"{title}: FAILED\n{run['error']}", flush=True)
        return
    print(
        f"{title}: {run['capture_s']:.2f} s + {run['compile_s']:.2f} s tracing (at most {run['max_s']:g}), "
        f"{run['graph_gib']:.3f} GiB (at most {run['max_gib']:g}), {run['num_graphs']} graphs, "
        f"ready in {run['ready_s']} s, {'ok' if run['ok'] else 'OVER'}"
    )
    for phase, row in run["phases"].items():
        print(
            f"  {phase:16} {row['graphs']:4} graphs {row['segments']:6} segments {row['nodes']:7} nodes "
            f"{row['warm_up_s']:6.2f} + {row['capture_s']:5.2f} s {row['pool_bytes'] / 2**20:8.1f} MiB pool "
            f"{row['driver_bytes'] / 2**20:8.1f} MiB driver"
        )
    for row in run["costliest"]:
        print(f"    {row}", flush=True)


if __name__ == "__main__":
    main()

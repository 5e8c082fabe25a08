"""``gapless bench profile`` with dummy weights, and with two switches for comparisons of our own kernels.

``--unfused`` runs torch operations instead of the fused kernels; ``--no-early-launch`` lets every kernel wait
for the one ahead. How steps are run and what the figures mean: ``gapless/bench/profile.py``.

    python benchmarks/profile_step.py --model DIR --batch 1 8 32 --prompt-tokens 16 512

Prints tables to stderr and one line of JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gapless.bench.meta import describe_run
from gapless.bench.profile import ProfileOptions, profile_steps, table_lines
from gapless.config import EngineConfig
from gapless.engine.build import OpenedEngine, open_engine
from gapless.kernels import select
from gapless.models import decoder


def main() -> None:
    arguments = parse_arguments()
    opened = open_model(arguments)
    meta = describe_run()
    options = ProfileOptions(
        batches=tuple(arguments.batch),
        prompt_tokens=tuple(arguments.prompt_tokens),
        context=arguments.context,
        steps=arguments.steps,
        trace_folder=arguments.trace,
        host_rows=arguments.rows if arguments.host else 0,
    )

    def show(title: str, figures: dict[str, Any]) -> None:
        print("\n" + "\n".join(table_lines(title, figures, arguments.rows)), file=sys.stderr, flush=True)

    found = profile_steps(opened.runner, options, on_case=show)
    result: dict[str, Any] = {
        "benchmark": "profile_step",
        "model": Path(arguments.model).name,
        "meta": meta,
        "device": meta["device"],
        "torch": meta["torch"],
        "options": {name: getattr(arguments, name) for name in ("unfused", "no_early_launch")},
        "plan": {p: opened.runner.report()["plan"][p]["strategy"] for p in ("prefill", "decode")},
        **found,
    }
    for note in found["notes"]:
        print(note, file=sys.stderr)
    opened.runner.shutdown()
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
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


if __name__ == "__main__":
    main()

"""Start-up and prefill by strategy, on dummy weights: what each way of capturing prefill costs and gives.

For each strategy, in one process: seconds until ready, capture and tracing seconds, graph memory, and the
median milliseconds of ``LLM.generate`` with one new token by prompt length. The first strategy of a process
also pays for compiling kernels.

Usage: strategies.py CONFIG_DIR [--strategies full breakable tc_piecewise] [--output FILE]
The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from gpu_acceptance import metadata

LENGTHS = (16, 128, 512, 2048, 4096)
REPEATS = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--strategies", nargs="*", default=["full", "breakable", "tc_piecewise"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "strategies_at_start", "meta": metadata()}
    result[Path(args.config).name] = {
        name: measure(args.config, args.device, name) for name in args.strategies
    }
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def measure(config: str, device: str, strategy: str) -> dict[str, Any]:
    from gapless import LLM, SamplingParams

    vocab = json.loads((Path(config) / "config.json").read_text())["vocab_size"]
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    with LLM(
        model=config,
        load_format="dummy",
        device=device,
        max_model_len=8448,
        cuda_graph_backend_prefill=strategy,
    ) as llm:
        ready_s = time.perf_counter() - start
        prefill_ms = {}
        for length in LENGTHS:
            times = []
            for _ in range(REPEATS + 2):
                prompt = [rng.randrange(10, vocab - 10) for _ in range(length)]
                start = time.perf_counter()
                llm.generate([prompt], params)
                times.append(time.perf_counter() - start)
            prefill_ms[length] = round(1e3 * statistics.median(times[2:]), 3)
        report = llm.report()
    return {
        "ready_s": round(ready_s, 2),
        "seconds": report["startup"]["seconds"],
        "memory": report["memory"],
        "compile": report["compile"],
        "failures": report["failures"],
        "eager": report["eager"],
        "prefill_ms": prefill_ms,
    }


if __name__ == "__main__":
    main()

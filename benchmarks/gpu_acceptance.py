"""What must hold on a real GPU, in one run: graphs equal padded eager, and no step runs eagerly.

1. SmolLM2, 64 prompts of mixed lengths, every strategy: greedy tokens with graphs are identical to padded
   eager's.
2. Dummy-weight models (``--configs DIR...``): batches of 1 to 256 requests and prompts of 1 to 8192 tokens
   run without one eager step after start-up; start-up seconds, graph memory and the memory estimate are
   recorded.
3. Step times of those models (prefill by tokens, decode by batch), for the log; medians.

Usage: gpu_acceptance.py [--smollm2 FILE.gguf|smollm2] [--configs DIR...] [--output FILE]
Prints a table and, as the last line, the whole result as JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STRATEGIES: dict[str, dict[str, Any]] = {
    "default": {},
    "full+full": {"cuda_graph_backend_prefill": "full", "cuda_graph_backend_decode": "full"},
    "breakable+full": {"cuda_graph_backend_prefill": "breakable", "cuda_graph_backend_decode": "full"},
    "breakable+breakable": {
        "cuda_graph_backend_prefill": "breakable",
        "cuda_graph_backend_decode": "breakable",
    },
    "tc_piecewise+full": {"compilation_config": {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}},
    "tc_piecewise+tc_piecewise": {
        "cuda_graph_backend_prefill": "tc_piecewise",
        "cuda_graph_backend_decode": "tc_piecewise",
    },
    "FULL": {"compilation_config": {"cudagraph_mode": "FULL"}},
    "FULL_DECODE_ONLY": {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
    "disabled": {"compilation_config": {"cudagraph_mode": "NONE"}},
}
BATCHES = (1, 2, 3, 8, 17, 32, 64, 128, 255, 256)
PROMPT_LENGTHS = (1, 2, 5, 16, 33, 100, 128, 512, 777, 1024, 2048, 4095, 4096, 4097, 8000, 8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smollm2", default="smollm2", help="model name or GGUF file; '' skips this part")
    parser.add_argument("--configs", nargs="*", default=[], help="config folders run with dummy weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "gpu_acceptance", "meta": metadata(), "ok": True}
    if args.smollm2:
        result["smollm2"] = [
            run_guarded(lambda name=name, options=options: compare_with_eager(args, name, options), name)
            for name, options in STRATEGIES.items()
        ]
    result["dummy"] = [
        run_guarded(lambda folder=folder: run_without_eager(folder, args.device), folder)
        for folder in args.configs
    ]
    result["ok"] = all(row.get("ok", False) for part in ("smollm2", "dummy") for row in result.get(part, []))
    for part in ("smollm2", "dummy"):
        for row in result.get(part, []):
            print(json.dumps(row)[:1500], file=sys.stderr)
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    sys.exit(0 if result["ok"] else 1)


def metadata() -> dict[str, Any]:
    import torch
    import transformers

    # A result must say when what ran was not what was committed.
    git = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    described = subprocess.run(git, capture_output=True, text=True, check=False)
    commit = described.stdout.strip() if described.returncode == 0 else "unknown"
    return {
        "command": " ".join(
            [Path(sys.argv[0]).name, *(a if "/" not in a else Path(a).name for a in sys.argv[1:])]
        ),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def run_guarded(fn: Any, name: str) -> dict[str, Any]:
    """One part that fails must not hide the results of the others."""
    try:
        return fn()
    except Exception as error:
        import traceback

        traceback.print_exc()
        return {"name": name, "ok": False, "error": f"{type(error).__name__}: {error}"}


def compare_with_eager(args: argparse.Namespace, name: str, options: dict[str, Any]) -> dict[str, Any]:
    from gapless import LLM, SamplingParams

    start = time.perf_counter()
    llm = LLM(model=args.smollm2, device=args.device, **options)
    ready_s = time.perf_counter() - start
    rng = random.Random(0)
    prompts = [
        [rng.randrange(5, 40000) for _ in range(rng.choice((1, 2, 3, 7, 20, 64, 65, 200, 513)))]
        for _ in range(64)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, detokenize=False)
    graphs = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    report = llm.report()
    with llm.padded_eager():
        eager = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    llm.shutdown()
    differing = [i for i, (a, b) in enumerate(zip(graphs, eager, strict=True)) if a != b]
    return {
        "name": name,
        "ok": not differing,
        "prompts": len(prompts),
        "identical": len(prompts) - len(differing),
        "differing": differing,
        "ready_s": round(ready_s, 2),
        "plan": {p: report["plan"][p]["strategy"] for p in ("prefill", "decode")},
        "eager": report["eager"],
        "failures": report["failures"],
        "memory": report["memory"],
        "num_graphs": len(report["graphs"]),
    }


def run_without_eager(folder: str, device: str) -> dict[str, Any]:
    from gapless import LLM, SamplingParams

    start = time.perf_counter()
    llm = LLM(model=folder, load_format="dummy", device=device, max_model_len=8448)
    ready_s = time.perf_counter() - start
    rng = random.Random(0)
    vocab = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]

    def prompt(length: int) -> list[int]:
        return [rng.randrange(10, vocab - 10) for _ in range(length)]

    def params(tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)

    for batch in BATCHES:
        outputs = llm.generate([prompt(rng.choice((1, 7, 64))) for _ in range(batch)], params(4))
        assert all(len(o.outputs[0].token_ids) == 4 for o in outputs), f"batch {batch}"
    for length in PROMPT_LENGTHS:
        (output,) = llm.generate([prompt(length)], params(3))
        assert len(output.outputs[0].token_ids) == 3, f"prompt of {length}"
    llm.generate([prompt(length) for length in PROMPT_LENGTHS], params(8))  # mixed steps
    report = llm.report()
    result = {
        "name": Path(folder).name,
        "ok": not report["eager"] and not report["failures"],
        "ready_s": round(ready_s, 2),
        "plan": {p: report["plan"][p]["strategy"] for p in ("prefill", "decode")},
        "eager": report["eager"],
        "failures": report["failures"],
        "num_graphs": len(report["graphs"]),
        "replays": sum(step["count"] for step in report["steps"]),
        "memory": report["memory"],
        "startup": report["startup"],
        "prefill_ms": {},
        "decode_ms": {},
    }
    for length in (16, 128, 512, 1024, 2048, 4096):
        result["prefill_ms"][length] = median_ms(lambda n=length: llm.generate([prompt(n)], params(1)), 11)
    for batch in (1, 8, 32, 128):
        result["decode_ms"][batch] = decode_ms(llm, [prompt(64) for _ in range(batch)], params)
    llm.shutdown()
    return result


def median_ms(fn: Any, repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return round(1e3 * statistics.median(times[2:]), 3)


def decode_ms(llm: Any, prompts: list[list[int]], params: Any) -> float:
    """Milliseconds a step: the difference of a long and a short run, over the difference in tokens."""
    per_step = []
    for _ in range(3):
        start = time.perf_counter()
        llm.generate(prompts, params(8))
        middle = time.perf_counter()
        llm.generate(prompts, params(108))
        end = time.perf_counter()
        per_step.append(((end - middle) - (middle - start)) / 100)
    return round(1e3 * statistics.median(per_step), 3)


if __name__ == "__main__":
    main()

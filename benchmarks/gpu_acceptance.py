"""What must hold on a real GPU, in one run: graphs equal padded eager, and no step runs eagerly.

1. SmolLM2, 64 prompts of mixed lengths, every strategy: greedy tokens with graphs are identical to padded
   eager's.
2. Dummy-weight models (``--configs DIR...``): batches of 1 to 256 requests and prompts of 1 to 8192 tokens
   run without one eager step after start-up; start-up seconds, graph memory and the memory estimate are
   recorded.
3. Their logits under every strategy are those of plain torch operations without graphs and padding, up to
   the noise of bfloat16: root mean square and maximum of the difference in standard deviations, and how often
   the best token is the same.
4. Step times of those models (prefill by tokens, decode by batch), for the log; medians.

Usage: gpu_acceptance.py [--smollm2 FILE.gguf|smollm2] [--configs DIR...] [--parts smollm2 dummy logits]
                         [--output FILE]
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
PARTS = ("smollm2", "dummy", "logits")
LOGITS_OF = ("default", "full+full", "breakable+breakable", "tc_piecewise+full", "tc_piecewise+tc_piecewise")
MAX_NOISE = 0.05
"""Root mean square, in standard deviations of the logits: some thirty layers of bfloat16."""
BATCHES = (1, 2, 3, 8, 17, 32, 64, 128, 255, 256)
PROMPT_LENGTHS = (1, 2, 5, 16, 33, 100, 128, 512, 777, 1024, 2048, 4095, 4096, 4097, 8000, 8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smollm2", default="smollm2", help="model name or GGUF file; '' skips this part")
    parser.add_argument("--configs", nargs="*", default=[], help="config folders run with dummy weights")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    import torch

    if args.device == "auto" and not torch.cuda.is_available():
        parser.error("this takes a CUDA GPU; with --device cpu it runs all the same, for many minutes")
    result: dict[str, Any] = {"benchmark": "gpu_acceptance", "meta": metadata(), "ok": True}
    if args.smollm2 and "smollm2" in args.parts:
        result["smollm2"] = [
            run_guarded(lambda name=name, options=options: compare_with_eager(args, name, options), name)
            for name, options in STRATEGIES.items()
        ]
    if "dummy" in args.parts:
        result["dummy"] = [
            run_guarded(lambda folder=folder: run_without_eager(folder, args.device), folder)
            for folder in args.configs
        ]
    if "logits" in args.parts:
        result["logits"] = [
            run_guarded(lambda folder=folder: compare_logits(folder, args.device), folder)
            for folder in args.configs
        ]
    result["ok"] = all(row.get("ok", False) for part in PARTS for row in result.get(part, []))
    for part in PARTS:
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
    llm.reset_prefix_cache()  # the same chunks again
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
    llm = LLM(
        model=folder,
        load_format="dummy",
        device=device,
        max_model_len=8448,
        enable_prefix_caching=False,  # prompts repeat while decode is timed
    )
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


def compare_logits(folder: str, device: str) -> dict[str, Any]:
    """Logits of eight prompts in a prefill step, and of the decode step after it, against plain torch."""
    import gapless.models.decoder as decoder

    fused = decoder.has_fused_kernels
    decoder.has_fused_kernels = lambda device: False
    try:
        expected = logits_of(folder, device, {"enforce_eager": True})
    finally:
        decoder.has_fused_kernels = fused
    rows = {}
    for name in LOGITS_OF:
        found = logits_of(folder, device, STRATEGIES[name])
        # After another first token the second step is another one.
        same = [a == b for a, b in zip(found["tokens"], expected["tokens"], strict=True)]
        rows[name] = {
            "prefill": difference(found["prefill"], expected["prefill"]),
            "decode": difference(found["decode"][same], expected["decode"][same]),
        }
        print(Path(folder).name, name, rows[name], file=sys.stderr, flush=True)
    ok = all(step["rms"] <= MAX_NOISE for row in rows.values() for step in row.values())
    return {"name": Path(folder).name, "ok": ok, "max_rms": MAX_NOISE, "strategies": rows}


def logits_of(folder: str, device: str, options: dict[str, Any]) -> dict[str, Any]:
    from gapless import LLM, SamplingParams

    rng = random.Random(0)
    vocab = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    prompts = [[rng.randrange(10, vocab - 10) for _ in range(n)] for n in (1, 2, 17, 33, 64, 100, 128, 200)]
    found = {}
    with LLM(
        model=folder,
        load_format="dummy",
        device=device,
        max_model_len=512,
        max_running_requests=16,
        cuda_graph_bs_prefill=[512, 1024],
        chunked_prefill_size=1024,
        cuda_graph_bs_decode=[8, 16],
        enable_prefix_caching=False,  # the same prompts twice, in the same order of rows
        **options,
    ) as llm:
        llm.runner.max_steps_ahead = 0  # the buffer then holds the last step of the call
        llm.runner.graphs.keeps_logits = True
        for step, num_tokens in (("prefill", 1), ("decode", 2)):
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
            outputs = llm.generate(prompts, params)
            found[step] = llm.runner._graphs.logits[: len(prompts)].double().cpu()
        found["tokens"] = [output.outputs[0].token_ids[0] for output in outputs]
        assert options.get("enforce_eager") or not llm.report()["eager"], llm.report()["eager"]
    return found


def difference(found: Any, expected: Any) -> dict[str, Any]:
    scaled = (found - expected) / expected.std()
    return {
        "rms": round(float(scaled.square().mean().sqrt()), 5),
        "max": round(float(scaled.abs().max()), 5),
        "rows": len(found),
        "same_best": int((found.argmax(-1) == expected.argmax(-1)).sum()),
    }


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

"""One GPU against several that hold the model together: step times, start-up, and whether they agree.

For each number of ranks: seconds until ready and of every stage, milliseconds per token of a
single greedy stream (the difference between two lengths, so prefill is left out), milliseconds of a prompt
with one new token, how sums over ranks are made; then the logits of a few prompts against those of the first
number, in standard deviations, and for how many tokens the greedy answers are the same. What is noise is told
by the same engine (``logits_rms_between_batches``): the same prompts one by one instead of together, which
are products of other numbers of rows; and by the distance between each prompt's two best tokens
(``gaps_of_first_tokens``), below which a token may turn out differently.

Each is a process of its own that may take ``--limit`` seconds: one that hangs is ended with all its ranks,
and the others are measured. The output file has every row as soon as it is known.

Usage: tensor_parallel.py CONFIG_DIR [--ranks 1 2] [--dtype auto] [--device auto] [--prompt 2048]
                          [--strategies full breakable] [--repeats 7] [--limit 600] [--output FILE]
The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from gpu_acceptance import metadata

SHORT, LONG = 17, 145
"""New tokens of the two runs whose difference is decode alone."""
AGREEING = 32
"""Tokens of the answers that are compared."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--strategies", nargs="+", default=["full"], help="of prefill; decode is full")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one strategy and rank count")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs=3, metavar=("RANKS", "STRATEGY", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        ranks, strategy, file = args.only
        torch.save(measure(args, int(ranks), strategy), file)
        return
    rows: list[dict[str, Any]] = []
    first: Answers | None = None
    for strategy in args.strategies:
        for ranks in args.ranks:
            row: dict[str, Any] = {"ranks": ranks, "strategy": strategy}
            try:
                measured, *answers = measure_apart(ranks, strategy, limit_s=args.limit)
            except RuntimeError as error:  # the other numbers are worth having
                row["error"] = str(error)
            else:
                first = first or (answers[0], answers[1])
                row |= measured | agreement(first, (answers[0], answers[1]))
            rows.append(row)
            print(json.dumps(row), flush=True)
            save(args, rows)  # so that a run that is cut short leaves what it has
    print(json.dumps(save(args, rows)))


def measure_apart(ranks: int, strategy: str, *, limit_s: float) -> tuple[Any, ...]:
    """``measure`` in a process of its own, with this one's arguments. Raises ``RuntimeError`` when it fails
    or takes longer than ``limit_s``; nothing of it is left then."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.pt"
        command = [sys.executable, *sys.argv, "--only", str(ranks), strategy, str(file)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            _, said = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done within {limit_s:g} s") from None
        finally:
            with suppress(ProcessLookupError):  # its other ranks included
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode:
            raise RuntimeError(said.strip().rpartition("\n")[2] or f"exit code {process.returncode}")
        return tuple(torch.load(file, weights_only=False))


Answers = tuple[Any, list[tuple[int, ...]]]
"""Logits, and tokens."""


def save(args: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The result so far, also as a file where one is asked for."""
    result = {
        "benchmark": "tensor_parallel",
        "meta": metadata(),
        "model": Path(args.config).name,
        "prompt_tokens": args.prompt,
        "rows": rows,
    }
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return result


def measure(args: argparse.Namespace, ranks: int, strategy: str) -> tuple[Any, ...]:
    """A row of numbers, logits of a few prompts, and greedy answers to them."""
    from gapless import LLM, SamplingParams

    config = json.loads((Path(args.config) / "config.json").read_text())
    vocab, rng = config["vocab_size"], random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(10, vocab - 10) for _ in range(length)]

    def params(max_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)

    start = time.perf_counter()
    with LLM(
        model=args.config,
        load_format="dummy",
        dtype=args.dtype,
        device=args.device,
        max_model_len=min(args.prompt + LONG + 64, config["max_position_embeddings"]),
        tensor_parallel_size=ranks,
        cuda_graph_backend_prefill=strategy,
        cuda_graph_backend_decode="full",
    ) as llm:
        ready_s = time.perf_counter() - start

        def seconds(length: int, max_tokens: int) -> float:
            tokens = [prompt(length)]
            begin = time.perf_counter()
            llm.generate(tokens, params(max_tokens))
            return time.perf_counter() - begin

        for _ in range(2):
            seconds(args.prompt, SHORT)
        llm.reset_report()
        prefill = [seconds(args.prompt, 1) for _ in range(args.repeats)]
        decode = [(seconds(16, LONG) - seconds(16, SHORT)) / (LONG - SHORT) for _ in range(args.repeats)]
        report = llm.report()
        rng.seed(1)
        prompts = [prompt(length) for length in (5, 33, 100)]
        llm.reset_prefix_cache()
        llm.runner.graphs.keeps_logits = True  # nothing is timed from here on
        llm.generate(prompts, params(1))
        logits = _first_logits(llm, len(prompts))
        alone = []
        for each in prompts:
            llm.reset_prefix_cache()
            llm.generate([each], params(1))
            alone.append(_first_logits(llm, 1))
        llm.reset_prefix_cache()
        outputs = llm.generate(prompts, params(AGREEING))
    ranks_report = report["startup"]["ranks"] or {}
    row = {
        "ranks": ranks,
        "strategy": strategy,
        "ready_s": round(ready_s, 2),
        "seconds": report["startup"]["seconds"],
        "capture_s": report["memory"]["capture_s"],
        "capture_s_by_phase": capture_seconds(report["graphs"]),
        "sums_by": ranks_report.get("sums_by"),
        "agrees_by": ranks_report.get("agrees_by"),
        "agreements": ranks_report.get("agreements"),
        "agreements_s": ranks_report.get("agreements_s"),
        "prefill_ms": round(1e3 * statistics.median(prefill), 3),
        "prefill_ms_spread": round(1e3 * (max(prefill) - min(prefill)), 3),
        "decode_ms": round(1e3 * statistics.median(decode), 4),
        "decode_ms_spread": round(1e3 * (max(decode) - min(decode)), 4),
        "num_graphs": len(report["graphs"]),
        "failures": report["failures"],
        "eager": report["eager"],
        "logits_rms_between_batches": _rms(torch.cat(alone) - logits) / float(logits.std()),
        "gaps_of_first_tokens": _gaps(logits),
    }
    return row, logits, [output.outputs[0].token_ids for output in outputs]


def _first_logits(llm: Any, num_rows: int) -> torch.Tensor:
    """Of the step that has just ended: ``[R, V]`` float32 on the host."""
    return llm.runner.graphs.logits[:num_rows].float().cpu().clone()


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def _gaps(logits: torch.Tensor) -> list[float]:
    """Between the two best of each row, in standard deviations of all."""
    best, second = logits.topk(2, dim=-1).values.unbind(-1)
    return ((best - second) / logits.std()).tolist()


def capture_seconds(graphs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each phase how many graphs there are and how long their captures took, waits for ranks included."""
    found: dict[str, dict[str, float]] = {}
    for graph in graphs:
        phase = found.setdefault(graph["phase"], {"graphs": 0, "seconds": 0.0})
        phase["graphs"] += 1
        phase["seconds"] = round(phase["seconds"] + graph["capture_s"], 4)
    return found


def agreement(first: Answers, other: Answers) -> dict[str, Any]:
    """Of logits and answers with those of the first row."""
    deviation = float(first[0].std())
    difference = (other[0] - first[0]) / deviation
    same = [
        next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
        for a, b in zip(first[1], other[1], strict=True)
    ]
    return {
        "logits_rms_difference": _rms(difference),
        "logits_max_difference": float(difference.abs().max()),
        "tokens_before_first_difference": same,
    }


if __name__ == "__main__":
    main()

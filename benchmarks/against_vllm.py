"""Ours and other engines on one machine in one run: the same prompts, one process per engine and model.

Engines: ``ours``, ``vllm`` (0.24.0), ``sglang`` (0.5.16), ``transformers`` (three ways, see
``against_transformers.py``). Every part ends in a file of ``--results``; what has one is not run again,
so a run that was cut short (``--time-limit``) goes on where it stopped. Prints the table of ratios ours /
theirs with the targets, and as its last line everything as JSON.

    python benchmarks/against_vllm.py --models DIR/qwen3-0.6b DIR/llama-3.1-8b --peers DIR --results DIR
    python benchmarks/against_vllm.py --only vllm --models DIR/qwen3-0.6b --peers DIR --results DIR
    python benchmarks/against_vllm.py --merge monday.json tuesday.json --output both.json

``--vllm-site`` and ``--sglang-site`` name the folders into which those engines were unpacked; left out, they
are imported from where Python finds them. Options after ``--`` go to ``one_engine.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from ratios import OURS, Part, compare, merge_parts, table_lines, unmeasured

import gapless
from gapless.bench.meta import describe_run

HERE = Path(__file__).parent
ENGINES = (OURS, "vllm", "sglang", "transformers")
NAMES = {"ours": OURS, **{name: name for name in ENGINES}}
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def main() -> None:
    arguments = parse_arguments()
    if arguments.merge:
        parts, notes = merge_parts(json.loads(path.read_text()) for path in arguments.merge)
    else:
        parts, notes = run_all(arguments)
    result = make_result(parts, notes)
    for line in [*table_lines(result["ratios"]), *(f"note: {note}" for note in result["notes"])]:
        print(line, file=sys.stderr)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    sys.exit(0 if parts else 1)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    words = sys.argv[1:] if argv is None else argv
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", type=Path, default=[], help="folders with config.json")
    parser.add_argument("--only", nargs="*", choices=list(NAMES), default=["ours", "vllm"])
    parser.add_argument("--peers", type=Path, help="folder with vllm_bench.py and sglang_bench.py")
    parser.add_argument("--vllm-site", type=Path, help="folder with vLLM's packages")
    parser.add_argument("--sglang-site", type=Path, help="folder with SGLang's packages")
    parser.add_argument("--results", type=Path, help="folder of part files; those that exist are kept")
    parser.add_argument("--fresh", action="store_true", help="run every part again")
    parser.add_argument("--time-limit", type=float, default=1e9, help="seconds for everything")
    parser.add_argument("--merge", nargs="*", type=Path, help="results of this script to join; runs nothing")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words[:cut])
    arguments.options = words[cut + 1 :]
    if not arguments.merge and not (arguments.models and arguments.results):
        parser.error("give --models and --results, or --merge")
    for model in arguments.models:
        if not (model / "config.json").is_file():
            parser.error(f"--models: there is no config.json in {model}")
    return arguments


def run_all(arguments: argparse.Namespace) -> tuple[list[Part], list[str]]:
    """Every part that has no file yet, then all that have one."""
    arguments.results.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.time_limit
    parts: list[Part] = []
    notes: list[str] = []
    for model in arguments.models:
        for engine in dict.fromkeys(NAMES[name] for name in arguments.only):
            path = arguments.results / f"{engine}-{model.name}.json"
            if arguments.fresh:
                path.unlink(missing_ok=True)
            if not path.exists():
                failure = run_part(engine, model, path, arguments, seconds=end - time.monotonic())
                if failure is not None:
                    notes.append(f"{engine}, {model.name}: {failure}")
                    continue
            found = json.loads(path.read_text())
            parts += found if isinstance(found, list) else [found]
    merged, differing = merge_parts([{"parts": parts}])
    return merged, notes + differing


def run_part(
    engine: str, model: Path, path: Path, arguments: argparse.Namespace, *, seconds: float
) -> str | None:
    """Run one engine in a process of its own; what went wrong, or None. Its log lies beside the file."""
    if seconds <= 0:
        return "no time left; run again to go on"
    print(f"{engine}, {model.name} …", file=sys.stderr, flush=True)
    fresh, log = path.with_suffix(".new"), path.with_suffix(".log")
    start = time.monotonic()
    fresh.unlink(missing_ok=True)
    with log.open("w") as output:
        code = run_group(
            command(engine, model, fresh, arguments), environment(engine, arguments), output, seconds
        )
    if code is None and not fresh.exists():
        return f"not ready after {seconds:.0f} s; run again with more time"
    if not fresh.exists():
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        return f"exit code {code}: {last[:300]}"
    found = json.loads(fresh.read_text())
    meta = describe_run() | {"seconds": round(time.monotonic() - start, 1)}
    marked = [part | {"meta": meta} for part in (found if isinstance(found, list) else [found])]
    path.write_text(json.dumps(marked, indent=1) + "\n")
    fresh.unlink()
    return None


def run_group(words: list[str], env: dict[str, str], output: IO[str], seconds: float) -> int | None:
    """The exit code, or None after ``seconds``. Nothing that it started outlives it: engines have workers,
    and a worker that stays would keep the GPU's memory from the next engine."""
    process = subprocess.Popen(
        words, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def command(engine: str, model: Path, output: Path, arguments: argparse.Namespace) -> list[str]:
    if engine == "transformers":
        return [sys.executable, str(HERE / "against_transformers.py"), str(model), "--output", str(output)]
    words = [sys.executable, str(HERE / "one_engine.py"), engine, str(model), "--output", str(output)]
    if arguments.peers is not None:
        words += ["--peers", str(arguments.peers)]
    return words + arguments.options


def environment(engine: str, arguments: argparse.Namespace) -> dict[str, str]:
    """This process's, with the engine's packages first on the path and ours last."""
    site = {"vllm": arguments.vllm_site, "sglang": arguments.sglang_site}.get(engine)
    paths = [] if site is None else [str(site)]
    extra = {}
    if engine == "sglang" and site is not None:
        paths.append(str(site / "nvidia_cutlass_dsl" / "dsl_packages"))
        extra["TVM_FFI_CACHE_DIR"] = str(site / "jit")
    paths += [str(Path(gapless.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **QUIET, **extra, "PYTHONPATH": os.pathsep.join(paths)}


def make_result(parts: list[Part], notes: list[str]) -> dict[str, Any]:
    rows = compare(parts)
    return {
        "benchmark": "against_vllm",
        "meta": describe_run(),
        "versions": {part["engine"]: part.get("version") for part in parts},
        "parts": parts,
        "ratios": rows,
        "met": sum(row["met"] is True for row in rows),
        "missed": sum(row["met"] is False for row in rows),
        "not_measured": unmeasured(parts, rows),
        "notes": notes,
    }


if __name__ == "__main__":
    main()

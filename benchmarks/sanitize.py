"""Our kernels under NVIDIA's compute-sanitizer: a few small cases of each GPU test, one run per tool.

``memcheck`` finds accesses outside of allocations (caching of memory is switched off for it, so that a block
ends where it ends), ``racecheck`` races in shared memory, ``initcheck`` reads of memory that nothing wrote
(prefill attention on Hopper copies whole pages of the cache, so the rest of a request's last page may be
named; it reaches no result).
Cases that capture graphs, that start an engine or that are large are left out: they run the same kernels, and
the sanitizer slows everything down a hundredfold.

Usage: sanitize.py [--tools memcheck racecheck] [--per-test 2] [--timeout 90] [--tests FILE...]
Exit code 1 for findings, 2 where there is no compute-sanitizer. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TESTS = ("test_triton_paged.py", "test_kernels_cuda.py", "test_linear_kernels.py", "test_sampling_cuda.py")
LEFT_OUT = re.compile(
    r"captur|replay|graph|bucket|engine|noise|long|offset|31|large|big|llm|frequenc|compil|candidate"
    r"|4096|2049|26214|151936"
)
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=["memcheck", "racecheck"])
    parser.add_argument("--tests", nargs="+", default=[str(ROOT / "tests" / "gpu" / name) for name in TESTS])
    parser.add_argument("--per-test", type=int, default=2, help="cases of each test function")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for one tool")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    args = parser.parse_args()
    cases = select(collect([path for path in args.tests if Path(path).exists()]), per_test=args.per_test)
    if args.list:
        print("\n".join(cases))
        return 0
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("compute-sanitizer is neither on PATH nor below /usr/local/cuda*/bin: install the CUDA toolkit")
        return 2
    runs = [run(sanitizer, tool, cases, timeout=args.timeout) for tool in args.tools]
    for found in runs:
        print(
            f"{found['tool']}: {found['outcome']}, {found['cases']} cases, {found['seconds']} s", flush=True
        )
    print(
        json.dumps({"benchmark": "sanitize", "ok": all(r["outcome"] == "clean" for r in runs), "runs": runs})
    )
    return int(any(r["outcome"] != "clean" for r in runs))


def find_sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer")
    return found or next(
        iter(sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer"), reverse=True)), None
    )


def collect(files: Iterable[str]) -> list[str]:
    """Node ids of the GPU tests in ``files``."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "--collect-only", "-q", "-m", "gpu", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return [line for line in done.stdout.splitlines() if "::" in line]


def select(node_ids: Iterable[str], *, per_test: int) -> list[str]:
    """The first cases and the last of each test function, without those that are too much for a sanitizer."""
    by_test: dict[str, list[str]] = defaultdict(list)
    for node_id in node_ids:
        if not LEFT_OUT.search(node_id.partition("::")[2]):
            by_test[node_id.partition("[")[0]].append(node_id)
    return [
        case
        for cases in by_test.values()
        for case in dict.fromkeys([*cases[: max(per_test - 1, 1)], cases[-1]][: max(per_test, 1)])
    ]


def run(sanitizer: str, tool: str, cases: list[str], *, timeout: float) -> dict[str, Any]:
    environment = dict(os.environ)
    if tool == "memcheck":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = [
        sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20", sys.executable, "-m",
        "pytest", "-o", "addopts=", "-x", "-p", "no:cacheprovider", "--timeout", str(int(timeout)), *cases,
    ]  # fmt: skip
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=timeout
        )
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        output, code = str(error.stdout or ""), None
    outcome = "timed out" if code is None else outcome_of(code, output)
    lines = [line for line in output.splitlines() if line.startswith("=========")]
    return {
        "tool": tool,
        "outcome": outcome,
        "cases": len(cases),
        "seconds": round(time.perf_counter() - start, 1),
        "found": [] if outcome == "clean" else lines[:60] or output.splitlines()[-20:],
    }


def outcome_of(code: int, output: str) -> str:
    """``clean``, ``findings``, or ``tests failed`` (then the kernels may not have run at all)."""
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    if code == 9 or (summary is not None and int(summary[1])):
        return "findings"
    if code or summary is None or not re.search(r"\d+ passed", output):
        return "tests failed"
    return "clean"


if __name__ == "__main__":
    sys.exit(main())

"""Our kernels under NVIDIA's compute-sanitizer: a few small cases of each GPU test, a run per tool and file.

``memcheck`` finds accesses outside of allocations (caching of memory is switched off for it, so that a block
ends where it ends), ``racecheck`` races in shared memory, ``initcheck`` reads of memory that nothing wrote
(prefill attention on Hopper copies whole pages of the cache, so the rest of a request's last page may be
named; it reaches no result).
Cases that capture graphs, that start an engine or that are large are left out: they run the same kernels, and
the sanitizer slows everything down a hundredfold.

Racecheck calls Triton's hand-over to the roles of a kernel a race (``races.py``: why it is none). A report of
that is put aside, and counted, only if the machine code that ran shows that a barrier orders the accesses and
racecheck says the same of a small kernel. Two of those are run first (``control``); one has a real race
beside its hand-over, and if that is not reported racecheck's runs count for nothing. Reports on kernels that
Triton has not compiled, those of libraries, are listed apart (``of_others``) and are no findings on ours.

Usage: sanitize.py [--tools memcheck racecheck] [--per-test 2] [--timeout 90] [--jobs 4] [--tests FILE...]
Exit code 1 for findings, 2 where there is no compute-sanitizer. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from races import Race, is_ordered, read_races

ROOT = Path(__file__).parents[1]
GPU_TESTS = ROOT / "tests" / "gpu"
TESTS = (
    "test_triton_paged.py",
    "test_kernels_cuda.py",
    "test_linear_cuda.py",
    "test_summed_cuda.py",
    "test_sampling_cuda.py",
)
CONTROL = GPU_TESTS / "test_racecheck_controls_cuda.py"
LEFT_OUT = re.compile(
    r"captur|replay|graph|bucket|engine|noise|long|offset|31|large|big|llm|frequenc|compil|candidate"
    r"|4096|2049|26214|151936"
)
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
REPORT = re.compile(r"(?<!=)========= (?!COMPUTE-SANITIZER|\w+ SUMMARY|Target application|Saved host)\S")
CLEAN = ("clean", "clean but for what is put aside")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=["memcheck", "racecheck"])
    parser.add_argument("--tests", nargs="+", default=[str(GPU_TESTS / name) for name in TESTS])
    parser.add_argument("--per-test", type=int, default=2, help="cases of each test function")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for one tool on one file")
    parser.add_argument("--jobs", type=int, default=4, help="files at a time")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    args = parser.parse_args()
    cases = select(collect(args.tests), per_test=args.per_test)
    if args.list:
        print("\n".join(cases))
        return 0
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("compute-sanitizer is neither on PATH nor below /usr/local/cuda*/bin: install the CUDA toolkit")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        # No code of other versions of the kernels, which could be mistaken for what ran.
        os.environ["TRITON_CACHE_DIR"] = folder
        control = check_racecheck(sanitizer, args.timeout) if "racecheck" in args.tools else None
        runs = [
            found
            for tool in args.tools
            for found in run_files(sanitizer, tool, cases, args.timeout, args.jobs, control)
        ]
    if control is not None:
        print(f"control: {json.dumps(control)}")
    is_blind = control is not None and control["race_seen"] is False
    is_ok = not is_blind and all(r["outcome"] in CLEAN for r in runs)
    print(json.dumps({"benchmark": "sanitize", "ok": is_ok, "control": control, "runs": runs}))
    return int(not is_ok)


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


def run_files(
    sanitizer: str, tool: str, cases: list[str], timeout: float, jobs: int, control: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """One run of ``tool`` for the cases of each file, ``jobs`` at a time."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        by_file[case.partition("::")[0]].append(case)

    def one(file: str) -> dict[str, Any]:
        start = time.perf_counter()
        code, output = execute(sanitizer, tool, by_file[file], timeout=timeout)
        found = judge(tool, code, output, may_put_aside=bool(control and control["hand_overs"]))
        seconds = round(time.perf_counter() - start, 1)
        print(f"{tool} {file}: {found['outcome']}, {len(by_file[file])} cases, {seconds} s", flush=True)
        return {"tool": tool, "file": file, "cases": len(by_file[file]), "seconds": seconds, **found}

    with ThreadPoolExecutor(max_workers=max(jobs, 1)) as pool:
        return list(pool.map(one, by_file))


def check_racecheck(sanitizer: str, timeout: float) -> dict[str, Any]:
    """What racecheck says of a kernel that only hands over, and whether it sees a race where there is one:
    None where these kernels do not run, on other GPUs than Hopper's."""
    code, output = execute(sanitizer, "racecheck", [str(CONTROL)], timeout=timeout)
    counts = Counter(
        (race.kernel, "hand-over" if is_ordered(race, codes_of(race.kernel)) else "race")
        for race in read_races(output)
    )
    was_skipped = code == 0 and not has_passed(output) and " skipped" in output
    return {
        "hand_overs": counts["hand_over_kernel", "hand-over"] + counts["racing_kernel", "hand-over"],
        "unexplained": counts["hand_over_kernel", "race"],
        "race_seen": None if was_skipped else counts["racing_kernel", "race"] > 0,
        "found": reports(read_races(output)) or output.splitlines()[-20:],
    }


def execute(sanitizer: str, tool: str, cases: list[str], *, timeout: float) -> tuple[int | None, str]:
    """Exit code, None where it was ended after ``timeout`` seconds, and all that was printed until then."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if tool == "memcheck":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    limit = "0" if tool == "racecheck" else "20"  # every race is looked at: 0 is no limit
    command = [
        sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", limit, sys.executable, "-m",
        "pytest", "-o", "addopts=", "-x", "-p", "no:cacheprovider", "--timeout", str(int(timeout)), *cases,
    ]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what it started, too
            process.wait()
            code = None
        log.seek(0)
        return code, log.read().decode(errors="replace")


def judge(tool: str, code: int | None, output: str, *, may_put_aside: bool) -> dict[str, Any]:
    """The outcome of a run and what it rests on. ``may_put_aside``: racecheck reports hand-overs of a control
    kernel."""
    races = read_races(output) if tool == "racecheck" else []
    codes = {kernel: codes_of(kernel) for kernel in {race.kernel for race in races}}
    hand_overs = [race for race in races if may_put_aside and is_ordered(race, codes[race.kernel])]
    of_others = [race for race in races if race.offsets is not None and not codes[race.kernel]]
    aside = hand_overs + of_others
    outcome = outcome_of(code, output, put_aside=len(aside))
    lines = [line for line in output.splitlines() if REPORT.search(line)]
    shown = reports(race for race in races if race not in aside) or lines[:60] or output.splitlines()[-20:]
    return {
        "outcome": outcome,
        "hand_overs": reports(hand_overs),
        "of_others": reports(of_others),
        "found": [] if outcome in CLEAN else shown,
    }


def outcome_of(code: int | None, output: str, *, put_aside: int = 0) -> str:
    """One of ``CLEAN``; ``findings``; ``tests failed`` (then the kernels may not have run at all); ``timed
    out``, with findings or without. ``put_aside``: how many of the reports in ``output`` are no findings."""
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    reported = int(summary[1]) if summary else len(REPORT.findall(output))
    has_findings = reported > put_aside or (code == 9 and not put_aside)
    if code is None:
        return "timed out with findings" if has_findings else "timed out"
    if has_findings:
        return "findings"
    if code not in (0, 9) or summary is None or not has_passed(output):
        return "tests failed"
    return CLEAN[1] if put_aside else CLEAN[0]


def has_passed(output: str) -> bool:
    """Whether tests ran and none failed: after findings the exit code no longer says so."""
    return bool(re.search(r"\d+ passed", output)) and not re.search(r"\d+ (?:failed|error)s?\b.* in ", output)


def reports(races: Iterable[Race]) -> list[str]:
    """Each once, with how often it came."""
    texts = Counter(re.sub(r" \[\d+ hazards?\]", "", race.text) for race in races)
    return [f"{count} x {text}" for text, count in texts.items()]


def codes_of(kernel: str) -> list[str]:
    """Assembler text of every variant of a Triton kernel that was compiled in this run."""
    from triton import knobs

    cubins = Path(os.environ["TRITON_CACHE_DIR"]).glob(f"**/{glob.escape(kernel)}.cubin")
    command = [knobs.nvidia.nvdisasm.path, "-c"]
    disassemble = partial(subprocess.run, capture_output=True, text=True, check=True, timeout=60)
    return [disassemble([*command, str(path)]).stdout for path in cubins]


if __name__ == "__main__":
    sys.exit(main())

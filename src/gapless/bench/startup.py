"""Start-up: seconds until an engine is ready, split by stage, in a fresh process for every repeat.

The parent starts ``python -m gapless.bench.startup OPTIONS``, which imports, makes an ``LLM``, generates one
token and prints what each part took. ``ready`` is from the start of the process to the end of ``LLM(…)``;
``start`` is ``LLM(…)`` alone, after the imports, which is what benchmarks of other engines call start-up.
With ``cold`` the caches of compiled kernels begin empty.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from gapless.bench.stats import spread
from gapless.errors import GaplessError

Row = dict[str, Any]
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")
SUMS = ("ready_s", "start_s", "first_token_s")


def measure_startup(
    options: Mapping[str, Any],
    *,
    config: str | None = None,
    repeats: int = 3,
    cold: bool = False,
    on_row: Callable[[Row], None] = lambda row: None,
) -> dict[str, Any]:
    """Start ``LLM(config=config, **options)`` in ``repeats`` processes; rows, spreads and the last report."""
    rows: list[Row] = []
    report: dict[str, Any] = {}
    for repeat in range(repeats):
        found = _start(options, config, cold=cold)
        report = found.pop("report")
        rows.append({"repeat": repeat, **found})
        on_row(rows[-1])
    stages = list(rows[0]["stages"])
    return {
        "rows": rows,
        **{name: spread([row[name] for row in rows]) for name in SUMS},
        "stages": {name: spread([row["stages"].get(name, 0.0) for row in rows]) for name in stages},
        "cold": cold,
        "report": report,
        "notes": [],
    }


def _start(options: Mapping[str, Any], config: str | None, *, cold: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        prefix = ["env", *(f"{name}={folder}" for name in _CACHES)] if cold else []
        given = json.dumps({"options": dict(options), "config": config, "started": time.time()})
        command = [*prefix, sys.executable, "-m", "gapless.bench.startup", given]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    if run.returncode != 0 or not lines:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise GaplessError(f"the engine did not start (exit code {run.returncode}): {last}")
    return json.loads(lines[-1])


def _child(given: Mapping[str, Any]) -> dict[str, Any]:
    """Runs in the fresh process. The wall clock joins the two, so the first stage is the interpreter."""
    begun = time.time()
    stages = {"interpreter": begun - given["started"]}
    start = time.perf_counter()
    import torch

    stages["import torch"] = time.perf_counter() - start
    start = time.perf_counter()
    import gapless.engine.build
    import gapless.llm

    stages["import gapless"] = time.perf_counter() - start
    start = time.perf_counter()
    llm = gapless.llm.LLM(config=given["config"], **given["options"])
    start_s = time.perf_counter() - start
    ready_s = time.time() - given["started"]
    report = llm.report()
    inside = report["startup"]["seconds"]
    stages |= {name: float(seconds) for name, seconds in inside.items()}
    stages["other"] = max(0.0, start_s - sum(inside.values()))

    from gapless.bench.latency import greedy

    start = time.perf_counter()
    llm.generate([[0]], greedy(1))
    first_token_s = time.perf_counter() - start
    llm.shutdown()
    return {
        "ready_s": round(ready_s, 3),
        "start_s": round(start_s, 3),
        "first_token_s": round(first_token_s, 4),
        "stages": {name: round(seconds, 3) for name, seconds in stages.items()},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "report": report,
    }


if __name__ == "__main__":
    try:
        print(json.dumps(_child(json.loads(sys.argv[1]))))
    except GaplessError as error:
        sys.exit(" ".join(str(error).split()))

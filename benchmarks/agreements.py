"""What it costs ranks on this host to agree: through gloo and through memory, in turns, in one run.

For each number of ranks, microseconds of one ``agree()`` where all come at once, on rank 0: mean, median,
10th and 99th percentile of every turn. Needs no GPU. With fewer free cores than ranks both are slower: the
mean says what it costs then, the 10th percentile what it costs where each rank has a core.

Usage: agreements.py [--ranks 2 4] [--rounds 2000] [--turns 3] [--output FILE]
The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_acceptance import metadata

from gapless.parallel.group import RankGroup

WARM_UPS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = [measure(size, args.rounds, args.turns) for size in args.ranks]
    result = {
        "benchmark": "agreements",
        "meta": metadata()
        | {"cores": len(os.sched_getaffinity(0)), "load_1_min": round(os.getloadavg()[0], 1)},
        "rows": rows,
    }
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def measure(size: int, num_rounds: int, num_turns: int) -> dict[str, Any]:
    """A row of numbers for ``size`` ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    ranks = [
        context.Process(
            target=run_rank, args=(rank, size, store.port, num_rounds, num_turns, theirs), daemon=True
        )
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    theirs.close()
    turns = ours.recv()  # EOFError when rank 0 has failed
    for process in ranks:
        process.join()
    means = {how: statistics.median(turn["mean_us"] for turn in turns[how]) for how in turns}
    return {"ranks": size, **turns, "ratio_of_means": round(means["gloo"] / means["shared memory"], 1)}


def run_rank(rank: int, size: int, port: int, num_rounds: int, num_turns: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    groups = [
        RankGroup(dist.PrefixStore(name, store), rank=rank, size=size, torch_device=torch.device("cpu"))
        for name in ("first", "second")
    ]
    groups[1].share_memory()
    turns: dict[str, list[dict[str, float]]] = {}
    for _ in range(num_turns):
        for group in groups:
            turns.setdefault(group.agrees_by, []).append(time_agreements(group, num_rounds))
    if rank == 0:
        pipe.send(turns)
    groups[0].agree()
    for group in reversed(groups):  # the first one owns what torch has made
        group.close()


def time_agreements(group: RankGroup, num_rounds: int) -> dict[str, float]:
    for _ in range(WARM_UPS):
        group.agree()
    times = []
    for _ in range(num_rounds):
        start = time.perf_counter()
        group.agree()
        times.append(1e6 * (time.perf_counter() - start))
    times.sort()
    return {
        "mean_us": round(statistics.mean(times), 1),
        "p10_us": round(times[int(0.1 * len(times))], 1),
        "median_us": round(statistics.median(times), 1),
        "p99_us": round(times[int(0.99 * len(times))], 1),
    }


if __name__ == "__main__":
    main()

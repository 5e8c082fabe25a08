"""A profiler's events as figures per step: GPU busy time, gaps, waiting, the busiest kernels or operators.

GPU activities are merged into busy time (two that overlap count once), and what lies between them is gaps.
Without a GPU the table lists operators by their own time instead. Input is the ``X`` events of a Chrome
trace; times are microseconds. Read ``profile.py`` for where they come from.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

Event = dict[str, Any]

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
WAITS = ("Synchronize", "cudaEventQuery")
NAME_LENGTH = 60
_MAX_ROWS = 40


def analyse(events: list[Event], steps: int) -> dict[str, Any]:
    """Per step: GPU busy time and gaps, host time spent waiting, and the busiest kernels or operators."""
    on_gpu = sorted((e for e in events if e.get("cat") in GPU_CATEGORIES), key=lambda e: e["ts"])
    waits = [e["dur"] for e in events if e.get("cat") == "cuda_runtime" and is_wait(e["name"])]
    launches = [e for e in events if e.get("cat") == "cuda_runtime" and "Launch" in e["name"]]
    if not on_gpu:
        own = own_times([e for e in events if e.get("cat") == "cpu_op"])
        return {"operators": top(own, steps), "num_operators": round(sum(n for n, _ in own.values()) / steps)}
    busy, gaps, end = 0.0, [], on_gpu[0]["ts"]
    by_name: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in on_gpu:
        start, stop = event["ts"], event["ts"] + event["dur"]
        if start > end:
            gaps.append(start - end)
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
        count, total = by_name[short_name(event["name"])]
        by_name[short_name(event["name"])] = (count + 1, total + event["dur"])
    span = end - on_gpu[0]["ts"]
    return {
        "gpu_busy_us": round(busy / steps, 1),
        "gpu_span_us": round(span / steps, 1),
        "gpu_gap_us": round(sum(gaps) / steps, 1),
        "gaps_over_20_us": round(sum(g > 20 for g in gaps) / steps, 2),
        "gaps_over_20_us_total": round(sum(g for g in gaps if g > 20) / steps, 1),
        "largest_gap_us": round(max(gaps, default=0.0), 1),
        "num_gpu_activities": round(len(on_gpu) / steps, 1),
        "num_launches": round(len(launches) / steps, 1),
        "host_wait_us": round(sum(waits) / steps, 1),
        "kernels": top(by_name, steps),
    }


def cpu_lanes(events: list[Event], steps: int) -> list[dict[str, Any]]:
    """Each host thread with the microseconds of a step in which it was inside an operator or a CUDA call."""
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver"):
            by_thread[event["tid"]].append(event)
    lanes = []
    for thread, own in by_thread.items():
        busy, end = 0.0, float("-inf")
        for event in sorted(own, key=lambda e: e["ts"]):
            stop = event["ts"] + event["dur"]
            busy += max(0.0, stop - max(event["ts"], end))
            end = max(end, stop)
        lanes.append({"thread": str(thread), "busy_us": round(busy / steps, 1), "events": len(own)})
    return sorted(lanes, key=lambda lane: -lane["busy_us"])


def is_wait(name: str) -> bool:
    return any(word in name for word in WAITS)


def own_times(events: list[Event]) -> dict[str, tuple[int, float]]:
    """Operator name -> (calls, microseconds without the operators it called)."""
    totals: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        by_thread[event["tid"]].append(event)
    for thread in by_thread.values():
        open_events: list[Event] = []
        for event in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
            while open_events and open_events[-1]["ts"] + open_events[-1]["dur"] <= event["ts"]:
                open_events.pop()
            count, total = totals[event["name"]]
            totals[event["name"]] = (count + 1, total + event["dur"])
            if open_events:
                parent = open_events[-1]["name"]
                totals[parent] = (totals[parent][0], totals[parent][1] - event["dur"])
            open_events.append(event)
    return totals


def short_name(name: str) -> str:
    """A kernel's name without template arguments and parameters."""
    name = re.sub(r"^void ", "", name)
    name = re.sub(r"\(anonymous namespace\)::", "", name)
    head = re.split(r"[<(]", name, maxsplit=1)[0]
    functor = re.search(r"(\w+[Ff]unctor\w*|\w+Ops?)\b", name[len(head) :])
    return (head + (f" {functor.group(1)}" if functor else ""))[:NAME_LENGTH]


def top(totals: dict[str, tuple[int, float]], steps: int) -> list[dict[str, Any]]:
    """Everything per step, most time first."""
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])
    return [
        {"name": name, "count": round(count / steps, 2), "us": round(us / steps, 2)}
        for name, (count, us) in ordered[:_MAX_ROWS]
    ]

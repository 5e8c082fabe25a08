"""Plans and reports as text for people: the plan in a few lines, every kind of step in one table.

Input is the plain dictionaries of the report schema, the same that ``--json`` prints, so what a person reads
and what a program reads cannot differ. Nothing here computes anything but sums and percentages.
"""

from __future__ import annotations

import sys
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_PHASE_ORDER = ("prefill", "head", "decode", "encoder", "sample", "sample_filtered")
_UNITS = {"prefill": ("token", "tokens"), "decode": ("request", "requests"), "encoder": ("patch", "patches")}
_QUIET_RULES = ("auto", "piecewise")
"""Decisions that only spell out the defaults; shown in full by ``inspect``."""
_PIPE_COLUMNS = 240


def make_console(stream: IO[str] | None = None) -> Console:
    """A console on ``stream`` (standard output). No markup; a pipe is wide enough for any row."""
    stream = sys.stdout if stream is None else stream
    width = None if stream.isatty() else _PIPE_COLUMNS
    return Console(file=stream, width=width, highlight=False, markup=False, soft_wrap=True)


def print_report(console: Console, report: dict[str, Any]) -> None:
    """The table of steps, then what was captured, where the start's seconds went, what the prefix cache
    saved, and captures that failed."""
    console.print(step_table(report))
    console.print(capture_line(report), style="dim")
    if "startup" in report:
        console.print(startup_line(report["startup"]["seconds"]), style="dim")
    cache = report.get("prefix_cache")
    if cache is not None:
        console.print(
            f"prefix cache: {cache['hits']} of {cache['queries']} prompt tokens ({cache['hit_rate']:.0%})",
            style="dim",
        )
    media = report.get("media")
    if media is not None:
        kept = media["embedding_cache"]
        console.print(
            f"images and videos: {kept['encoded']} encoded, {kept['hits']} found in the embedding cache",
            style="dim",
        )
    for failure in report["failures"]:
        console.print(f"capture failed: {failure['graph']}: {failure['message']}", style="yellow")


def step_table(report: dict[str, Any]) -> Table:
    """One row per kind of step: what ran as which graph, and what ran eagerly and why."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step")
    table.add_column("ran as")
    table.add_column("bucket", justify="right")
    table.add_column("steps", justify="right")
    table.add_column("padding", justify="right")
    for step in sorted(report["steps"], key=lambda s: (*_order(s), s["bucket"])):
        slots = step["count"] * step["bucket"]
        table.add_row(
            step["phase"],
            f"{step['strategy']} graph",
            _bucket_text(step),
            str(step["count"]),
            f"{step['padding'] / slots:.0%}" if slots else "0%",
        )
    for step in sorted(report["eager"], key=_order):
        table.add_row(
            step["phase"], Text(f"eager: {step['reason']}"), "", str(step["count"]), "", style="yellow"
        )
    replays, eager = (sum(s["count"] for s in report[kind]) for kind in ("steps", "eager"))
    table.add_section()
    table.add_row("all", f"{replays} graph replays, {eager} eager", "", str(replays + eager), "")
    return table


def plan_lines(plan: dict[str, Any], *, every_decision: bool = False) -> list[str]:
    """The plan: mode, each phase with its sizes, and the decisions that changed something (or all)."""
    lines = [f"plan      {plan['mode'] or 'set per phase'}"]
    for phase in ("prefill", "decode"):
        lines.append(f"{phase:<9} {_phase_text(plan, phase)}")
        lines += [f"  size {lost['size']} dropped: {lost['reason']}" for lost in plan[phase]["dropped"]]
    for decision in plan["decisions"]:
        if every_decision or decision["rule"] not in _QUIET_RULES:
            lines.append("  " + _decision_text(decision))
    return lines


def capture_line(report: dict[str, Any]) -> str:
    memory, num_graphs = report["memory"], len(report["graphs"])
    if not num_graphs:
        return "no graphs captured"
    text = (
        f"{num_graphs} graphs captured in {memory['capture_s']:.1f} s, pool {mebibytes(memory['pool_bytes'])}"
    )
    if memory["driver_bytes"]:
        text += f", driver {mebibytes(memory['driver_bytes'])}"
    return text


def startup_line(seconds: dict[str, float]) -> str:
    """The stages of a start: ``started in 7.2 s: load 1.2, kernels 0.7, cache 0.5, capture 4.3``."""
    stages = ", ".join(f"{name} {stage:.1f}" for name, stage in seconds.items())
    return f"started in {sum(seconds.values()):.1f} s: {stages}"


def mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def sizes_text(sizes: list[int]) -> str:
    """``1, 2, 4, 8`` in full, a long list by its ends and their number."""
    if len(sizes) <= 8:
        return ", ".join(map(str, sizes))
    return f"{len(sizes)} sizes, {sizes[0]} to {sizes[-1]}"


def _bucket_text(step: dict[str, Any]) -> str:
    one, many = _UNITS.get(step["phase"], ("row", "rows"))
    return f"{step['bucket']} {one if step['bucket'] == 1 else many}"


def _phase_text(plan: dict[str, Any], phase: str) -> str:
    part = plan[phase]
    if part["strategy"] == "disabled":
        return "disabled: every step runs eagerly"
    if not part["sizes"]:
        return f"{part['strategy']}, in the graphs of prefill"
    text = f"{part['strategy']}, {sizes_text(part['sizes'])} {part['unit']}"
    if phase == "decode" and plan["uniform_query_len"] > 1:
        text += f" of {plan['uniform_query_len']} tokens"
    return text


def _decision_text(decision: dict[str, Any]) -> str:
    where = f"{decision['phase']}: " if decision["phase"] else ""
    before, after = decision["before"], decision["after"]
    change = after if before == after else f"{before} → {after}"
    return f"{where}{change} ({decision['rule']}: {decision['reason']})"


def _order(step: dict[str, Any]) -> tuple[int, str]:
    phase = step["phase"]
    return (_PHASE_ORDER.index(phase) if phase in _PHASE_ORDER else len(_PHASE_ORDER), phase)

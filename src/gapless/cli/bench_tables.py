"""Results of ``gapless bench`` as tables for people, and single rows as lines of progress.

Input is the result as it is written to a file; nothing here computes more than a unit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich import box
from rich.table import Table

from gapless.cli.render import make_console, mebibytes, print_report

Result = dict[str, Any]


def print_result(result: Result) -> None:
    """The tables of ``result`` on standard output. A profile has shown its cases already."""
    console = make_console()
    tables = _TABLES.get(result["benchmark"])
    for table in tables(result) if tables is not None else []:
        console.print(table)
    if result["benchmark"] in ("latency", "throughput"):
        print_report(console, result["report"])


def row_text(row: dict[str, Any]) -> str:
    """One measurement in a line."""
    parts = []
    for name, value in row.items():
        if isinstance(value, dict) and "median" in value:
            parts.append(f"{name} {_spread(value)}")
        elif isinstance(value, dict):
            parts.append(f"{name} " + " ".join(f"{k}={v}" for k, v in value.items()))
        else:
            parts.append(f"{name} {value}")
    return "  ".join(parts)


def _latency(result: Result) -> list[Table]:
    table = _table("phase", "tokens", "requests", "ms", "min", "max", "IQR", "tokens/s")
    for row in result["rows"]:
        ms = row["ms"]
        table.add_row(
            row["phase"],
            str(row["tokens"]),
            str(row["requests"]),
            *(f"{ms[name]:.3f}" for name in ("median", "min", "max", "iqr")),
            "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}",
        )
    return [table]


def _throughput(result: Result) -> list[Table]:
    rates = _table("per second", "median", "min", "max", "IQR")
    for name in ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s"):
        found = result[name]
        rates.add_row(
            name.removesuffix("_per_s").replace("_", " "),
            *(f"{found[part]:,.1f}" for part in ("median", "min", "max", "iqr")),
        )
    times = _table("milliseconds", "mean", "p50", "p90", "p99", "max")
    for name, label in (
        ("ttft_ms", "to the first token"),
        ("itl_ms", "between tokens"),
        ("e2e_ms", "of a request"),
    ):
        found = result["latency"][name]
        if found is not None:
            times.add_row(label, *(f"{found[part]:,.2f}" for part in ("mean", "p50", "p90", "p99", "max")))
    return [rates, times]


def _startup(result: Result) -> list[Table]:
    table = _table("stage", "seconds", "min", "max")
    for name, found in result["stages"].items():
        table.add_row(name, *(f"{found[part]:.2f}" for part in ("median", "min", "max")))
    table.add_section()
    for name, label in (
        ("start_s", "LLM(…), after imports"),
        ("ready_s", "ready, from the start of the process"),
        ("first_token_s", "first token after that"),
    ):
        table.add_row(label, *(f"{result[name][part]:.2f}" for part in ("median", "min", "max")))
    return [table]


def _graphs(result: Result) -> list[Table]:
    heads = [
        "ran as",
        "ready s",
        "graphs",
        "capture s",
        "pool",
        "driver",
        "replays",
        "eager",
        "padding",
        "run",
    ]
    table = _table("strategy", *heads)
    for row in result["rows"]:
        if "error" in row:
            table.add_row(row["strategy"], f"failed: {row['error']}", *[""] * 9)
            continue
        table.add_row(
            row["strategy"],
            f"{row['plan']['prefill']} + {row['plan']['decode']}",
            f"{row['ready_s']:.2f}",
            str(row["graphs"]),
            f"{row['capture_s']:.2f}",
            mebibytes(row["pool_bytes"]),
            mebibytes(row["driver_bytes"]),
            str(row["replays"]),
            str(row["eager_steps"]),
            ", ".join(f"{phase} {part:.0%}" for phase, part in row["padding"].items()),
            f"{row['run_s']:.3f}",
        )
    return [table]


def serve_tables(result: Result) -> list[Table]:
    """Of ``gapless bench serve``."""
    rates = _table("of the run", "")
    for name in ("completed", "failed", "duration", "total_input_tokens", "total_output_tokens"):
        rates.add_row(name.replace("_", " "), f"{result[name]:,}")
    for name in ("request_throughput", "output_throughput", "total_token_throughput"):
        rates.add_row(name.replace("_", " ") + " per second", f"{result[name]:,.2f}")
    if result["request_goodput"] is not None:
        rates.add_row("request goodput per second", f"{result['request_goodput']:,.2f}")
    rates.add_row("most tokens in a second", f"{result['max_output_tokens_per_s']:,.0f}")
    rates.add_row("most requests at once", f"{result['max_concurrent_requests']:,}")
    if "check" in result:
        rates.add_row(
            "answers that deviate", f"{result['check']['deviating']} of {result['check']['answers']}"
        )
    kinds = ("mean", "median", "std", "p90", "p99")
    times = _table("milliseconds", *kinds)
    for name, label in (
        ("ttft", "to the first token"),
        ("tpot", "per token after the first"),
        ("itl", "between events"),
        ("e2el", "of a request"),
    ):
        found = [result[f"{kind}_{name}_ms"] for kind in kinds]
        if None not in found:
            times.add_row(label, *(f"{value:,.2f}" for value in found))
    return [rates, times]


_TABLES: dict[str, Callable[[Result], list[Table]]] = {
    "latency": _latency,
    "throughput": _throughput,
    "startup": _startup,
    "graphs": _graphs,
}


def _spread(value: dict[str, Any]) -> str:
    return f"{value['median']} ({value['min']} to {value['max']})"


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table

"""What there is to draw in a result, as data: one description serves the page and the picture.

A chart is categories times series, as in ``graphs/svg.py``. Which charts a result has depends only on its
``benchmark``, so a result file of last year can be drawn today.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gapless.graphs.svg import Series

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Stacked bars; ``unit`` is that of the values."""

    title: str
    axis: str
    unit: str
    categories: tuple[str, ...]
    series: tuple[Series, ...]


def charts_of(result: Result) -> list[Chart]:
    """The charts of a result, without those that would be empty."""
    charts = _BY_BENCHMARK[result["benchmark"]](result)
    return [chart for chart in charts if chart.categories and any(any(s.values) for s in chart.series)]


def _latency(result: Result) -> list[Chart]:
    found = []
    for phase, size, axis in (
        ("prefill", "tokens", "tokens of the prompt"),
        ("decode", "requests", "requests decoding at once"),
    ):
        rows = [row for row in result["rows"] if row["phase"] == phase]
        categories = tuple(str(row[size]) for row in rows)
        medians = tuple(row["ms"]["median"] for row in rows)
        found.append(
            Chart(
                title="Prefill latency" if phase == "prefill" else "Decode latency per token",
                axis=axis,
                unit="ms",
                categories=categories,
                series=(
                    Series("median", medians),
                    Series(
                        "up to the slowest repeat", tuple(r["ms"]["max"] - r["ms"]["median"] for r in rows)
                    ),
                ),
            )
        )
        found.append(
            Chart(
                title=f"Tokens per second, {phase}",
                axis=axis,
                unit="tokens/s",
                categories=categories,
                series=(Series("tokens per second", tuple(row["tokens_per_s"] or 0.0 for row in rows)),),
            )
        )
    return found


def _throughput(result: Result) -> list[Chart]:
    repeats = tuple(f"run {row['repeat'] + 1}" for row in result["rows"])
    charts = [
        Chart(
            title="Tokens per second",
            axis="repeats",
            unit="tokens/s",
            categories=repeats,
            series=(
                Series("output", tuple(row["output_tokens_per_s"] for row in result["rows"])),
                Series(
                    "input",
                    tuple(r["total_tokens_per_s"] - r["output_tokens_per_s"] for r in result["rows"]),
                ),
            ),
        )
    ]
    for name, title in (
        ("ttft_ms", "Time to the first token"),
        ("itl_ms", "Time between tokens"),
        ("e2e_ms", "Time of a request"),
    ):
        found = result["latency"][name]
        if found is not None:
            charts.append(
                Chart(
                    title=title,
                    axis="percentiles over requests",
                    unit="ms",
                    categories=tuple(found),
                    series=(Series(title.lower(), tuple(found.values())),),
                )
            )
    return charts


def _startup(result: Result) -> list[Chart]:
    stages = result["stages"]
    return [
        Chart(
            title="Where the seconds of a start go",
            axis="stages, median of the repeats",
            unit="s",
            categories=tuple(stages),
            series=(Series("seconds", tuple(stage["median"] for stage in stages.values())),),
        )
    ]


def _graphs(result: Result) -> list[Chart]:
    rows = [row for row in result["rows"] if "error" not in row]
    names = tuple(row["strategy"] for row in rows)

    def chart(title: str, unit: str, **series: Callable[[dict[str, Any]], float]) -> Chart:
        return Chart(
            title=title,
            axis="strategies",
            unit=unit,
            categories=names,
            series=tuple(
                Series(name.replace("_", " "), tuple(value(row) for row in rows))
                for name, value in series.items()
            ),
        )

    return [
        chart("Seconds of captures", "s", captures=lambda row: row["capture_s"]),
        chart(
            "Memory of graphs",
            "MiB",
            pool=lambda row: row["pool_bytes"] / 2**20,
            driver=lambda row: row["driver_bytes"] / 2**20,
        ),
        chart("Steps", "", replays=lambda row: row["replays"], eager=lambda row: row["eager_steps"]),
        chart("Seconds of the run", "s", run=lambda row: row["run_s"]),
    ]


def _profile(result: Result) -> list[Chart]:
    cases = [
        (f"{phase} {size}", figures)
        for phase in ("decode", "prefill")
        for size, figures in result[phase].items()
    ]
    names = tuple(name for name, _ in cases)
    return [
        Chart(
            title="Wall time of a step",
            axis="steps: decode by batch, prefill by tokens",
            unit="µs",
            categories=names,
            series=(Series("wall", tuple(figures["wall_us"] for _, figures in cases)),),
        ),
        Chart(
            title="GPU time of a step",
            axis="steps: decode by batch, prefill by tokens",
            unit="µs",
            categories=names,
            series=(
                Series("busy", tuple(figures.get("gpu_busy_us", 0.0) for _, figures in cases)),
                Series("gaps", tuple(figures.get("gpu_gap_us", 0.0) for _, figures in cases)),
            ),
        ),
    ]


_BY_BENCHMARK: dict[str, Callable[[Result], list[Chart]]] = {
    "latency": _latency,
    "throughput": _throughput,
    "startup": _startup,
    "graphs": _graphs,
    "profile": _profile,
}

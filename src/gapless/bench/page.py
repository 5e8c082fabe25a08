"""A result as one self-contained page: how it was made, charts, notes, the figures, and the engine's report.

No script, no font, no address outside the page: it can be mailed. The look is that of the report of
``graphs/report_html.py``, whose sections follow where the result has a report.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

from gapless.bench.charts import Chart, charts_of
from gapless.graphs.report_html import render_page, report_sections
from gapless.graphs.svg import bar_chart


def render_result(result: dict[str, Any]) -> str:
    """The page of a result of any benchmark."""
    title = f"{result['benchmark'].capitalize()} of {result['model']}"
    figures = "".join(_figure(chart) for chart in charts_of(result))
    parts = [
        _section("How", _pairs({**result["meta"], **result.get("engine", {})})),
        _section("Figures", f'<div class="plots">{figures}</div>') if figures else "",
        _section("Notes", "".join(f"<p>{escape(note)}</p>" for note in result["notes"]))
        if result["notes"]
        else "",
        _section("Every number", f"<pre>{escape(_plain_json(result))}</pre>"),
    ]
    if result.get("report"):
        parts += report_sections(result["report"])
    return render_page(title, "\n".join(part for part in parts if part))


def _figure(chart: Chart) -> str:
    plot = bar_chart(
        chart.categories,
        chart.series,
        label=f"{chart.title} in {chart.unit}" if chart.unit else chart.title,
        axis=chart.axis,
        text_of=lambda value: f"{value:,.4g}",
    )
    unit = f", {chart.unit}" if chart.unit else ""
    return f"<figure><figcaption>{escape(chart.title + unit)}</figcaption>{plot}</figure>"


def _plain_json(result: dict[str, Any]) -> str:
    """The result without reports and tables of kernels, which have sections and files of their own."""
    shown = {k: v for k, v in result.items() if k not in ("report", "meta", "engine", "type", "notes")}
    if "rows" in shown:
        shown["rows"] = [{k: v for k, v in row.items() if k != "report"} for row in shown["rows"]]
    return json.dumps(shown, indent=1)


def _pairs(values: dict[str, Any]) -> str:
    cells = "".join(
        f"<tr><th>{escape(str(name))}</th><td>{escape(str(value))}</td></tr>"
        for name, value in values.items()
        if value is not None
    )
    return f"<table>{cells}</table>"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"

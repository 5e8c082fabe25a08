"""The charts of a result as a PNG, drawn by matplotlib where it is installed.

matplotlib is no dependency: a page of inline SVG needs nothing. Whether it is here is asked *before* anything
is measured, so that no minutes are lost to a missing package.
"""

from __future__ import annotations

from importlib import util
from pathlib import Path
from typing import Any

from gapless.bench.charts import Chart, charts_of
from gapless.errors import ConfigError

_COLUMNS = 2


def require_matplotlib() -> None:
    """Raises ``ConfigError`` without matplotlib."""
    if util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--png needs matplotlib, which is not installed: pip install 'gapless[bench]' "
            "(--html needs nothing)"
        )


def draw_png(result: dict[str, Any], path: Path) -> None:
    """Write every chart of ``result`` into one picture."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    charts = charts_of(result)
    rows = max(1, -(-len(charts) // _COLUMNS))
    figure = Figure(figsize=(7 * _COLUMNS, 3.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{result['benchmark']}: {result['model']} on {result['meta']['device']}")
    for index, chart in enumerate(charts):
        _draw(figure.add_subplot(rows, _COLUMNS, index + 1), chart)
    figure.savefig(path, dpi=110)


def _draw(axes: Any, chart: Chart) -> None:
    below = [0.0] * len(chart.categories)
    for series in chart.series:
        axes.bar(chart.categories, series.values, bottom=below, label=series.name)
        below = [low + value for low, value in zip(below, series.values, strict=True)]
    axes.set_title(chart.title)
    axes.set_xlabel(chart.axis)
    axes.set_ylabel(chart.unit)
    axes.tick_params(axis="x", labelrotation=30)
    axes.legend(fontsize="small")

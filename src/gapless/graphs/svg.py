"""Bar charts as inline SVG: no script, no library, readable without colour.

A chart is categories (capture sizes, moments) times stacked series. Every bar has a tooltip with its numbers;
labels are thinned out when there are many. Colours are CSS classes ``s0`` to ``s3``, defined by the page, so
that it can follow the reader's light or dark setting. Used by ``report_html.py``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 720, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 40
_MAX_LABELS = 18


@dataclass(frozen=True, slots=True)
class Series:
    """One stacked layer: its name and a value per category."""

    name: str
    values: Sequence[float]


def bar_chart(
    categories: Sequence[str],
    series: Sequence[Series],
    *,
    label: str,
    axis: str,
    text_of: Callable[[float], str] = lambda value: f"{value:g}",
) -> str:
    """An ``<svg>`` element. ``label`` says what it shows, ``axis`` what the categories are."""
    totals = [sum(s.values[i] for s in series) for i in range(len(categories))]
    top, step = _scale(max(totals, default=0))
    plot_width, plot_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">',
        *_grid(top, step, plot_height, text_of),
    ]
    slot = plot_width / max(1, len(categories))
    width = max(1.0, min(48.0, slot * 0.78))
    every = math.ceil(len(categories) / _MAX_LABELS) or 1
    for index, category in enumerate(categories):
        x = _LEFT + index * slot + (slot - width) / 2
        y = float(_TOP + plot_height)
        for layer, one in enumerate(series):
            value = one.values[index]
            height = value / top * plot_height
            if height <= 0:
                continue
            y -= height
            tip = f"{category}: {one.name} {text_of(value)}"
            parts.append(
                f'<rect class="s{layer}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">'
                f"<title>{escape(tip)}</title></rect>"
            )
        if index % every == 0:
            parts.append(
                f'<text class="label" x="{x + width / 2:.1f}" y="{_TOP + plot_height + 14}" '
                f'text-anchor="middle">{escape(category)}</text>'
            )
    middle = _LEFT + plot_width / 2
    parts.append(
        f'<text class="axis" x="{middle:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(axis)}</text>'
    )
    return "\n".join([*parts, "</svg>", _legend(series)])


def _grid(top: float, step: float, plot_height: float, text_of: Callable[[float], str]) -> list[str]:
    lines = []
    for i in range(round(top / step) + 1):
        y = _TOP + plot_height * (1 - i * step / top)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(
            f'<text class="label" x="{_LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">'
            f"{escape(text_of(i * step))}</text>"
        )
    return lines


def _legend(series: Sequence[Series]) -> str:
    items = (f'<span><i class="key s{i}"></i>{escape(s.name)}</span>' for i, s in enumerate(series))
    return f'<p class="legend">{" ".join(items)}</p>'


def _scale(largest: float) -> tuple[float, float]:
    """The top of the axis and the step between lines: 1, 2 or 5 times a power of ten, about four lines."""
    if largest < sys.float_info.min * 4:  # a quarter of it would have no logarithm
        return 1.0, 1.0
    rough = largest / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return step * math.ceil(largest / step), step

"""Figures of several engines side by side: merging parts, ratios, and which targets are met.

A *part* is what one engine did with one model: ``engine``, ``model``, ``start_s``, ``prefill_ms`` by tokens,
``decode_ms`` by requests, ``throughput``. A ratio is ours / theirs: below 1 is better for times, above 1 for
tokens per second. A figure that one of the two lacks gives no row, and a target without figures counts as
not measured, never as met. Pure functions on plain values; ``against_vllm.py`` runs the engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Part = dict[str, Any]
Row = dict[str, Any]

OURS = "gapless"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A bound on ours / peer, or with ``peer`` None on our own figure, for shapes such as ``prefill 128``."""

    shapes: tuple[str, ...]
    bound: float
    kind: Literal["at most", "at least"] = "at most"
    peer: str | None = "vllm"

    def is_met(self, value: float) -> bool:
        return value <= self.bound if self.kind == "at most" else value >= self.bound


def _limits(phase: str, bounds: dict[int, float]) -> list[Target]:
    return [Target(shapes=(f"{phase} {size}",), bound=bound, peer=None) for size, bound in bounds.items()]


_DECODE = tuple(f"decode {batch}" for batch in (1, 8, 32, 128))


def _prefill(*sizes: int) -> tuple[str, ...]:
    return tuple(f"prefill {size}" for size in sizes)


TARGETS: dict[str, list[Target]] = {
    "qwen3-0.6b": [
        Target(shapes=_prefill(16, 64, 128, 256, 512), bound=0.25),
        *_limits("prefill", {128: 1.9, 1024: 3.3, 2048: 5.5, 4096: 10.9}),
        Target(shapes=_DECODE, bound=0.50),
        Target(shapes=_DECODE, bound=0.75, peer="sglang"),
        *_limits("decode", {1: 0.75 * 1.47, 8: 0.75 * 1.47, 32: 0.75 * 1.74, 128: 0.75 * 2.79}),
        Target(shapes=("start",), bound=0.15),
        Target(shapes=("start",), bound=9.0, peer=None),
        Target(shapes=("throughput",), bound=1.5, kind="at least"),
    ],
    "llama-3.1-8b": [
        Target(shapes=_prefill(16, 64, 128), bound=0.60),
        Target(shapes=_prefill(256), bound=0.75),
        Target(shapes=_prefill(512), bound=0.87),
        Target(shapes=_prefill(1024), bound=0.90),
        Target(shapes=_prefill(2048), bound=0.93),
        Target(shapes=_prefill(4096), bound=0.95),
        Target(shapes=_DECODE, bound=0.90),
        Target(shapes=_DECODE, bound=0.93, peer="sglang"),
        *_limits("decode", {1: 0.93 * 4.71, 8: 0.93 * 4.89, 32: 0.93 * 5.29, 128: 0.93 * 6.93}),
        Target(shapes=("start",), bound=0.20),
        Target(shapes=("start",), bound=15.0, peer=None),
        Target(shapes=("throughput",), bound=1.05, kind="at least"),
    ],
    "qwen3-30b-a3b": [
        Target(shapes=_prefill(128), bound=0.80),
        Target(shapes=_prefill(512), bound=0.90),
        Target(shapes=_prefill(2048), bound=1.0),
        Target(shapes=_DECODE[:3], bound=0.90),
    ],
}
"""By model, for one H200 and bfloat16. Limits of decode are shares of what SGLang 0.5.16 took there."""

UNITS = {"prefill": "ms", "decode": "ms/token", "start": "s", "throughput": "output tokens/s"}


def merge_parts(results: Iterable[dict[str, Any]]) -> tuple[list[Part], list[str]]:
    """The parts of several results, the last of an engine and model winning; and notes on what differs."""
    found: dict[tuple[str, str], Part] = {}
    for result in results:
        for part in result["parts"]:
            found[part["engine"], part["model"]] = part
    parts = list(found.values())
    notes = []
    for name in ("device", "date"):
        values = sorted({str(part["meta"][name]) for part in parts if name in part.get("meta", {})})
        if len(values) > 1:
            notes.append(f"parts were not measured in one run: {name} is {' and '.join(values)}")
    return parts, notes


def figures_of(part: Part) -> dict[str, float]:
    """A part as shape -> figure."""
    figures = {f"prefill {size}": ms for size, ms in part.get("prefill_ms", {}).items()}
    figures |= {f"decode {size}": ms for size, ms in part.get("decode_ms", {}).items()}
    if part.get("start_s") is not None:
        figures["start"] = part["start_s"]
    if part.get("throughput"):
        figures["throughput"] = part["throughput"]["output_tokens_per_s"]["median"]
    return {shape: float(value) for shape, value in figures.items()}


def compare(parts: Sequence[Part]) -> list[Row]:
    """A row per model, peer and shape that both have, and one per limit on our own figures."""
    rows: list[Row] = []
    for model in dict.fromkeys(part["model"] for part in parts):
        engines = {part["engine"]: figures_of(part) for part in parts if part["model"] == model}
        ours = engines.pop(OURS, {})
        for peer, theirs in engines.items():
            for shape, value in ours.items():
                if shape in theirs and theirs[shape] > 0:
                    rows.append(_ratio_row(model, shape, peer, value, theirs[shape]))
        rows += [
            _row(model, shape, None, ours[shape], None, ours[shape], target)
            for target in TARGETS.get(model, [])
            if target.peer is None
            for shape in target.shapes
            if shape in ours
        ]
    return rows


def unmeasured(parts: Sequence[Part], rows: Sequence[Row]) -> list[str]:
    """Targets of the models in ``parts`` for which there is no row."""
    measured = {(row["model"], row["peer"], row["shape"]) for row in rows}
    return [
        f"{model}: {shape} against {target.peer or 'its limit'}"
        for model in dict.fromkeys(part["model"] for part in parts)
        for target in TARGETS.get(model, [])
        for shape in target.shapes
        if (model, target.peer, shape) not in measured
    ]


def table_lines(rows: Sequence[Row]) -> list[str]:
    """The rows as aligned text."""
    cells = [("model", "shape", "peer", "ours", "theirs", "ratio", "target", "")]
    for row in rows:
        is_limit = row["peer"] is None
        cells.append(
            (
                row["model"],
                row["shape"],
                row["peer"] or "(limit)",
                f"{row['ours']:.4g}",
                "" if is_limit else f"{row['theirs']:.4g}",
                "" if is_limit else f"{row['ratio']:.3f}",
                row["target"] or "",
                {None: "", True: "met", False: "MISSED"}[row["met"]],
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def _ratio_row(model: str, shape: str, peer: str, ours: float, theirs: float) -> Row:
    targets = [t for t in TARGETS.get(model, []) if t.peer == peer and shape in t.shapes]
    return _row(model, shape, peer, ours, theirs, ours / theirs, targets[0] if targets else None)


def _row(
    model: str,
    shape: str,
    peer: str | None,
    ours: float,
    theirs: float | None,
    value: float,
    target: Target | None,
) -> Row:
    sign = {"at most": "≤", "at least": "≥"}
    return {
        "model": model,
        "shape": shape,
        "unit": UNITS[shape.split()[0]],
        "peer": peer,
        "ours": ours,
        "theirs": theirs,
        "ratio": None if theirs is None else round(value, 4),
        "target": None if target is None else f"{sign[target.kind]} {target.bound:.4g}",
        "met": None if target is None else target.is_met(value),
    }

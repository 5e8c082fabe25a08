"""A report as one self-contained HTML page: what was captured, what ran, what it cost.

Input is the report schema of ``report.py`` and nothing else, so the page of a server, a benchmark and a
library callable look alike. Plots are inline SVG (``svg.py``): which sizes are hit, how much of each is
padding, what each size costs in memory, and replays against eager steps over time. No script, no font, no
address outside the page. ``render_text`` is the same for a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from gapless.graphs.svg import Series, bar_chart

Report = Mapping[str, Any]


def render_html(report: Report, *, check: Mapping[str, Any] | None = None, title: str | None = None) -> str:
    """The page. ``check``: the JSON of a verification, shown with it."""
    name = title or f"Graphs of {report['plan'].get('callable', 'the engine')}"
    sections = report_sections(report)
    if check is not None:
        sections.append(_section("Verification", _check_table(check)))
    return render_page(name, "\n".join(sections))


def report_sections(report: Report) -> list[str]:
    """The parts of the page that tell of a report, for other pages that have one."""
    sections = [
        _tiles(report),
        *(_phase_section(report, phase) for phase in _phases(report)),
        _section("Over time", _timeline(report)),
        _section("Eager steps", _eager_table(report)),
        _section("Failed captures", _failures(report)) if report["failures"] else "",
        _section("Decisions", _decisions(report)),
        _section("Graphs", _ledger(report)),
    ]
    return [section for section in sections if section]


def render_page(title: str, body: str) -> str:
    """A page of its own around ``body``, which is HTML already."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def render_text(report: Report) -> str:
    """The report in lines: totals, sizes by phase, reasons for eager, failures, decisions."""
    lines = [", ".join(f"{name} {value}" for name, value in _totals(report))]
    for phase in _phases(report):
        for bucket, counts in _buckets(report, phase).items():
            slots = counts["real"] + counts["padding"]
            padding = f"{counts['padding'] / slots:.0%} padding" if slots else "not used"
            cost = f"{_bytes(counts['pool'] + counts['driver'])} in {counts['capture_s'] * 1e3:.0f} ms"
            lines.append(f"{phase} {bucket}: {counts['count']:.0f} replays, {padding}, {cost}")
    lines += [f"eager {row['phase']}: {row['count']} {row['reason']}" for row in report["eager"]]
    lines += [f"failed {failure['graph']}: {failure['message']}" for failure in report["failures"]]
    lines += [
        f"{d['rule']}: {d['before']} → {d['after']} ({d['reason']})" for d in report["plan"]["decisions"]
    ]
    return "\n".join(lines)


def _phases(report: Report) -> list[str]:
    rows = [*report["graphs"], *report["steps"]]
    return list(dict.fromkeys(row["phase"] for row in rows))


def _buckets(report: Report, phase: str) -> dict[int, dict[str, float]]:
    """By size, ascending: what was captured and what it did since."""
    found: dict[int, dict[str, float]] = {}

    def at(bucket: int) -> dict[str, float]:
        empty = dict.fromkeys(("count", "real", "padding", "pool", "driver", "capture_s"), 0.0)
        return found.setdefault(bucket, empty)

    for graph in report["graphs"]:
        if graph["phase"] == phase:
            counts = at(_bucket_of(graph))
            counts["pool"] += max(0, graph["pool_bytes"])
            counts["driver"] += graph["driver_bytes"]
            counts["capture_s"] += graph["capture_s"]
    for step in report["steps"]:
        if step["phase"] == phase:
            counts = at(step["bucket"])
            counts["count"] += step["count"]
            counts["real"] += step["tokens"]
            counts["padding"] += step["padding"]
    return dict(sorted(found.items()))


def _bucket_of(graph: Mapping[str, Any]) -> int:
    """As steps count it: rows of uniform graphs, tokens of others, every cell of two dynamic dimensions."""
    if graph["uniform"]:
        return graph["num_reqs"]
    return graph["num_tokens"] * (graph["num_reqs"] if graph["phase"] == "forward" else 1)


def _totals(report: Report) -> list[tuple[str, str]]:
    memory = report["memory"]
    replays = sum(step["count"] for step in report["steps"])
    eager = sum(row["count"] for row in report["eager"])
    real = sum(step["tokens"] for step in report["steps"])
    padding = sum(step["padding"] for step in report["steps"])
    waste = f"{padding / (real + padding):.1%}" if real + padding else "none"
    return [
        ("graphs", str(len(report["graphs"]))),
        ("replays", f"{replays:,}"),
        ("eager steps", f"{eager:,}"),
        ("padding", waste),
        ("pool", _bytes(memory["pool_bytes"])),
        ("driver", _bytes(memory["driver_bytes"])),
        ("capture", f"{memory['capture_s']:.2f} s"),
    ]


def _tiles(report: Report) -> str:
    tiles = (f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in _totals(report))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _phase_section(report: Report, phase: str) -> str:
    buckets = _buckets(report, phase)
    sizes = [str(bucket) for bucket in buckets]
    rows = list(buckets.values())
    eager = [row for row in report["eager"] if row["phase"] == phase]
    axis = f"captured size of {phase}"
    hits = [*(row["count"] for row in rows), *(row["count"] for row in eager)]
    num_sizes, num_eager = len(rows), len(eager)
    coverage = bar_chart(
        [*sizes, *(row["reason"] for row in eager)],
        [
            Series("replays", [*hits[:num_sizes], *[0] * num_eager]),
            Series("eager, by reason", [*[0] * num_sizes, *hits[num_sizes:]]),
        ],
        label=f"How often each captured size of {phase} was replayed",
        axis=axis,
        text_of=_count,
    )
    waste = bar_chart(
        sizes,
        [Series("real", [row["real"] for row in rows]), Series("padding", [row["padding"] for row in rows])],
        label=f"Real and padded rows of each size of {phase}",
        axis=axis,
        text_of=_count,
    )
    memory = bar_chart(
        sizes,
        [
            Series("pool growth", [row["pool"] for row in rows]),
            Series("driver", [row["driver"] for row in rows]),
        ],
        label=f"Memory that the capture of each size of {phase} took",
        axis=axis,
        text_of=_bytes,
    )
    seconds = bar_chart(
        sizes,
        [Series("capture", [row["capture_s"] for row in rows])],
        label=f"Seconds that the capture of each size of {phase} took",
        axis=axis,
        text_of=lambda value: f"{value * 1e3:.3g} ms",
    )
    plots = [
        ("Ladder coverage", coverage),
        ("Padding waste", waste),
        ("Memory per size", memory),
        ("Capture time per size", seconds),
    ]
    figures = (f"<figure><figcaption>{name}</figcaption>{plot}</figure>" for name, plot in plots)
    return _section(phase, f'<div class="plots">{"".join(figures)}</div>')


def _timeline(report: Report) -> str:
    timeline = report.get("timeline") or {"bin_s": 1.0, "replays": [], "eager": []}
    if not timeline["replays"]:
        return "<p>No step has run yet.</p>"
    bin_s = timeline["bin_s"]
    plot = bar_chart(
        [_seconds(i * bin_s) for i in range(len(timeline["replays"]))],
        [Series("replays", timeline["replays"]), Series("eager", timeline["eager"])],
        label="Replays and eager steps over time",
        axis=f"time since the first step, in bins of {_seconds(bin_s)}",
        text_of=_count,
    )
    return f"<figure>{plot}</figure>"


def _eager_table(report: Report) -> str:
    if not report["eager"]:
        return "<p>None: every step was a replay.</p>"
    rows = ((row["phase"], row["reason"], f"{row['count']:,}") for row in report["eager"])
    return _table(("phase", "reason", "steps"), rows)


def _failures(report: Report) -> str:
    return _table(("size", "why"), ((f["graph"], f["message"]) for f in report["failures"]))


def _decisions(report: Report) -> str:
    decisions = report["plan"]["decisions"]
    if not decisions:
        return "<p>Nothing had to be decided.</p>"
    rows = ((d["phase"] or "", d["rule"], f"{d['before']} → {d['after']}", d["reason"]) for d in decisions)
    return _table(("phase", "rule", "change", "reason"), rows)


def _ledger(report: Report) -> str:
    """Every graph with what it cost and did."""
    names = ("phase", "strategy", "num_tokens", "num_reqs", "nodes", "segments", "breaks", "replays")
    rows = (
        (
            *(graph[name] for name in names),
            f"{graph['padding'] / graph['replays']:.1f}" if graph["replays"] else "",
            f"{graph['capture_s'] * 1e3:.1f} ms",
            _bytes(graph["pool_bytes"]),
            _bytes(graph["driver_bytes"]),
        )
        for graph in report["graphs"]
    )
    heads = (*names, "mean padding", "capture", "pool growth", "driver")
    return _table([head.replace("num_", "") for head in heads], rows)


def _check_table(check: Mapping[str, Any]) -> str:
    verdict = "All checks passed." if check["ok"] else "<strong>Some checks failed.</strong>"
    counts: dict[tuple[str, str], list[str]] = {}
    for result in check["results"]:
        counts.setdefault((result["target"], result["check"]), []).append(result["status"])
    rows = (
        (target, name, *(str(found.count(status)) for status in ("ok", "failed", "skipped", "note")))
        for (target, name), found in counts.items()
    )
    failed = [result for result in check["results"] if result["status"] == "failed"]
    details = ((r["target"], r["check"], r["subject"], r["detail"]) for r in failed)
    text = f"<p>{verdict}</p>" + _table(("target", "check", "ok", "failed", "skipped", "notes"), rows)
    return text + (_table(("target", "check", "subject", "failure"), details) if failed else "")


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"


def _count(value: float) -> str:
    for unit in ("", "k", "M"):
        if abs(value) < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}G"


def _seconds(value: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:g} s"


_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5d6877; --line: #d9dee5; --page: #fff;
        --tile: #f3f5f8; --s0: #3a6fb7; --s1: #d9822b; --s2: #6b8e23; --s3: #8a63a8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #9aa5b4; --line: #38414d; --page: #14181e; --tile: #1e242c;
          --s0: #6ea0e0; --s1: #eba35a; --s2: #9dbb5e; --s3: #b795d2; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
       max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; }
.tiles div { background: var(--tile); border-radius: 6px; padding: .5rem .9rem; color: var(--soft); }
.tiles b { display: block; font-size: 1.25rem; color: var(--ink); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(28rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--soft); }
.grid { stroke: var(--line); }
.s0 { fill: var(--s0); background: var(--s0); } .s1 { fill: var(--s1); background: var(--s1); }
.s2 { fill: var(--s2); background: var(--s2); } .s3 { fill: var(--s3); background: var(--s3); }
.legend { margin: 0; color: var(--soft); font-size: .85rem; } .legend span { margin-right: 1rem; }
.key { display: inline-block; width: .7em; height: .7em; margin-right: .4em; border-radius: 2px; }
table { border-collapse: collapse; font-size: .9rem; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line);
         vertical-align: top; white-space: pre-wrap; }
th { color: var(--soft); font-weight: 600; }
"""

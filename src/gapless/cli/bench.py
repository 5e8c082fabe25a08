"""``gapless bench``: how fast, how much, how soon, with which graphs, and where the time goes.

Every command prints a table and then its whole result as one JSON line, the last of standard output; with
``--json`` there are only JSON lines: a ``row`` for each measurement as it is made, then the result. Progress
and notes go to standard error. What is measured and how: ``gapless/bench``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gapless.cli.bench_serve import bench_serve
from gapless.cli.options import Command, EngineOptions, expand
from gapless.cli.session import open_llm
from gapless.errors import ConfigError

if TYPE_CHECKING:
    from gapless.llm import LLM

bench = typer.Typer(
    name="bench",
    help="Measure latency, throughput, start-up, graphs, where a step's time goes, and a running server.",
)


def _output(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, metavar="FILE", rich_help_panel="Output", dir_okay=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """Where the result goes besides standard output."""

    output: Annotated[Path | None, _output("--output", help="Write the result as JSON.")] = None
    html: Annotated[Path | None, _output("--html", help="Write the result as a page with charts.")] = None
    png: Annotated[Path | None, _output("--png", help="Write the charts as a picture (matplotlib).")] = None
    as_json: Annotated[
        bool, typer.Option("--json", help="Only JSON lines on standard output.", rich_help_panel="Output")
    ] = False

    def check(self) -> None:
        """Find what could not be written before anything is measured. Raises ``ConfigError``."""
        if self.png is not None:
            from gapless.bench.picture import require_matplotlib

            require_matplotlib()
        for path in (self.output, self.html, self.png):
            if path is not None and not path.parent.is_dir():
                raise ConfigError(f"{path}: there is no folder {path.parent}")


def _latency(
    engine: EngineOptions,
    out: OutputOptions,
    prefill: Annotated[
        str, typer.Option("--prefill", metavar="N,N,…", help="Tokens of prompts; '' for none.")
    ] = "16,64,128,256,512,1024,2048,4096",
    decode: Annotated[
        str, typer.Option("--decode", metavar="N,N,…", help="Requests decoding at once; '' for none.")
    ] = "1,8,32,128",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Of each prefill.")] = 15,
    decode_repeats: Annotated[
        int, typer.Option("--decode-repeats", min=1, help="Pairs of a short and a long run.")
    ] = 3,
    decode_tokens: Annotated[
        int, typer.Option("--decode-tokens", min=1, help="Tokens by which the long run is longer.")
    ] = 200,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the prompts.")] = 0,
) -> None:
    """Milliseconds of a prefill by tokens, and of a decode step by batch."""
    out.check()
    from gapless.bench.latency import LatencyOptions, measure_latency

    options = LatencyOptions(
        prefill_tokens=_sizes("--prefill", prefill),
        decode_batches=_sizes("--decode", decode),
        repeats=repeats,
        decode_repeats=decode_repeats,
        decode_tokens=decode_tokens,
        seed=seed,
    )
    if not options.prefill_tokens and not options.decode_batches:
        raise ConfigError("--prefill and --decode are both empty: there is nothing to measure")
    with open_llm(engine) as llm:
        found = measure_latency(llm, options, on_row=_row_printer(out))
        _finish("latency", engine, out, {**found, **_engine_facts(llm)})


def _throughput(
    engine: EngineOptions,
    out: OutputOptions,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests in a run.")] = 256,
    lengths: Annotated[
        str, typer.Option("--lengths", metavar="LOW:HIGH", help="Prompt tokens: 512, 128:1024, log:16:4096.")
    ] = "128:1024",
    output_tokens: Annotated[
        int, typer.Option("--output-tokens", min=1, help="Tokens of each answer.")
    ] = 128,
    request_rate: Annotated[
        float | None,
        typer.Option("--request-rate", min=1e-6, help="Requests a second (Poisson). Default: all at once."),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs.")] = 3,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of prompts and arrivals.")] = 0,
) -> None:
    """Tokens per second and latencies of many requests, all at once or arriving over time."""
    out.check()
    from gapless.bench.throughput import ThroughputOptions, measure_throughput
    from gapless.bench.workload import Lengths

    options = ThroughputOptions(
        requests=requests,
        lengths=Lengths.parse(lengths),
        output_tokens=output_tokens,
        repeats=repeats,
        request_rate=request_rate,
        seed=seed,
    )
    with open_llm(engine) as llm:
        found = measure_throughput(llm, options, on_row=_row_printer(out))
        _finish("throughput", engine, out, {**found, **_engine_facts(llm)})


def _startup(
    engine: EngineOptions,
    out: OutputOptions,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Fresh processes.")] = 3,
    cold: Annotated[
        bool, typer.Option("--cold", help="Start with empty caches of compiled kernels.")
    ] = False,
) -> None:
    """Seconds until an engine is ready, by stage, each time in a fresh process."""
    out.check()
    _require_model(engine)
    from gapless.bench.startup import measure_startup

    found = measure_startup(
        engine.given(), config=engine.config, repeats=repeats, cold=cold, on_row=_row_printer(out)
    )
    _finish("startup", engine, out, {**found, "engine": _startup_facts(found["report"])})


def _graphs(
    engine: EngineOptions,
    out: OutputOptions,
    strategies: Annotated[
        str,
        typer.Option("--strategies", metavar="NAME,…", help="Of prefill; decode is full but for disabled."),
    ] = "full,breakable,tc_piecewise,disabled",
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests of the run.")] = 64,
    lengths: Annotated[
        str, typer.Option("--lengths", metavar="LOW:HIGH", help="Prompt tokens: 512, 128:1024, log:16:4096.")
    ] = "log:16:1024",
    output_tokens: Annotated[int, typer.Option("--output-tokens", min=1, help="Of each answer.")] = 32,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the prompts.")] = 0,
) -> None:
    """What each strategy costs at start, and what it replays, pads and runs eagerly for a mix of requests."""
    out.check()
    from gapless.bench.graphs import GraphsOptions, measure_graphs
    from gapless.bench.workload import Lengths

    if engine.cuda_graph_backend_prefill or engine.cuda_graph_backend_decode or engine.enforce_eager:
        raise ConfigError("bench graphs sets the strategies itself: use --strategies")
    options = GraphsOptions(
        strategies=tuple(strategies.replace(",", " ").split()),
        requests=requests,
        lengths=Lengths.parse(lengths),
        output_tokens=output_tokens,
        seed=seed,
    )

    @contextmanager
    def open_engine(extra: Mapping[str, Any]) -> Iterator[LLM]:
        with open_llm(replace(engine, **extra)) as llm:
            yield llm

    _require_model(engine)
    found = measure_graphs(open_engine, options, on_row=_row_printer(out))
    report = next(row["report"] for row in found["rows"] if "report" in row)
    _finish("graphs", engine, out, {**found, "report": report, "engine": _startup_facts(report)})


def _profile(
    engine: EngineOptions,
    out: OutputOptions,
    batch: Annotated[
        str, typer.Option("--batch", metavar="N,N,…", help="Requests of decode steps; '' for none.")
    ] = "1,8",
    prompt_tokens: Annotated[
        str, typer.Option("--prompt-tokens", metavar="N,N,…", help="Tokens of prefill steps; '' for none.")
    ] = "128",
    context: Annotated[int, typer.Option("--context", min=1, help="Cached tokens before decode.")] = 128,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps in a measurement.")] = 20,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Kernels or operators to list.")] = 16,
    host: Annotated[bool, typer.Option("--host", help="List Python functions by their own time.")] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="DIR", help="Keep the profiler's traces.")
    ] = None,
) -> None:
    """Where a step's time goes: wall, host threads, GPU kernels, and the gaps between them."""
    out.check()
    batches, lengths = _sizes("--batch", batch), _sizes("--prompt-tokens", prompt_tokens)
    if not batches and not lengths:
        raise ConfigError("--batch and --prompt-tokens are both empty: there is nothing to measure")
    with open_llm(engine) as llm:
        from gapless.bench.profile import ProfileOptions, profile_steps, table_lines

        def show(title: str, figures: dict[str, Any]) -> None:
            if out.as_json:
                print(json.dumps({"type": "row", "case": title, **figures}), flush=True)
            else:
                print("\n".join(table_lines(title, figures, rows)), flush=True)

        options = ProfileOptions(
            batches=batches,
            prompt_tokens=lengths,
            context=context,
            steps=steps,
            trace_folder=trace,
            host_rows=rows if host else 0,
        )
        found = profile_steps(llm.runner, options, on_case=show)
        _finish("profile", engine, out, {**found, **_engine_facts(llm)})


for _name, _function in (
    ("latency", _latency),
    ("throughput", _throughput),
    ("startup", _startup),
    ("graphs", _graphs),
    ("profile", _profile),
    ("serve", bench_serve),
):
    bench.command(_name, cls=Command)(expand(_function))


def _finish(benchmark: str, engine: EngineOptions, out: OutputOptions, found: dict[str, Any]) -> None:
    """Complete the result and hand it out: table, files, last line."""
    from gapless.bench.meta import describe_run

    result = {
        "type": "bench",
        "benchmark": benchmark,
        "model": Path(str(engine.model or engine.config)).name,
        "options": {k: _plain(v) for k, v in engine.given().items() if k != "model"},
        "meta": describe_run(["gapless", *sys.argv[1:]]),
        **found,
    }
    for note in result["notes"]:
        print(f"note: {note}", file=sys.stderr)
    if not out.as_json:
        from gapless.cli.bench_tables import print_result

        print_result(result)
    if out.output is not None:
        out.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if out.html is not None:
        from gapless.bench.page import render_result

        out.html.write_text(render_result(result), encoding="utf-8")
    if out.png is not None:
        from gapless.bench.picture import draw_png

        draw_png(result, out.png)
    print(json.dumps(result), flush=True)


def _row_printer(out: OutputOptions) -> Callable[[dict[str, Any]], None]:
    """Rows as they are measured: JSON lines where those are the product, else progress."""

    def show(row: dict[str, Any]) -> None:
        shown = {name: value for name, value in row.items() if name != "report"}
        if out.as_json:
            print(json.dumps({"type": "row", **shown}), flush=True)
        else:
            from gapless.cli.bench_tables import row_text

            print(row_text(shown), file=sys.stderr, flush=True)

    return show


def _engine_facts(llm: LLM) -> dict[str, Any]:
    report = llm.report()
    return {"report": report, "engine": _startup_facts(report)}


def _startup_facts(report: dict[str, Any]) -> dict[str, Any]:
    return {
        **{
            name: report["startup"][name]
            for name in ("architecture", "dtype", "device", "graph_device", "attention_backend")
        },
        **{phase: report["plan"][phase]["strategy"] for phase in ("prefill", "decode")},
    }


def _sizes(name: str, text: str) -> tuple[int, ...]:
    from gapless.config_sources import parse_sizes

    return parse_sizes(name, text) if text.replace(",", " ").strip() else ()


def _require_model(engine: EngineOptions) -> None:
    if engine.model is None and engine.config is None:
        raise ConfigError("no model: give --model smollm2, a model folder, or a .gguf file")


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float) else str(value).rpartition("/")[2]

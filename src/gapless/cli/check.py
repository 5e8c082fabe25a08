"""``gapless check``: proof that graphs compute what eager execution computes, for a model or a callable.

Standard output carries the table (or one JSON object) and nothing else; the exit code is for CI: 0 if every
check passed, 1 if one failed, 2 if there was nothing to check. What is checked: ``graphs/check.py``.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gapless.cli.options import EngineOptions
from gapless.cli.progress import show_progress
from gapless.errors import ConfigError

if TYPE_CHECKING:
    from gapless.config import EngineConfig
    from gapless.graphs.check_report import CheckReport


def check(
    engine: EngineOptions,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:NAME]",
            help="Instead of --model: a graphed callable, or a function that makes one; also FILE.py:NAME.",
        ),
    ] = None,
    few_sizes: Annotated[
        bool, typer.Option("--few-sizes", help="Only the smallest, a middle and the largest size of a model.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the fresh data.")] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", min=0.0, help="Bound to plain eager, relative to the largest value."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the report as one page.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")] = False,
) -> None:
    """Verify captured graphs on fresh data: equal to eager, blind to padding, nothing frozen or moved."""
    if (target is None) == (engine.model is None and engine.config is None):
        raise ConfigError("give either --model or a callable as MODULE:NAME")
    if target is None:
        found, report = _check_model(engine, few_sizes=few_sizes, seed=seed, tolerance=tolerance)
    else:
        if few_sizes:
            raise ConfigError("--few-sizes goes with --model; a callable's sizes are its own")
        found, report = _check_callable(target, seed=seed, tolerance=tolerance)
    if html is not None:
        from gapless.graphs.report_html import render_html

        html.write_text(render_html(report, check=found.to_dict()), encoding="utf-8")
    print(json.dumps({"type": "check", **found.to_dict()}) if as_json else found)
    if not found.is_ok:
        raise typer.Exit(1)


def _check_model(
    options: EngineOptions, *, few_sizes: bool, seed: int, tolerance: float | None
) -> tuple[CheckReport, dict[str, Any]]:
    from gapless.config import EngineConfig
    from gapless.config_sources import read_config_file
    from gapless.engine.build import open_engine
    from gapless.engine.verify import verify_engine
    from gapless.graphs.check_report import Status

    from_file = {} if options.config is None else read_config_file(options.config)
    config = EngineConfig.from_sources(flags=options.given(), config_file=from_file)
    if few_sizes:
        config = _with_few_sizes(config, options)
    with show_progress() as progress:
        opened = open_engine(config, progress)
    try:
        found = verify_engine(opened, seed=seed, tolerance=tolerance, only_few_sizes=few_sizes)
        if all(result.status is Status.SKIPPED for result in found.results):
            raise ConfigError("no graphs were captured with these options, so there is nothing to check")
        return found, opened.runner.report()
    finally:
        opened.runner.shutdown()


def _with_few_sizes(config: EngineConfig, options: EngineOptions) -> EngineConfig:
    """Only what will be checked is captured. The ladders are those of the plan, which needs no weights."""
    from gapless.cli.inspect import explain
    from gapless.engine.verify import few_of

    plan = explain(options, features=[])["plan"]
    changes: dict[str, Any] = {}
    for phase in ("prefill", "decode"):
        if plan[phase]["sizes"]:
            changes |= {f"{phase}_sizes": tuple(few_of(plan[phase]["sizes"])), f"{phase}_max": None}
    return dataclasses.replace(config, graphs=dataclasses.replace(config.graphs, **changes))


def _check_callable(target: str, *, seed: int, tolerance: float | None) -> tuple[CheckReport, dict[str, Any]]:
    from gapless.graphs.graphed import Graphed, State

    made = _load(target)
    if not isinstance(made, Graphed) and callable(made):
        made = made()
    if not isinstance(made, Graphed):
        raise ConfigError(
            f"{target} is a {type(made).__name__}; name a callable made by gapless.graphed, or a function "
            "without arguments that returns one"
        )
    if made.state is State.NEW:
        if made.options.make_inputs is None:
            raise ConfigError(
                f"{target} has not been captured and has no make_inputs=; capture it in a function that "
                "returns it, and name that"
            )
        made.capture()
    return made.verify(seed=seed, tolerance=tolerance), made.report()


def _load(target: str) -> Any:
    source, separator, name = target.rpartition(":")
    if not separator or not name:
        raise ConfigError(f"{target!r} is not MODULE:NAME or FILE.py:NAME")
    with _importable(source):
        try:
            module = _import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
        except ModuleNotFoundError as error:
            if error.name not in (source, source.partition(".")[0]):
                raise
            raise ConfigError(
                f"there is no module {source!r} here; run from its folder, or name a file"
            ) from error
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ConfigError(f"{source} has no {name!r}") from None
    return found


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickles look their module up
    spec.loader.exec_module(module)
    return module


@contextmanager
def _importable(source: str) -> Iterator[None]:
    """Modules of the current folder, and neighbours of a file, can be imported in the block."""
    folder = str(Path(source).resolve().parent) if source.endswith(".py") else str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)

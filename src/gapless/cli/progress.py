"""Progress of loading and capture, always on standard error so that standard output stays the product.

The engine reports ``(stage, done, total)``. On a terminal that is one bar per stage, which stays when it is
full; elsewhere (a log file, a pipe) one line when a stage ends and, for long stages, one every five
seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

ProgressCallback = Callable[[str, int, int], None]
_LINE_EVERY_S = 5.0


@contextmanager
def show_progress(*, enabled: bool = True, stream: IO[str] | None = None) -> Iterator[ProgressCallback]:
    """A callback for ``LLM(progress=…)`` that shows stages on ``stream`` (standard error) while the block
    runs.
    """
    stream = sys.stderr if stream is None else stream
    if not enabled or stream is None:
        yield lambda stage, done, total: None
    elif stream.isatty():
        with _bars(stream) as callback:
            yield callback
    else:
        yield PlainProgress(stream)


class PlainProgress:
    """One line per stage, or one every few seconds."""

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._started: dict[str, float] = {}
        self._last_line: dict[str, float] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = self._clock()
        started = self._started.setdefault(stage, now)
        if done >= total:
            del self._started[stage]
            self._last_line.pop(stage, None)
            self._write(f"{stage}: {_amount(done, total)} ({now - started:.1f} s)")
        elif now - self._last_line.setdefault(stage, started) >= _LINE_EVERY_S:
            self._last_line[stage] = now
            self._write(f"{stage}: {_amount(done, total)}")

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


@contextmanager
def _bars(stream: IO[str]) -> Iterator[ProgressCallback]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", style="dim"),
        BarColumn(bar_width=32),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
    )
    tasks = {}
    with Progress(*columns, console=Console(file=stream)) as progress:

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total, amount="")
            progress.update(tasks[stage], completed=done, total=total, amount=_amount(done, total))

        yield update


def _amount(done: int, total: int) -> str:
    """Things that one can count as they are; bytes and the like in percent."""
    return f"{done}/{total}" if total < 10_000 else f"{done / total:.0%}"

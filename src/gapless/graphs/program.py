"""Program: what one captured size runs, as an ordered list of steps. There is one type for every strategy.

A full capture is one ``GraphStep``; breakable and piecewise captures alternate ``GraphStep`` and
``EagerStep``. A program owns its segments (``reset`` drops them) but neither the pool they live in nor the
static inputs they read. Invariant: a replay runs all steps in order, so whatever a step reads from the pool
was written earlier in the same replay. Read ``breakable.py`` for how programs are made and ``handoff.py`` for
how eager results reach a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from gapless.errors import GraphError
from gapless.graphs.device.base import Segment
from gapless.graphs.handoff import Handoff


class GraphStep:
    """Replay one recorded segment."""

    __slots__ = ("run", "segment")

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.run = segment.replay


class EagerStep:
    """Call a break's body on its captured arguments; live data it reads from the forward context."""

    __slots__ = ("_args", "_body", "_handoff", "_kwargs", "name")

    def __init__(
        self,
        *,
        name: str,
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        handoff: Handoff,
    ) -> None:
        self.name = name
        self._body, self._args, self._kwargs, self._handoff = body, args, kwargs, handoff

    def run(self) -> None:
        self._handoff.fill(self._body(*self._args, **self._kwargs))


Step = GraphStep | EagerStep


class Program:
    """One captured forward. Empty segments are left out by ``add_segment``, so counts are of real work."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._checks: list[Callable[[], None]] = []
        self._is_reset = False

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(self._steps)

    @property
    def num_segments(self) -> int:
        return sum(isinstance(step, GraphStep) for step in self._steps)

    @property
    def num_breaks(self) -> int:
        return sum(isinstance(step, EagerStep) for step in self._steps)

    @property
    def num_nodes(self) -> int:
        """Recorded nodes over all segments; -1 where the device cannot tell."""
        return _sum_known(step.segment.num_nodes for step in self._steps if isinstance(step, GraphStep))

    @property
    def num_memsets(self) -> int:
        """Memset nodes over all segments; -1 where the device cannot tell."""
        return _sum_known(step.segment.num_memsets for step in self._steps if isinstance(step, GraphStep))

    @property
    def break_names(self) -> tuple[str, ...]:
        return tuple(step.name for step in self._steps if isinstance(step, EagerStep))

    @property
    def launch(self) -> Callable[[], None] | None:
        """A call that does all that ``replay`` does, until ``reset``, and needs neither the forward context
        nor autograd off; None while there is no such call, or more to do."""
        if self._is_reset or self._checks or len(self._steps) != 1:
            return None
        (step,) = self._steps
        return step.segment.launch if isinstance(step, GraphStep) else None

    def add_segment(self, segment: Segment) -> None:
        """Append a recorded segment, unless it holds no work."""
        if segment.num_nodes == 0:
            segment.reset()
            return
        self._steps.append(GraphStep(segment))

    def add_eager(self, step: EagerStep) -> None:
        self._steps.append(step)

    def add_check(self, check: Callable[[], None]) -> None:
        """Call ``check`` before the first replay. If it raises, nothing is replayed, now or later."""
        self._checks.append(check)

    def replay(self) -> None:
        """Run everything once on the current contents of the static inputs."""
        if self._is_reset:
            raise GraphError("this program was reset: its graphs are gone; capture it again")
        if torch.is_grad_enabled():  # asked first: leaving and entering the mode costs more than a launch
            with torch.no_grad():
                self._run_steps()
        else:
            self._run_steps()

    def _run_steps(self) -> None:
        if self._checks:
            for check in self._checks:
                check()
            self._checks.clear()
        for step in self._steps:
            step.run()

    def reset(self) -> None:
        """Drop the recordings and every reference to captured arguments. Safe to call twice."""
        self._is_reset = True
        self._checks.clear()
        _reset_all(step.segment for step in self._steps if isinstance(step, GraphStep))
        self._steps.clear()


def _sum_known(counts: Iterable[int]) -> int:
    known = list(counts)
    return -1 if any(count < 0 for count in known) else sum(known)


def _reset_all(segments: Iterable[Segment]) -> None:
    for segment in segments:
        segment.reset()

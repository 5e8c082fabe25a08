"""What a graphed callable is asked for, what state it is in, and why a call runs without a graph."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gapless.graphs.buckets import Sizes
from gapless.graphs.graphed_compiled import CompileOptions
from gapless.graphs.modes import Strategy
from gapless.graphs.outputs import OutputDims
from gapless.graphs.samples import MakeInputs
from gapless.graphs.store import SharedPool

Audit = Literal["first", "always", "never"]


class Fallback(enum.StrEnum):
    """Why a call ran without a graph."""

    DISABLED = "disabled"
    EMPTY = "empty"
    """A dynamic dimension has no entries."""
    LARGER_THAN_LARGEST = "larger_than_largest"
    CAPTURE_FAILED = "capture_failed"
    REQUIRES_GRAD = "requires_grad"
    """An input wants gradients, which no graph records."""
    POOL_BUSY = "pool_busy"
    """Called from within a step of the same graph memory (from an eager break)."""
    INSIDE_CAPTURE = "inside_capture"
    """Called while something else is captured or compiled: it becomes part of that."""
    PADDED_EAGER = "padded_eager"
    """Asked for: the bucket without its graph."""
    RELEASED = "released"


class State(enum.StrEnum):
    NEW = "new"
    CAPTURING = "capturing"
    READY = "ready"
    PAUSED = "paused"
    RELEASED = "released"


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphedOptions:
    """The arguments of ``graphed``, which documents them."""

    strategy: Strategy | None
    sizes: Sizes | Mapping[str, Sizes] | None
    outputs: Sequence[OutputDims] | None
    copy_outputs: bool
    make_inputs: MakeInputs | None
    compile: CompileOptions
    pool: SharedPool | None
    checks_padding: bool
    audit: Audit

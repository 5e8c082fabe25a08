"""The vocabulary of the runtime: phases, strategies, modes and how much a backend supports.

Four closed sets of names, and nothing that decides: the decisions live in ``plan.py`` (at start) and
``dispatcher.py`` (per step). A *strategy* is how one forward pass is turned into graphs; a *runtime mode* is
what a wrapper sees during one step; a *graph mode* is the single knob a user may turn for both phases.
"""

from __future__ import annotations

import enum


class Phase(enum.StrEnum):
    """What kind of step a graph serves. ``PREFILL`` means every step that is not pure decode."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENCODER = "encoder"
    HEAD = "head"
    """LM head on the sampled rows, after a prefill or mixed step."""
    SAMPLE = "sample"
    """Random sampling from logits, for batches in which a row is not greedy."""
    SAMPLE_FILTERED = "sample_filtered"
    """The same with top-k, top-p or min-p, which need the vocabulary sorted."""
    FORWARD = "forward"
    """A callable of the library interface, which has no phases."""


class Strategy(enum.StrEnum):
    """How a forward pass is captured. The values are the command-line names."""

    DISABLED = "disabled"
    TC_PIECEWISE = "tc_piecewise"
    BREAKABLE = "breakable"
    FULL = "full"

    @property
    def runtime_mode(self) -> RuntimeMode:
        """The mode its graphs replay in; breakable replays as PIECEWISE."""
        return _RUNTIME_MODES[self]


class RuntimeMode(enum.IntEnum):
    """What a step runs as. Ordered: the dispatcher prefers the larger."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


_RUNTIME_MODES = {
    Strategy.DISABLED: RuntimeMode.NONE,
    Strategy.TC_PIECEWISE: RuntimeMode.PIECEWISE,
    Strategy.BREAKABLE: RuntimeMode.PIECEWISE,
    Strategy.FULL: RuntimeMode.FULL,
}


class GraphMode(enum.StrEnum):
    """The single knob over both phases (vLLM's ``cudagraph_mode``)."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"


class AttentionSupport(enum.IntEnum):
    """Which batches an attention backend can run inside a full graph. Undeclared means ``NEVER``."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Only batches in which every query length is 1."""
    UNIFORM_BATCH = 2
    """Only batches in which all query lengths are equal (speculative verification fits)."""
    ALWAYS = 3

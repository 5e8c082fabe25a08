"""What ``resolve()`` is given: the user's request and the facts that limit it. Data only, nothing decides
here.

The runtime knows nothing of language models, so everything that comes from one arrives as plain data: which
attention backends a model uses and what they support, which features are on (names), and the table of rules
that switch a strategy off when a feature is on. Read ``plan.py`` next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gapless.graphs.modes import AttentionSupport, GraphMode, Phase, Strategy

AVAILABLE_STRATEGIES = frozenset(Strategy)
"""What this build can capture; ``auto`` never picks another, and naming another is an error."""

TcCompiler = Literal["eager", "inductor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphRequest:
    """What the user asked for. ``None`` means "not said": the plan chooses.

    ``prefill_*`` sizes count tokens, ``decode_*`` sizes count requests, ``capture_sizes`` count tokens for
    both phases (a per-phase list wins). ``splitting_ops=()`` is a wish of its own: no splits, so piecewise
    becomes full.
    """

    mode: GraphMode | None = None
    prefill: Strategy | None = None
    decode: Strategy | None = None
    prefill_max: int | None = None
    decode_max: int | None = None
    prefill_sizes: tuple[int, ...] | None = None
    decode_sizes: tuple[int, ...] | None = None
    capture_sizes: tuple[int, ...] | None = None
    compile_mode: Literal[0, 3] | None = None
    """0: never compile; 3: piecewise compile."""
    use_inductor_graph_partition: bool = False
    tc_compiler: TcCompiler | None = None
    splitting_ops: tuple[str, ...] | None = None
    force: bool = False
    """Skip even the hard rules for ``tc_piecewise`` (tests only)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSupport:
    """What one attention backend of the model can run inside a full graph, and the mode it runs best in."""

    name: str
    support: AttentionSupport
    preferred: GraphMode | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoDisableRule:
    """While ``feature`` is on, ``strategies`` are off in ``phases``. A soft rule yields to a named backend or
    mode."""

    feature: str
    strategies: frozenset[Strategy]
    phases: frozenset[Phase]
    is_hard: bool
    reason: str


HARDWARE_RULE = AutoDisableRule(
    feature="hardware_without_graphs",
    strategies=frozenset({Strategy.TC_PIECEWISE, Strategy.BREAKABLE, Strategy.FULL}),
    phases=frozenset({Phase.PREFILL, Phase.DECODE}),
    is_hard=True,
    reason="the device cannot record graphs",
)
"""The one rule the runtime knows by itself; it holds whenever ``supports_graphs`` is False."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """The facts: model, attention, device, features, limits of the engine.

    ``attention`` is required: a model without attention passes an empty tuple and is not limited by it.
    """

    attention: tuple[BackendSupport, ...]
    max_reqs: int
    chunked_prefill_size: int
    """Token budget of one step: the most that a prefill or mixed step holds."""
    supports_graphs: bool = True
    has_layer_split: bool = True
    """The model has embed / layers / head, so its layer stack can be captured breakable."""
    available_strategies: frozenset[Strategy] = AVAILABLE_STRATEGIES
    uniform_query_len: int = 1
    """Query length of a decode step: 1 + number of draft tokens."""
    is_pooling: bool = False
    uses_cascade: bool = False
    features: frozenset[str] = frozenset()
    rules: tuple[AutoDisableRule, ...] = ()
    whole_graph_passes: tuple[str, ...] = ()
    """Compiler passes that must see the whole graph; any of them empties the split list."""
    max_total_tokens: int | None = None
    prefill_max_cap: int | None = None
    """Upper bound on the *default* prefill maximum of this kind of model; a named maximum may exceed it."""
    break_ops: tuple[str, ...] = ()
    """Ops that breakable graphs run as breaks too when ``splitting_ops`` names them."""
    token_multiple: int = 1
    """Prefill sizes must divide by this (sequence parallelism)."""

    @property
    def support(self) -> AttentionSupport:
        """The weakest of the model's backends; ``ALWAYS`` where there is no attention at all."""
        return min((backend.support for backend in self.attention), default=AttentionSupport.ALWAYS)

"""The plan itself: per phase a strategy and its sizes, a mode name if there is one, and the decisions that
led there.

Only data and its two renderings, JSON (``to_dict``) and plain text (``describe``). ``plan.py`` makes it,
``dispatcher.py`` turns it into the keys of graphs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gapless.graphs.capabilities import TcCompiler
from gapless.graphs.ladder import Ladder
from gapless.graphs.modes import GraphMode, Phase, RuntimeMode, Strategy
from gapless.graphs.plan_sizes import is_one_piecewise_set

PLANNED_PHASES = (Phase.PREFILL, Phase.DECODE)

MODE_PHASES: dict[GraphMode, dict[Phase, RuntimeMode]] = {
    GraphMode.NONE: {Phase.PREFILL: RuntimeMode.NONE, Phase.DECODE: RuntimeMode.NONE},
    GraphMode.PIECEWISE: {Phase.PREFILL: RuntimeMode.PIECEWISE, Phase.DECODE: RuntimeMode.PIECEWISE},
    GraphMode.FULL: {Phase.PREFILL: RuntimeMode.FULL, Phase.DECODE: RuntimeMode.FULL},
    GraphMode.FULL_DECODE_ONLY: {Phase.PREFILL: RuntimeMode.NONE, Phase.DECODE: RuntimeMode.FULL},
    GraphMode.FULL_AND_PIECEWISE: {Phase.PREFILL: RuntimeMode.PIECEWISE, Phase.DECODE: RuntimeMode.FULL},
}
"""What each mode asks of each phase; which piecewise strategy stands behind PIECEWISE is *P*."""


_UNITS = {Phase.PREFILL: "tokens", Phase.DECODE: "requests"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """One step of the way from request to plan. ``before`` equals ``after`` where a rule only has something
    to say."""

    rule: str
    phase: Phase | None
    before: str
    after: str
    reason: str

    def __str__(self) -> str:
        where = f"{self.phase}: " if self.phase else ""
        change = self.after if self.before == self.after else f"{self.before} -> {self.after}"
        return f"{where}{change} ({self.rule}: {self.reason})"


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasePlan:
    """How one phase runs. Prefill ladders count tokens, decode ladders requests; disabled has an empty
    ladder."""

    strategy: Strategy = Strategy.DISABLED
    ladder: Ladder = field(default_factory=Ladder)


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphPlan:
    """The result. ``mode`` is None for a combination that has no mode name.

    ``shares_graphs``: one set of full graphs for non-uniform batches serves decode too (mode FULL).
    Wherever there is one set, the decode ladder holds sizes on top of prefill's, and may be empty.
    """

    prefill: PhasePlan
    decode: PhasePlan
    mode: GraphMode | None
    shares_graphs: bool = False
    uniform_query_len: int = 1
    tc_compiler: TcCompiler | None = None
    """Compiler of the pieces, of which full graphs are made too; None where nothing is compiled."""
    is_split: bool = True
    """A compiled forward is cut at its split ops."""
    use_inductor_graph_partition: bool = False
    """It is cut by Inductor instead of before."""
    decisions: tuple[Decision, ...] = ()

    @property
    def is_one_set(self) -> bool:
        """Both phases replay the graphs that prefill owns: mode FULL, or piecewise of one strategy."""
        return self.shares_graphs or is_one_piecewise_set(self.prefill.strategy, self.decode.strategy)

    def phase(self, phase: Phase) -> PhasePlan:
        """The plan of ``Phase.PREFILL`` or ``Phase.DECODE``."""
        return {Phase.PREFILL: self.prefill, Phase.DECODE: self.decode}[phase]

    def with_limits(self, *, max_tokens: int, max_reqs: int, reason: str) -> GraphPlan:
        """The plan with ladders cut to limits known only after memory was measured; the cut is a decision."""
        prefill = self.prefill.ladder.capped(max_tokens, reason=reason)
        decode = self.decode.ladder.capped(min(max_reqs, max_tokens // self.uniform_query_len), reason=reason)
        cuts = tuple(
            Decision(
                rule="limits",
                phase=phase,
                before=f"largest size {old.largest}",
                after=f"largest size {new.largest}",
                reason=reason,
            )
            for phase, old, new in (
                (Phase.PREFILL, self.prefill.ladder, prefill),
                (Phase.DECODE, self.decode.ladder, decode),
            )
            if old != new
        )
        return replace(
            self,
            prefill=replace(self.prefill, ladder=prefill),
            decode=replace(self.decode, ladder=decode),
            decisions=self.decisions + cuts,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "mode": self.mode.value if self.mode else None,
            "shares_graphs": self.shares_graphs,
            "uniform_query_len": self.uniform_query_len,
            "tc_compiler": self.tc_compiler,
            "is_split": self.is_split,
            "use_inductor_graph_partition": self.use_inductor_graph_partition,
            **{
                phase.value: {
                    "strategy": self.phase(phase).strategy.value,
                    "unit": _UNITS[phase],
                    "sizes": list(self.phase(phase).ladder.sizes),
                    "dropped": [asdict(dropped) for dropped in self.phase(phase).ladder.dropped],
                }
                for phase in PLANNED_PHASES
            },
            "decisions": [
                {**asdict(decision), "phase": decision.phase.value if decision.phase else None}
                for decision in self.decisions
            ],
        }

    def describe(self) -> list[str]:
        """The plan in lines of plain text: what runs first, then why."""
        lines = [f"graph mode: {self.mode.value if self.mode else 'set per phase'}"]
        for phase in PLANNED_PHASES:
            lines.append(f"{phase}: {self._describe_phase(phase)}")
            lines += [f"  size {lost.size}: {lost.reason}" for lost in self.phase(phase).ladder.dropped]
        if self.tc_compiler is not None:
            how = "cut at its split ops" if self.is_split else "in one piece"
            how = "cut by Inductor at its split ops" if self.use_inductor_graph_partition else how
            lines.append(f"forward: traced, {how}, compiled by {self.tc_compiler}")
        lines += [f"  {decision}" for decision in self.decisions]
        return lines

    def _describe_phase(self, phase: Phase) -> str:
        plan = self.phase(phase)
        if plan.strategy is Strategy.DISABLED:
            return "disabled (eager)"
        if not plan.ladder.sizes:
            return f"{plan.strategy}, " + ("in the prefill graphs" if self.is_one_set else "no sizes")
        sizes = plan.ladder.sizes
        text = f"{plan.strategy}, {len(sizes)} sizes from {sizes[0]} to {sizes[-1]} {_UNITS[phase]}"
        if phase is Phase.DECODE and self.uniform_query_len > 1:
            text += f" of {self.uniform_query_len} tokens"
        return text + (", in the prefill graphs" if phase is Phase.DECODE and self.is_one_set else "")

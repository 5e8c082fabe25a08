"""From what was asked to what runs: ``resolve(request, capabilities) -> GraphPlan``, a pure function.

The plan says, per phase, by which strategy steps become graphs and at which sizes, and it carries every
decision taken on the way (rule, from, to, reason), so that nothing is switched off silently. Nothing is
mutated and nothing outside the two arguments is read. The order of the rules is the body of ``resolve``. A
full strategy that cannot run falls back to *P*, the piecewise strategy of this model, then to disabled; a
disabled phase is never switched on. Read ``capabilities.py`` for the inputs, ``dispatcher.py`` for what is
made of a plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gapless.errors import ConfigError
from gapless.graphs.capabilities import (
    AVAILABLE_STRATEGIES,
    HARDWARE_RULE,
    AutoDisableRule,
    BackendSupport,
    Capabilities,
    GraphRequest,
    TcCompiler,
)
from gapless.graphs.graph_plan import (
    MODE_PHASES,
    PLANNED_PHASES,
    Decision,
    GraphPlan,
    PhasePlan,
)
from gapless.graphs.ladder import check_listed
from gapless.graphs.modes import AttentionSupport, GraphMode, Phase, RuntimeMode, Strategy
from gapless.graphs.plan_sizes import decode_sizes, is_one_piecewise_set, prefill_sizes

__all__ = [
    "AVAILABLE_STRATEGIES",
    "HARDWARE_RULE",
    "MODE_PHASES",
    "AutoDisableRule",
    "BackendSupport",
    "Capabilities",
    "Decision",
    "GraphPlan",
    "GraphRequest",
    "PhasePlan",
    "check_request",
    "resolve",
]


def resolve(request: GraphRequest, capabilities: Capabilities) -> GraphPlan:
    """Decide the plan. Raises ``ConfigError`` for contradictions and for naming what cannot exist."""
    check_request(request)
    _check_possible(request, capabilities)
    draft = _Draft(request=request, capabilities=capabilities)
    asked = _asked_modes(draft)
    _keep_graph_whole(draft, asked)
    for phase in PLANNED_PHASES:
        draft.strategies[phase] = _strategy_for(draft, phase, asked[phase])
    for phase in PLANNED_PHASES:
        _limit_by_support(draft, phase)
    for phase in PLANNED_PHASES:
        _apply_rules(draft, phase)
    _raise_to_preferred(draft)
    _note_cascade(draft)

    prefill, decode = (draft.strategies[phase] for phase in PLANNED_PHASES)
    shares = prefill is decode is Strategy.FULL and draft.shares_if_full
    _note_unused(draft)
    is_compiled = _is_compiled(draft)
    return GraphPlan(
        prefill=_phase_plan(draft, Phase.PREFILL, shares_graphs=shares),
        decode=_phase_plan(draft, Phase.DECODE, shares_graphs=shares),
        mode=_mode_name(prefill, decode, shares_graphs=shares),
        shares_graphs=shares,
        uniform_query_len=capabilities.uniform_query_len,
        tc_compiler=_compiler(request) if is_compiled else None,
        is_split=not draft.is_whole,
        use_inductor_graph_partition=is_compiled and request.use_inductor_graph_partition,
        decisions=tuple(draft.decisions),
    )


def check_request(request: GraphRequest) -> None:
    """Raise ``ConfigError`` for options that contradict each other whatever the model, naming both sides."""
    for phase in PLANNED_PHASES:
        flag = _flag(request, phase)
        if flag is None:
            continue
        named = f"{_FLAGS[phase]}={flag.value}"
        if request.mode is not None and flag.runtime_mode is not MODE_PHASES[request.mode][phase]:
            raise ConfigError(
                f"{named} contradicts cudagraph_mode={request.mode.value}, which asks for "
                f"{MODE_PHASES[request.mode][phase].name} in {phase}; give only one of the two"
            )
        if flag is Strategy.BREAKABLE and request.splitting_ops == ():
            raise ConfigError(f"{named} cuts the graph at every break, but splitting_ops is empty; use full")
        if flag is Strategy.TC_PIECEWISE and request.compile_mode == 0:
            raise ConfigError(
                f"{named} contradicts compilation mode 0 (no compile); give only one of the two"
            )
    if request.use_inductor_graph_partition and request.compile_mode == 0:
        raise ConfigError("use_inductor_graph_partition contradicts compilation mode 0 (no compile)")
    if request.use_inductor_graph_partition and request.tc_compiler == "eager":
        raise ConfigError("use_inductor_graph_partition contradicts --cuda-graph-tc-compiler=eager")
    if request.prefill_sizes is not None:
        check_listed("prefill", request.prefill_sizes, request.prefill_max)
    if request.decode_sizes is not None:
        check_listed("decode", request.decode_sizes, request.decode_max)


_FLAGS = {Phase.PREFILL: "--cuda-graph-backend-prefill", Phase.DECODE: "--cuda-graph-backend-decode"}


@dataclass(kw_only=True, slots=True)
class _Draft:
    """The plan while it is being made."""

    request: GraphRequest
    capabilities: Capabilities
    strategies: dict[Phase, Strategy] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    rule_hit: set[Phase] = field(default_factory=set)
    """Phases that a rule of the table has switched off."""
    is_whole: bool = False
    """The graph may not be split."""
    shares_if_full: bool = False
    """One set of full graphs for both phases, if both end up full."""

    def flag(self, phase: Phase) -> Strategy | None:
        return _flag(self.request, phase)

    def is_named(self, phase: Phase) -> bool:
        """The user named this phase's backend, or a mode."""
        return self.flag(phase) is not None or self.request.mode is not None

    def note(self, rule: str, phase: Phase | None, before: str, after: str, reason: str) -> None:
        self.decisions.append(
            Decision(rule=rule, phase=phase, before=str(before), after=str(after), reason=reason)
        )

    def change(self, rule: str, phase: Phase, after: Strategy, reason: str) -> None:
        self.note(rule, phase, self.strategies[phase], after, reason)
        self.strategies[phase] = after


def _flag(request: GraphRequest, phase: Phase) -> Strategy | None:
    return request.prefill if phase is Phase.PREFILL else request.decode


def _check_possible(request: GraphRequest, capabilities: Capabilities) -> None:
    """Refuse what was named and cannot exist in this build or with this model."""
    asked_compiler = "compilation mode 3 (piecewise compile)" if request.compile_mode == 3 else None
    if request.use_inductor_graph_partition:
        asked_compiler = "use_inductor_graph_partition"
    for phase in PLANNED_PHASES:
        flag = _flag(request, phase)
        if flag is Strategy.TC_PIECEWISE:
            asked_compiler = f"{_FLAGS[phase]}=tc_piecewise"
        elif flag is not None and flag not in capabilities.available_strategies:
            raise ConfigError(f"{_FLAGS[phase]}={flag.value} is not available in this build")
        if flag is Strategy.BREAKABLE:
            _check_breakable(f"{_FLAGS[phase]}=breakable", capabilities)
    if asked_compiler and Strategy.TC_PIECEWISE not in capabilities.available_strategies:
        raise ConfigError(
            f"{asked_compiler}: tc_piecewise is not available in this build; use breakable, full or disabled"
        )


def _check_breakable(asked: str, capabilities: Capabilities) -> None:
    if not capabilities.has_layer_split:
        raise ConfigError(
            f"{asked} needs a model with embed, layers and head, and this one has no such split; use full or "
            "disabled"
        )
    if capabilities.whole_graph_passes:
        raise ConfigError(
            f"{asked} cuts the graph at every break, but the pass "
            f"{', '.join(capabilities.whole_graph_passes)} needs the whole graph; use full"
        )


def _asked_modes(draft: _Draft) -> dict[Phase, RuntimeMode]:
    request, capabilities = draft.request, draft.capabilities
    auto = GraphMode.PIECEWISE if capabilities.is_pooling else GraphMode.FULL_AND_PIECEWISE
    mode = request.mode or auto
    draft.shares_if_full = request.mode is GraphMode.FULL
    asked = {}
    for phase in PLANNED_PHASES:
        flag = draft.flag(phase)
        asked[phase] = flag.runtime_mode if flag is not None else MODE_PHASES[mode][phase]
        if flag is None and request.mode is None:
            reason = "pooling models have no decode steps" if capabilities.is_pooling else "the default mode"
            draft.note("auto", phase, "auto", asked[phase].name, f"{mode.value}: {reason}")
    return asked


def _keep_graph_whole(draft: _Draft, asked: dict[Phase, RuntimeMode]) -> None:
    """Without splits there is nothing piecewise: what was asked as P becomes full."""
    passes = draft.capabilities.whole_graph_passes
    if draft.request.splitting_ops != () and not passes:
        return
    draft.is_whole = True
    reason = f"the pass {', '.join(passes)} needs the whole graph" if passes else "splitting_ops is empty"
    for phase in PLANNED_PHASES:
        if asked[phase] is RuntimeMode.PIECEWISE:
            draft.note("whole_graph", phase, "PIECEWISE", "FULL", reason)
            asked[phase] = RuntimeMode.FULL
            draft.shares_if_full = True


def _strategy_for(draft: _Draft, phase: Phase, mode: RuntimeMode) -> Strategy:
    if mode is RuntimeMode.FULL:
        return Strategy.FULL
    if mode is RuntimeMode.NONE:
        return Strategy.DISABLED
    flag = draft.flag(phase)
    if flag is not None:
        return flag
    piecewise, reason = _piecewise(draft.request, draft.capabilities)
    draft.note("piecewise", phase, "PIECEWISE", piecewise, reason)
    return piecewise


def _piecewise(request: GraphRequest, capabilities: Capabilities) -> tuple[Strategy, str]:
    """P: the piecewise strategy of this model, and why it is that one."""
    if Strategy.TC_PIECEWISE in (request.prefill, request.decode):
        return Strategy.TC_PIECEWISE, "named for a phase"
    if request.compile_mode == 3 or request.use_inductor_graph_partition:
        return Strategy.TC_PIECEWISE, "piecewise compilation was asked for"
    if capabilities.has_layer_split and Strategy.BREAKABLE in capabilities.available_strategies:
        return Strategy.BREAKABLE, "the model has embed, layers and head"
    if Strategy.TC_PIECEWISE in capabilities.available_strategies and request.compile_mode != 0:
        return Strategy.TC_PIECEWISE, "the model has no embed / layers / head split, so it is traced"
    return Strategy.DISABLED, (
        "the model has no embed / layers / head split and nothing may be compiled"
        if not capabilities.has_layer_split
        else "this build has no piecewise strategy that may be used"
    )


def _limit_by_support(draft: _Draft, phase: Phase) -> None:
    if draft.strategies[phase] is not Strategy.FULL:
        return
    support = draft.capabilities.support
    query_len = draft.capabilities.uniform_query_len
    if support is AttentionSupport.ALWAYS:
        return
    if phase is Phase.DECODE:
        if support is AttentionSupport.UNIFORM_BATCH:
            return
        if support is AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE and query_len == 1:
            return
    weakest = min(draft.capabilities.attention, key=lambda backend: backend.support)
    reason = f"attention backend {weakest.name} supports {support.name}"
    if phase is Phase.DECODE and query_len > 1:
        reason += f", and decode steps have {query_len} tokens"
    if draft.is_whole:
        draft.change("attention_support", phase, Strategy.DISABLED, f"{reason}; the graph may not be split")
        return
    piecewise, why = _piecewise(draft.request, draft.capabilities)
    if piecewise is Strategy.DISABLED:
        reason = f"{reason}; piecewise is impossible: {why}"
    draft.change("attention_support", phase, piecewise, reason)


def _apply_rules(draft: _Draft, phase: Phase) -> None:
    """Hard rules first, so that a phase that is off anyway does not also report soft ones."""
    for rule in sorted(_active_rules(draft.capabilities), key=lambda rule: not rule.is_hard):
        strategy = draft.strategies[phase]
        if phase not in rule.phases or strategy not in rule.strategies:
            continue
        name = f"auto_disable:{rule.feature}"
        if draft.request.force and strategy is Strategy.TC_PIECEWISE:
            draft.note(name, phase, strategy, strategy, f"ignored, forced: {rule.reason}")
        elif not rule.is_hard and draft.is_named(phase):
            draft.note(name, phase, strategy, strategy, f"ignored, backend or mode was named: {rule.reason}")
        else:
            draft.change(name, phase, Strategy.DISABLED, rule.reason)
            draft.rule_hit.add(phase)


def _active_rules(capabilities: Capabilities) -> list[AutoDisableRule]:
    rules = [
        rule
        for rule in capabilities.rules
        if rule.feature in capabilities.features and rule.feature != HARDWARE_RULE.feature
    ]
    is_bare = not capabilities.supports_graphs or HARDWARE_RULE.feature in capabilities.features
    return [HARDWARE_RULE, *rules] if is_bare else rules


def _raise_to_preferred(draft: _Draft) -> None:
    """Under ``auto`` a backend that runs best in full graphs gets them in prefill, unless a rule had
    doubts."""
    attention = draft.capabilities.attention
    prefers_full = bool(attention) and all(backend.preferred is GraphMode.FULL for backend in attention)
    if (
        prefers_full
        and not draft.is_named(Phase.PREFILL)
        and not draft.capabilities.is_pooling
        and not draft.rule_hit
        and draft.request.compile_mode != 3
        and not draft.request.use_inductor_graph_partition
        and draft.capabilities.support is AttentionSupport.ALWAYS
        and draft.strategies[Phase.PREFILL] is not Strategy.FULL
    ):
        names = ", ".join(backend.name for backend in attention)
        draft.change("preferred", Phase.PREFILL, Strategy.FULL, f"attention backend {names} prefers FULL")


def _note_cascade(draft: _Draft) -> None:
    if not draft.capabilities.uses_cascade:
        return
    has_piecewise = any(s.runtime_mode is RuntimeMode.PIECEWISE for s in draft.strategies.values())
    instead = "piecewise" if has_piecewise else "eager"
    for phase in PLANNED_PHASES:
        if draft.strategies[phase] is Strategy.FULL:
            draft.note(
                "cascade",
                phase,
                Strategy.FULL,
                Strategy.FULL,
                f"batches with shared-prefix attention run {instead}; a full graph cannot hold it",
            )


def _phase_plan(draft: _Draft, phase: Phase, *, shares_graphs: bool) -> PhasePlan:
    strategy = draft.strategies[phase]
    if strategy is Strategy.DISABLED:
        return PhasePlan()
    if phase is Phase.PREFILL:
        ladder = prefill_sizes(draft.request, draft.capabilities, serves_decode=shares_graphs)
        has_own_decode = draft.strategies[Phase.DECODE] is Strategy.FULL and not shares_graphs
        if has_own_decode and draft.capabilities.uniform_query_len == 1:
            ladder = ladder.without(1, reason="a step of one token is a decode step, which has its own graph")
        return PhasePlan(strategy=strategy, ladder=ladder)
    # By default piecewise decode adds its own small sizes to the set it shares with prefill.
    is_one_set = is_one_piecewise_set(draft.strategies[Phase.PREFILL], strategy)
    has_list = draft.request.capture_sizes is not None
    uses_prefill_graphs = shares_graphs or (is_one_set and has_list)
    ladder = decode_sizes(draft.request, draft.capabilities, uses_prefill_graphs=uses_prefill_graphs)
    return PhasePlan(strategy=strategy, ladder=ladder)


def _is_compiled(draft: _Draft) -> bool:
    """The forward is traced: for piecewise graphs, or for full ones of which compiled code was asked for."""
    strategies, request = draft.strategies.values(), draft.request
    if Strategy.TC_PIECEWISE in strategies:
        return True
    if Strategy.FULL not in strategies or request.compile_mode == 0:
        return False
    is_named = Strategy.TC_PIECEWISE in (request.prefill, request.decode)  # and became full: not to be split
    has_passes = bool(draft.capabilities.whole_graph_passes)
    return request.compile_mode == 3 or request.use_inductor_graph_partition or is_named or has_passes


def _compiler(request: GraphRequest) -> TcCompiler:
    return "inductor" if request.use_inductor_graph_partition else request.tc_compiler or "eager"


def _note_unused(draft: _Draft) -> None:
    """Options that had nothing to act on, so that none is ignored silently."""
    request = draft.request
    is_compiled = _is_compiled(draft)
    off = {phase: draft.strategies[phase] is Strategy.DISABLED for phase in PLANNED_PHASES}
    is_broken = Strategy.BREAKABLE in draft.strategies.values() and not set(
        request.splitting_ops or ()
    ).isdisjoint(draft.capabilities.break_ops)
    unused = {
        "--cuda-graph-max-bs-prefill": request.prefill_max is not None and off[Phase.PREFILL],
        "--cuda-graph-bs-prefill": request.prefill_sizes is not None and off[Phase.PREFILL],
        "--cuda-graph-max-bs-decode": request.decode_max is not None and off[Phase.DECODE],
        "--cuda-graph-bs-decode": request.decode_sizes is not None and off[Phase.DECODE],
        "cudagraph_capture_sizes": request.capture_sizes is not None and all(off.values()),
        "compilation mode 3": request.compile_mode == 3 and not is_compiled,
        "use_inductor_graph_partition": request.use_inductor_graph_partition and not is_compiled,
        "--cuda-graph-tc-compiler": request.tc_compiler is not None and not is_compiled,
        "splitting_ops": bool(request.splitting_ops) and not is_compiled and not is_broken,
    }
    for option, is_unused in unused.items():
        if is_unused:
            draft.note("unused_option", None, option, "unused", "no phase of this plan can use it")


def _mode_name(prefill: Strategy, decode: Strategy, *, shares_graphs: bool) -> GraphMode | None:
    modes = {Phase.PREFILL: prefill.runtime_mode, Phase.DECODE: decode.runtime_mode}
    name = next((mode for mode, phases in MODE_PHASES.items() if phases == modes), None)
    return None if name is GraphMode.FULL and not shares_graphs else name

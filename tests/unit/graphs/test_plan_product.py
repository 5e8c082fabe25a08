"""The plan over the full product of what decides it, against the documented tables written down once more.

Modes × support × which piecewise strategies exist × query length × pooling × cascade × features × whether the
graph may be split. Each case is also checked for a reason wherever the plan is not what was asked for.
"""

from __future__ import annotations

import itertools

import pytest

from gapless.graphs.modes import AttentionSupport, GraphMode, Phase, Strategy
from gapless.graphs.plan import (
    AutoDisableRule,
    BackendSupport,
    Capabilities,
    GraphPlan,
    GraphRequest,
    resolve,
)

ALL = frozenset(Strategy)
OFF, TC, BREAKABLE, FULL = Strategy.DISABLED, Strategy.TC_PIECEWISE, Strategy.BREAKABLE, Strategy.FULL
S = AttentionSupport
PREFILL, DECODE = Phase.PREFILL, Phase.DECODE

STACKS: dict[Strategy, dict[str, object]] = {  # what P is: the facts that make it so
    BREAKABLE: {"has_layer_split": True},
    TC: {"has_layer_split": False, "available_strategies": ALL},
    OFF: {"has_layer_split": False, "available_strategies": ALL - {TC}},
}
PIECES = frozenset({TC, BREAKABLE})
RULES = tuple(
    AutoDisableRule(
        feature=feature, strategies=PIECES, phases=frozenset({PREFILL}), is_hard=feature == "hard", reason="r"
    )
    for feature in ("soft", "hard")
)
FEATURES: list[frozenset[str]] = [
    frozenset(),
    frozenset({"soft"}),
    frozenset({"hard"}),
    frozenset({"soft", "hard"}),
]
ASKED = {  # mode: (prefill, decode)
    GraphMode.NONE: ("NONE", "NONE"),
    GraphMode.PIECEWISE: ("P", "P"),
    GraphMode.FULL: ("FULL", "FULL"),
    GraphMode.FULL_DECODE_ONLY: ("NONE", "FULL"),
    GraphMode.FULL_AND_PIECEWISE: ("P", "FULL"),
}
HOLDS_PREFILL = {S.ALWAYS: True, S.UNIFORM_BATCH: False, S.UNIFORM_SINGLE_TOKEN_DECODE: False, S.NEVER: False}
HOLDS_DECODE = {  # by query length
    S.ALWAYS: {1: True, 3: True},
    S.UNIFORM_BATCH: {1: True, 3: True},
    S.UNIFORM_SINGLE_TOKEN_DECODE: {1: True, 3: False},
    S.NEVER: {1: False, 3: False},
}


def expected(
    mode: GraphMode | None,
    support: AttentionSupport,
    piecewise: Strategy,
    query_len: int,
    is_pooling: bool,
    features: frozenset[str],
    may_split: bool,
) -> dict[Phase, Strategy]:
    default = GraphMode.PIECEWISE if is_pooling else GraphMode.FULL_AND_PIECEWISE
    plan = {}
    for phase, asked in zip((PREFILL, DECODE), ASKED[mode or default], strict=True):
        if asked == "NONE":
            plan[phase] = OFF
            continue
        holds = HOLDS_PREFILL[support] if phase is PREFILL else HOLDS_DECODE[support][query_len]
        if asked == "FULL" or not may_split:
            strategy = FULL if holds else (piecewise if may_split else OFF)
        else:
            strategy = piecewise
        is_ruled = phase is PREFILL and strategy in PIECES
        if is_ruled and ("hard" in features or ("soft" in features and mode is None)):
            strategy = OFF
        plan[phase] = strategy
    return plan


def reasons(plan: GraphPlan, phase: Phase) -> list[str]:
    return [d.rule for d in plan.decisions if d.phase is phase and d.before != d.after and d.reason]


@pytest.mark.parametrize("may_split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("support", list(S), ids=lambda s: s.name)
@pytest.mark.parametrize("mode", [None, *GraphMode], ids=str)
def test_every_combination_becomes_what_the_tables_say(
    mode: GraphMode | None, support: AttentionSupport, may_split: bool
) -> None:
    cases = itertools.product(STACKS, (1, 3), (False, True), (False, True), FEATURES)
    for piecewise, query_len, is_pooling, has_cascade, features in cases:
        capabilities = Capabilities(
            max_reqs=16,
            chunked_prefill_size=256,
            attention=(BackendSupport(name="backend", support=support, preferred=None),),
            uniform_query_len=query_len,
            is_pooling=is_pooling,
            uses_cascade=has_cascade,
            features=features,
            rules=RULES,
            **STACKS[piecewise],  # type: ignore[arg-type]
        )
        plan = resolve(GraphRequest(mode=mode, splitting_ops=None if may_split else ()), capabilities)
        got = {PREFILL: plan.prefill.strategy, DECODE: plan.decode.strategy}
        want = expected(mode, support, piecewise, query_len, is_pooling, features, may_split)
        assert got == want, (piecewise, query_len, is_pooling, has_cascade, features)

        asked = ASKED[mode or (GraphMode.PIECEWISE if is_pooling else GraphMode.FULL_AND_PIECEWISE)]
        for phase, wanted in zip((PREFILL, DECODE), asked, strict=True):
            is_other = {"NONE": OFF, "P": piecewise, "FULL": FULL}[wanted] is not got[phase]
            assert not is_other or reasons(plan, phase), "a phase that changed says why"
        notes = [d for d in plan.decisions if d.rule == "cascade"]
        assert {d.phase for d in notes} == ({p for p in got if got[p] is FULL} if has_cascade else set())
        assert bool(plan.prefill.ladder.sizes) == (got[PREFILL] is not OFF)
        has_own_sizes = got[DECODE] is not OFF and not plan.shares_graphs
        assert bool(plan.decode.ladder.sizes) == has_own_sizes
        ignored = [d for d in plan.decisions if "ignored" in d.reason]
        if ignored:
            assert mode is not None
            assert "soft" in features

"""From request to plan: modes, P, downgrades, rules, whole graphs, sizes. The tables here are the documented
ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.errors import ConfigError
from gapless.graphs.modes import AttentionSupport, GraphMode, Phase, RuntimeMode, Strategy
from gapless.graphs.plan import (
    AutoDisableRule,
    BackendSupport,
    Capabilities,
    GraphRequest,
    check_request,
    resolve,
)

ALL = frozenset(Strategy)
OFF, TC, BREAKABLE, FULL = Strategy.DISABLED, Strategy.TC_PIECEWISE, Strategy.BREAKABLE, Strategy.FULL
S = AttentionSupport
PREFILL, DECODE = Phase.PREFILL, Phase.DECODE


def caps(support: AttentionSupport = S.ALWAYS, preferred: GraphMode | None = None, **facts) -> Capabilities:
    facts = {"max_reqs": 16, "chunked_prefill_size": 256, **facts}
    facts.setdefault("attention", (BackendSupport(name="backend", support=support, preferred=preferred),))
    return Capabilities(**facts)


def strategies(plan) -> tuple[Strategy, Strategy]:
    return plan.prefill.strategy, plan.decode.strategy


def rules_hit(plan) -> list[str]:
    return [decision.rule for decision in plan.decisions]


# --- modes, defaults and support ---

ASKED = {  # mode -> (prefill, decode); None is auto
    GraphMode.NONE: ("off", "off"),
    GraphMode.PIECEWISE: ("P", "P"),
    GraphMode.FULL: ("full", "full"),
    GraphMode.FULL_DECODE_ONLY: ("off", "full"),
    GraphMode.FULL_AND_PIECEWISE: ("P", "full"),
}
SUPPORTED = {  # (support, query length) -> what full becomes in (prefill, decode)
    (S.ALWAYS, 1): ("full", "full"),
    (S.ALWAYS, 3): ("full", "full"),
    (S.UNIFORM_BATCH, 1): ("P", "full"),
    (S.UNIFORM_BATCH, 3): ("P", "full"),
    (S.UNIFORM_SINGLE_TOKEN_DECODE, 1): ("P", "full"),
    (S.UNIFORM_SINGLE_TOKEN_DECODE, 3): ("P", "P"),
    (S.NEVER, 1): ("P", "P"),
    (S.NEVER, 3): ("P", "P"),
}
MODELS = {  # what P is -> facts of model and build
    BREAKABLE: {"has_layer_split": True},
    TC: {"has_layer_split": False, "available_strategies": ALL},
    OFF: {"has_layer_split": False, "available_strategies": ALL - {TC}},
}


def expected(mode, support, query_len, is_pooling, piecewise) -> tuple[Strategy, Strategy]:
    default = GraphMode.PIECEWISE if is_pooling else GraphMode.FULL_AND_PIECEWISE
    result = []
    for asked, after in zip(ASKED[mode or default], SUPPORTED[support, query_len], strict=True):
        kind = after if asked == "full" else asked
        result.append({"off": OFF, "P": piecewise, "full": FULL}[kind])
    return result[0], result[1]


@pytest.mark.parametrize("is_pooling", [False, True], ids=["generates", "pools"])
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("support", list(S), ids=lambda s: s.name)
@pytest.mark.parametrize("mode", [None, *GraphMode], ids=str)
def test_every_mode_on_every_support_becomes_what_the_tables_say(mode, support, query_len, is_pooling):
    for (piecewise, facts), cascade in itertools.product(MODELS.items(), (False, True)):
        capabilities = caps(
            support, uniform_query_len=query_len, is_pooling=is_pooling, uses_cascade=cascade, **facts
        )
        plan = resolve(GraphRequest(mode=mode), capabilities)
        assert strategies(plan) == expected(mode, support, query_len, is_pooling, piecewise)
        assert plan.shares_graphs == (mode is GraphMode.FULL and support is S.ALWAYS)
        if strategies(plan) != expected(mode, S.ALWAYS, query_len, is_pooling, piecewise):
            assert "attention_support" in rules_hit(plan)


@pytest.mark.parametrize("support", list(S), ids=lambda s: s.name)
@pytest.mark.parametrize(
    ("prefill", "decode"), list(itertools.product([None, OFF, BREAKABLE, FULL], repeat=2))
)
def test_flags_per_phase_are_taken_as_given_and_limited_by_support(prefill, decode, support):
    plan = resolve(GraphRequest(prefill=prefill, decode=decode), caps(support))
    full_prefill, full_decode = SUPPORTED[support, 1]
    names = {"P": BREAKABLE, "full": FULL}
    wanted_prefill = prefill if prefill is not None else BREAKABLE
    wanted_decode = decode if decode is not None else FULL
    assert strategies(plan) == (
        names[full_prefill] if wanted_prefill is FULL else wanted_prefill,
        names[full_decode] if wanted_decode is FULL else wanted_decode,
    )
    assert not plan.shares_graphs


@pytest.mark.parametrize(
    ("request_", "mode"),
    [
        (GraphRequest(), GraphMode.FULL_AND_PIECEWISE),
        (GraphRequest(mode=GraphMode.FULL), GraphMode.FULL),
        (GraphRequest(prefill=FULL, decode=FULL), None),
        (GraphRequest(prefill=FULL, decode=OFF), None),
        (GraphRequest(prefill=BREAKABLE, decode=OFF), None),
        (GraphRequest(prefill=OFF), GraphMode.FULL_DECODE_ONLY),
        (GraphRequest(prefill=OFF, decode=OFF), GraphMode.NONE),
        (GraphRequest(decode=BREAKABLE), GraphMode.PIECEWISE),
    ],
)
def test_the_plan_has_a_mode_name_only_where_one_exists(request_, mode):
    plan = resolve(request_, caps())
    assert plan.mode is mode
    assert plan.describe()[0] == f"graph mode: {mode.value if mode else 'set per phase'}"


def test_the_weakest_of_several_backends_counts_and_is_named():
    backends = (
        BackendSupport(name="strong", support=S.ALWAYS),
        BackendSupport(name="weak", support=S.NEVER),
        BackendSupport(name="middle", support=S.UNIFORM_BATCH),
    )
    plan = resolve(GraphRequest(mode=GraphMode.FULL), caps(attention=backends))
    assert strategies(plan) == (BREAKABLE, BREAKABLE)
    assert all("weak" in d.reason for d in plan.decisions if d.rule == "attention_support")


def test_a_model_without_attention_is_not_limited_by_it():
    assert strategies(resolve(GraphRequest(mode=GraphMode.FULL), caps(attention=()))) == (FULL, FULL)


def test_decode_stays_full_where_piecewise_is_impossible():
    plan = resolve(GraphRequest(), caps(has_layer_split=False, available_strategies=ALL - {TC}))
    assert strategies(plan) == (OFF, FULL)
    assert plan.mode is GraphMode.FULL_DECODE_ONLY
    assert any(d.phase is PREFILL and d.after == "disabled" for d in plan.decisions)


# --- P ---


@pytest.mark.parametrize("has_split", [True, False])
@pytest.mark.parametrize(
    ("request_", "with_split", "without_split"),
    [
        (GraphRequest(), BREAKABLE, TC),
        (GraphRequest(compile_mode=3), TC, TC),
        (GraphRequest(use_inductor_graph_partition=True), TC, TC),
        (GraphRequest(decode=TC), TC, TC),
        (GraphRequest(compile_mode=0), BREAKABLE, OFF),
        (GraphRequest(mode=GraphMode.PIECEWISE), BREAKABLE, TC),
        (GraphRequest(mode=GraphMode.PIECEWISE, compile_mode=3), TC, TC),
    ],
)
def test_p_is_the_first_possible_of_named_asked_breakable_traced(
    request_, with_split, without_split, has_split
):
    plan = resolve(request_, caps(has_layer_split=has_split, available_strategies=ALL))
    assert plan.prefill.strategy is (with_split if has_split else without_split)


@pytest.mark.parametrize("compiler", [None, "eager", "inductor"])
def test_the_plan_names_the_compiler_only_where_something_is_compiled(compiler):
    capabilities = caps(available_strategies=ALL)
    compiled = resolve(GraphRequest(prefill=TC, tc_compiler=compiler), capabilities)
    assert compiled.tc_compiler == (compiler or "eager")
    plain = resolve(GraphRequest(tc_compiler=compiler), capabilities)
    assert plain.tc_compiler is None
    assert ("unused_option" in rules_hit(plain)) == (compiler is not None)


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (GraphRequest(prefill=TC), "forward: traced, cut at its split ops, compiled by eager"),
        (
            GraphRequest(prefill=TC, splitting_ops=(), tc_compiler="inductor"),
            "forward: traced, in one piece, compiled by inductor",
        ),
        (
            GraphRequest(use_inductor_graph_partition=True),
            "forward: traced, cut by Inductor at its split ops, compiled by inductor",
        ),
    ],
)
def test_the_printed_plan_says_how_the_forward_is_compiled(request_, line):
    assert line in resolve(request_, caps(available_strategies=ALL)).describe()
    assert not any("traced" in text for text in resolve(GraphRequest(), caps()).describe())


@pytest.mark.parametrize(
    ("request_", "facts", "compiler"),
    [
        (GraphRequest(mode=GraphMode.FULL, compile_mode=3), {}, "eager"),
        (GraphRequest(mode=GraphMode.FULL, compile_mode=3, tc_compiler="inductor"), {}, "inductor"),
        (GraphRequest(mode=GraphMode.FULL), {}, None),
        (GraphRequest(mode=GraphMode.FULL, tc_compiler="inductor"), {}, None),
        (GraphRequest(mode=GraphMode.FULL, use_inductor_graph_partition=True), {}, "inductor"),
        (GraphRequest(prefill=TC, splitting_ops=()), {}, "eager"),
        (GraphRequest(splitting_ops=()), {}, None),
        (GraphRequest(), {"whole_graph_passes": ("fuse",)}, "eager"),
        (GraphRequest(compile_mode=0), {"whole_graph_passes": ("fuse",)}, None),
        (GraphRequest(mode=GraphMode.NONE, compile_mode=3), {}, None),
        (GraphRequest(prefill=BREAKABLE, decode=OFF), {}, None),
    ],
)
def test_full_graphs_are_made_of_compiled_code_only_where_that_was_asked_for(request_, facts, compiler):
    plan = resolve(request_, caps(available_strategies=ALL, **facts))
    assert plan.tc_compiler == compiler
    assert plan.is_split == (request_.splitting_ops != () and not facts)
    assert plan.use_inductor_graph_partition == request_.use_inductor_graph_partition


@pytest.mark.parametrize(
    "request_",
    [
        GraphRequest(prefill=TC),
        GraphRequest(decode=TC),
        GraphRequest(compile_mode=3),
        GraphRequest(use_inductor_graph_partition=True),
        GraphRequest(mode=GraphMode.FULL_AND_PIECEWISE, compile_mode=3),
    ],
)
def test_asking_for_tracing_in_a_build_without_it_is_one_clear_sentence(request_):
    with pytest.raises(ConfigError, match=r"tc_piecewise is not available in this build; use breakable"):
        resolve(request_, caps(available_strategies=ALL - {TC}))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_naming_breakable_for_a_model_without_the_split_is_an_error(phase):
    with pytest.raises(
        ConfigError, match=rf"backend-{phase}=breakable needs a model with embed, layers and head"
    ):
        resolve(GraphRequest(**{phase: BREAKABLE}), caps(has_layer_split=False))


@pytest.mark.parametrize(("flag", "build"), [(FULL, {OFF, BREAKABLE}), (BREAKABLE, {OFF, FULL})])
def test_naming_a_strategy_outside_the_build_is_an_error(flag, build):
    with pytest.raises(ConfigError, match=f"backend-prefill={flag.value} is not available"):
        resolve(GraphRequest(prefill=flag), caps(available_strategies=frozenset(build)))


# --- contradictions ---

AGREES = {"off": {OFF}, "P": {TC, BREAKABLE}, "full": {FULL}}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("flag", list(Strategy), ids=str)
@pytest.mark.parametrize("mode", list(GraphMode), ids=str)
def test_a_mode_and_a_flag_agree_or_the_error_names_both(mode, flag, phase):
    asked = ASKED[mode][0 if phase == "prefill" else 1]
    request = GraphRequest(mode=mode, **{phase: flag})
    if flag in AGREES[asked]:
        check_request(request)
        return
    with pytest.raises(
        ConfigError, match=rf"backend-{phase}={flag.value} contradicts cudagraph_mode={mode.value},"
    ):
        resolve(request, caps(available_strategies=ALL))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (GraphRequest(prefill=TC, compile_mode=0), "tc_piecewise contradicts compilation mode 0"),
        (
            GraphRequest(use_inductor_graph_partition=True, compile_mode=0),
            "partition contradicts compilation mode 0",
        ),
        (
            GraphRequest(use_inductor_graph_partition=True, tc_compiler="eager"),
            "partition contradicts --cuda-graph-tc-compiler=eager",
        ),
        (GraphRequest(prefill=BREAKABLE, splitting_ops=()), "breakable.*splitting_ops is empty"),
        (GraphRequest(prefill_sizes=(4, 8), prefill_max=16), "max-bs-prefill=16 disagrees with"),
        (GraphRequest(decode_sizes=(4, 8), decode_max=2), "max-bs-decode=2 disagrees with"),
        (
            GraphRequest(capture_sizes=(4, 8), prefill_max=16),
            "max-bs-prefill=16 disagrees with cudagraph_capture",
        ),
        (
            GraphRequest(capture_sizes=(4, 8), decode_max=4),
            "max-bs-decode=4 disagrees with cudagraph_capture",
        ),
        (GraphRequest(prefill_sizes=(0,)), "bs-prefill: 0 is not"),
        (GraphRequest(capture_sizes=()), "cudagraph_capture_sizes is an empty list"),
    ],
)
def test_contradictions_are_refused_and_name_both_sides(request_, words):
    with pytest.raises(ConfigError, match=words):
        resolve(request_, caps(available_strategies=ALL))


# --- auto-disable rules ---

PIECES = frozenset({TC, BREAKABLE})
SOFT = AutoDisableRule(
    feature="soft", strategies=PIECES, phases=frozenset({PREFILL}), is_hard=False, reason="untested"
)
HARD = AutoDisableRule(
    feature="hard", strategies=PIECES, phases=frozenset({PREFILL, DECODE}), is_hard=True, reason="impossible"
)


def ruled(*features: str, **facts) -> Capabilities:
    return caps(features=frozenset(features), rules=(SOFT, HARD), available_strategies=ALL, **facts)


@pytest.mark.parametrize(
    ("request_", "prefill"),
    [
        (GraphRequest(), OFF),
        (GraphRequest(decode=FULL), OFF),
        (GraphRequest(compile_mode=3), OFF),
        (GraphRequest(prefill=BREAKABLE), BREAKABLE),
        (GraphRequest(prefill=TC), TC),
        (GraphRequest(mode=GraphMode.FULL_AND_PIECEWISE), BREAKABLE),
        (GraphRequest(mode=GraphMode.PIECEWISE), BREAKABLE),
        (GraphRequest(mode=GraphMode.FULL), FULL),
        (GraphRequest(prefill=FULL), FULL),
    ],
)
def test_a_soft_rule_yields_to_a_named_backend_or_mode_and_says_so(request_, prefill):
    plan = resolve(request_, ruled("soft"))
    assert plan.prefill.strategy is prefill
    decisions = [d for d in plan.decisions if d.rule == "auto_disable:soft"]
    assert bool(decisions) == (prefill is not FULL)
    if prefill is BREAKABLE:
        assert decisions[0].before == decisions[0].after == "breakable"
        assert "named" in decisions[0].reason


@pytest.mark.parametrize("mode", [None, *GraphMode], ids=str)
@pytest.mark.parametrize("support", list(S), ids=lambda s: s.name)
def test_a_hard_rule_leaves_no_piecewise_graph_in_any_mode(mode, support):
    plan = resolve(GraphRequest(mode=mode), ruled("hard", "soft", support=support))
    plain = resolve(GraphRequest(mode=mode), ruled(support=support))
    for was, now in zip(strategies(plain), strategies(plan), strict=True):
        assert now is (OFF if was in PIECES else was)


@pytest.mark.parametrize("flag", [TC, BREAKABLE])
def test_a_hard_rule_holds_against_a_named_backend(flag):
    plan = resolve(GraphRequest(prefill=flag), ruled("hard"))
    assert plan.prefill.strategy is OFF
    [decision] = [d for d in plan.decisions if d.rule == "auto_disable:hard"]
    assert (decision.before, decision.after, decision.reason) == (flag.value, "disabled", "impossible")


@pytest.mark.parametrize(("flag", "prefill"), [(TC, TC), (BREAKABLE, OFF)])
def test_force_skips_hard_rules_for_tracing_alone(flag, prefill):
    plan = resolve(GraphRequest(prefill=flag, force=True), ruled("hard"))
    assert plan.prefill.strategy is prefill


def test_force_skips_the_hardware_rule_for_tracing_too():
    capabilities = ruled(supports_graphs=False)
    plan = resolve(GraphRequest(prefill=TC, decode=FULL, force=True), capabilities)
    assert strategies(plan) == (TC, OFF)


@pytest.mark.parametrize("features", [(), ("other",)])
def test_a_rule_whose_feature_is_off_does_nothing(features):
    plan = resolve(GraphRequest(), ruled(*features))
    assert strategies(plan) == (BREAKABLE, FULL)
    assert not [rule for rule in rules_hit(plan) if rule.startswith("auto_disable")]


@pytest.mark.parametrize("mode", [None, *GraphMode], ids=str)
def test_a_device_without_graphs_runs_everything_eagerly(mode):
    plan = resolve(GraphRequest(mode=mode), caps(supports_graphs=False))
    assert strategies(plan) == (OFF, OFF)
    assert plan.mode is GraphMode.NONE
    assert plan.prefill.ladder.sizes == plan.decode.ladder.sizes == ()


# --- preferred, cascade, whole graphs ---


@pytest.mark.parametrize(
    ("request_", "facts", "prefill"),
    [
        (GraphRequest(), {}, FULL),
        (GraphRequest(decode=FULL), {}, FULL),
        (GraphRequest(), {"has_layer_split": False}, FULL),
        (GraphRequest(prefill=BREAKABLE), {}, BREAKABLE),
        (GraphRequest(prefill=OFF), {}, OFF),
        (GraphRequest(mode=GraphMode.FULL_AND_PIECEWISE), {}, BREAKABLE),
        (GraphRequest(), {"support": S.UNIFORM_BATCH}, BREAKABLE),
        (GraphRequest(), {"is_pooling": True}, BREAKABLE),
        (GraphRequest(compile_mode=3), {"available_strategies": ALL}, TC),
        (GraphRequest(), {"rules": (SOFT,), "features": frozenset({"soft"})}, OFF),
    ],
)
def test_a_backend_that_prefers_full_raises_prefill_only_under_auto(request_, facts, prefill):
    plan = resolve(request_, caps(preferred=GraphMode.FULL, **facts))
    assert plan.prefill.strategy is prefill
    assert ("preferred" in rules_hit(plan)) == (prefill is FULL)
    assert not plan.shares_graphs


def test_every_backend_has_to_prefer_full():
    backends = tuple(
        BackendSupport(name=str(i), support=S.ALWAYS, preferred=preferred)
        for i, preferred in enumerate((GraphMode.FULL, None))
    )
    assert resolve(GraphRequest(), caps(attention=backends)).prefill.strategy is BREAKABLE


@pytest.mark.parametrize(
    ("mode", "instead"), [(GraphMode.FULL, "eager"), (GraphMode.FULL_AND_PIECEWISE, "piecewise")]
)
def test_cascade_is_a_note_and_changes_no_strategy(mode, instead):
    plan = resolve(GraphRequest(mode=mode), caps(uses_cascade=True))
    assert strategies(plan) == strategies(resolve(GraphRequest(mode=mode), caps()))
    notes = [d for d in plan.decisions if d.rule == "cascade"]
    assert notes
    assert all(note.before == note.after == "full" and instead in note.reason for note in notes)


@pytest.mark.parametrize("facts", [{}, {"has_layer_split": False}], ids=["split", "no split"])
@pytest.mark.parametrize("cause", ["splitting_ops", "pass"])
@pytest.mark.parametrize(
    "mode", [None, GraphMode.PIECEWISE, GraphMode.FULL_AND_PIECEWISE, GraphMode.FULL], ids=str
)
@pytest.mark.parametrize(
    ("support", "name"),
    [
        (S.ALWAYS, GraphMode.FULL),
        (S.UNIFORM_BATCH, GraphMode.FULL_DECODE_ONLY),
        (S.UNIFORM_SINGLE_TOKEN_DECODE, GraphMode.FULL_DECODE_ONLY),
        (S.NEVER, GraphMode.NONE),
    ],
)
def test_without_splits_piecewise_becomes_full_as_far_as_attention_allows(support, name, mode, cause, facts):
    request = GraphRequest(mode=mode, splitting_ops=() if cause == "splitting_ops" else None)
    passes = () if cause == "splitting_ops" else ("fuse_attention",)
    plan = resolve(request, caps(support, whole_graph_passes=passes, **facts))
    assert plan.mode is name
    assert plan.shares_graphs == (name is GraphMode.FULL)


def test_without_splits_a_named_tracing_backend_becomes_full():
    plan = resolve(GraphRequest(prefill=TC, decode=FULL, splitting_ops=()), caps(available_strategies=ALL))
    assert plan.mode is GraphMode.FULL


def test_without_splits_disabled_stays_disabled():
    plan = resolve(GraphRequest(mode=GraphMode.FULL_DECODE_ONLY, splitting_ops=()), caps())
    assert strategies(plan) == (OFF, FULL)


def test_a_pass_that_needs_the_whole_graph_refuses_a_named_breakable_backend():
    with pytest.raises(ConfigError, match=r"breakable cuts the graph.*fuse_attention"):
        resolve(GraphRequest(prefill=BREAKABLE), caps(whole_graph_passes=("fuse_attention",)))


# --- sizes ---


def sizes(plan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return plan.prefill.ladder.sizes, plan.decode.ladder.sizes


def test_a_disabled_phase_has_no_sizes_and_its_options_are_reported_as_unused():
    request = GraphRequest(prefill=OFF, prefill_max=4096, decode=OFF, decode_sizes=(1, 2), capture_sizes=(8,))
    plan = resolve(request, caps())
    assert sizes(plan) == ((), ())
    assert {d.before for d in plan.decisions if d.rule == "unused_option"} == {
        "--cuda-graph-max-bs-prefill",
        "--cuda-graph-bs-decode",
        "cudagraph_capture_sizes",
    }


def test_default_sizes_end_at_the_step_budget_and_the_request_limit():
    plan = resolve(GraphRequest(), caps(chunked_prefill_size=100, max_reqs=13))
    assert (plan.prefill.ladder.largest, plan.decode.ladder.largest) == (100, 13)


@pytest.mark.parametrize(
    ("facts", "prefill_max", "largest"),
    [
        ({"prefill_max_cap": 2048}, None, 2048),
        ({"prefill_max_cap": 2048}, 4096, 4096),
        ({"prefill_max_cap": 8192}, None, 4096),
        ({"max_total_tokens": 1000}, None, 1000),
        ({"max_total_tokens": 1000}, 2000, 1000),
        ({"max_total_tokens": 3000, "prefill_max_cap": 2048}, None, 2048),
    ],
)
def test_caps_bound_the_default_maximum_and_memory_bounds_any(facts, prefill_max, largest):
    capabilities = caps(chunked_prefill_size=4096, **facts)
    assert resolve(GraphRequest(prefill_max=prefill_max), capabilities).prefill.ladder.largest == largest


@pytest.mark.parametrize(
    ("query_len", "total", "largest"), [(1, 9, 9), (3, 30, 10), (3, 32, 10), (3, 2, 1), (1, 99, 16)]
)
def test_decode_sizes_are_whole_requests_inside_the_total(query_len, total, largest):
    capabilities = caps(uniform_query_len=query_len, max_total_tokens=total, chunked_prefill_size=8)
    assert resolve(GraphRequest(), capabilities).decode.ladder.largest == largest


def test_sizes_for_both_phases_count_tokens_and_per_phase_lists_win():
    request = GraphRequest(capture_sizes=(3, 6, 24), decode_sizes=(2,))
    assert sizes(resolve(request, caps(uniform_query_len=3))) == ((3, 6, 24), (2,))
    request = GraphRequest(capture_sizes=(3, 6, 24), prefill_sizes=(8,))
    assert sizes(resolve(request, caps(uniform_query_len=3))) == ((8,), (1, 2, 8))


@pytest.mark.parametrize(
    ("request_", "query_len", "prefill"),
    [
        (GraphRequest(), 1, (2, 4)),
        (GraphRequest(prefill=FULL, decode=FULL), 1, (2, 4)),
        (GraphRequest(), 3, (1, 2, 4)),
        (GraphRequest(mode=GraphMode.FULL), 1, (1, 2, 4)),
        (GraphRequest(mode=GraphMode.PIECEWISE), 1, (1, 2, 4)),
        (GraphRequest(decode=OFF), 1, (1, 2, 4)),
    ],
)
def test_a_prefill_size_that_only_decode_steps_reach_is_dropped_and_reported(request_, query_len, prefill):
    request = dataclasses.replace(request_, capture_sizes=(1, 2, 4))
    plan = resolve(request, caps(uniform_query_len=query_len))
    assert plan.prefill.ladder.sizes == prefill
    assert [lost.size for lost in plan.prefill.ladder.dropped] == ([] if 1 in prefill else [1])


def test_steps_of_one_token_need_no_prefill_graph_at_all():
    plan = resolve(GraphRequest(), caps(chunked_prefill_size=1, max_reqs=1))
    assert sizes(plan) == ((), (1,))
    assert "prefill: breakable, no sizes" in plan.describe()


def test_every_decode_batch_fits_sizes_given_in_tokens_when_speculating():
    plan = resolve(GraphRequest(capture_sizes=(1, 2, 4, 8, 16, 24)), caps(uniform_query_len=3))
    assert all(plan.decode.ladder.fit(count) is not None for count in range(1, 9))


def test_one_set_of_full_graphs_holds_the_largest_decode_batch():
    capabilities = caps(chunked_prefill_size=8, max_reqs=16, uniform_query_len=3)
    plan = resolve(GraphRequest(mode=GraphMode.FULL), capabilities)
    assert plan.prefill.ladder.largest == 48
    assert plan.decode.ladder.sizes == ()


def test_one_set_of_full_graphs_takes_decode_sizes_on_top_when_they_are_named():
    plan = resolve(GraphRequest(mode=GraphMode.FULL, decode_sizes=(1, 2)), caps())
    assert plan.decode.ladder.sizes == (1, 2)


def test_token_sizes_rounded_up_for_decode_are_reported_with_what_was_dropped():
    plan = resolve(GraphRequest(capture_sizes=(4, 6, 99)), caps(uniform_query_len=3))
    assert plan.decode.ladder.sizes == (2,)
    assert [lost.size for lost in plan.decode.ladder.dropped] == [4, 33]
    assert "rounded up to 6 tokens" in plan.decode.ladder.dropped[0].reason


@pytest.mark.parametrize(("query_len", "step"), [(1, 4), (2, 2), (3, 4), (4, 1), (6, 2)])
def test_decode_batches_divide_by_the_token_multiple_with_as_few_requests_as_that_takes(query_len, step):
    plan = resolve(GraphRequest(), caps(token_multiple=4, uniform_query_len=query_len, max_reqs=4 + step))
    assert plan.decode.ladder.largest == 4 + step
    assert plan.decode.ladder.sizes[0] == step


def test_prefill_sizes_divide_by_the_token_multiple_and_so_do_decode_batches():
    plan = resolve(GraphRequest(), caps(token_multiple=4, uniform_query_len=2))
    assert all(size % 4 == 0 for size in plan.prefill.ladder.sizes)
    assert all(size * 2 % 4 == 0 for size in plan.decode.ladder.sizes)


def test_limits_known_later_cut_both_ladders_and_are_decisions():
    plan = resolve(GraphRequest(), caps()).with_limits(max_tokens=40, max_reqs=5, reason="cache")
    assert (plan.prefill.ladder.largest, plan.decode.ladder.largest) == (40, 5)
    assert [(d.rule, d.phase, d.reason) for d in plan.decisions[-2:]] == [
        ("limits", PREFILL, "cache"),
        ("limits", DECODE, "cache"),
    ]
    assert plan.with_limits(max_tokens=40, max_reqs=5, reason="again") == plan


# --- the plan as a whole ---

requests = st.builds(
    GraphRequest,
    mode=st.none() | st.sampled_from(GraphMode),
    prefill=st.none() | st.sampled_from(Strategy),
    decode=st.none() | st.sampled_from(Strategy),
    compile_mode=st.sampled_from([None, 0, 3]),
    use_inductor_graph_partition=st.booleans(),
    splitting_ops=st.sampled_from([None, (), ("op",)]),
    force=st.booleans(),
)
capability_sets = st.builds(
    caps,
    support=st.sampled_from(S),
    preferred=st.none() | st.sampled_from(GraphMode),
    supports_graphs=st.booleans(),
    has_layer_split=st.booleans(),
    available_strategies=st.sampled_from([ALL, ALL - {TC}]),
    uniform_query_len=st.sampled_from([1, 3]),
    is_pooling=st.booleans(),
    uses_cascade=st.booleans(),
    features=st.sets(st.sampled_from(["soft", "hard"])).map(frozenset),
    rules=st.just((SOFT, HARD)),
    whole_graph_passes=st.sampled_from([(), ("pass",)]),
)


@settings(max_examples=50, deadline=None)
@given(request=requests, capabilities=capability_sets)
def test_any_plan_keeps_the_invariants(request, capabilities):
    try:
        plan = resolve(request, capabilities)
    except ConfigError:
        return
    assert plan == resolve(request, capabilities)  # pure
    mode = request.mode or (GraphMode.PIECEWISE if capabilities.is_pooling else GraphMode.FULL_AND_PIECEWISE)
    for phase, flag in ((PREFILL, request.prefill), (DECODE, request.decode)):
        planned = plan.phase(phase)
        assert planned.strategy in capabilities.available_strategies
        was_off = flag is OFF or (
            flag is None and request.mode is not None and ASKED[mode][phase is DECODE] == "off"
        )
        if was_off:
            assert planned.strategy is OFF
        if planned.strategy is BREAKABLE:
            assert capabilities.has_layer_split
        if planned.strategy is FULL:
            assert capabilities.support is not S.NEVER
        assert bool(planned.ladder.sizes) == (planned.strategy is not OFF) or (
            phase is DECODE and plan.is_one_set
        )
        if planned.strategy in PIECES:
            assert "hard" not in capabilities.features or (request.force and planned.strategy is TC)
    assert all(decision.reason for decision in plan.decisions)


@pytest.mark.parametrize("mode", [None, *GraphMode], ids=str)
def test_a_plan_is_plain_json_with_both_phases_and_all_decisions(mode):
    plan = resolve(GraphRequest(mode=mode, capture_sizes=(4, 9999)), caps(S.UNIFORM_BATCH, uses_cascade=True))
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["prefill"]["strategy"] == plan.prefill.strategy.value
    assert tuple(data["decode"]["sizes"]) == plan.decode.ladder.sizes
    assert len(data["decisions"]) == len(plan.decisions)
    assert all(
        d["phase"] in (None, "prefill", "decode") and d["rule"] and d["reason"] for d in data["decisions"]
    )
    if plan.prefill.strategy is not OFF:
        assert [lost["size"] for lost in data["prefill"]["dropped"]] == [9999]


def test_the_description_says_what_runs_and_why():
    request = GraphRequest(mode=GraphMode.FULL, capture_sizes=(4, 999))
    text = "\n".join(resolve(request, caps(S.UNIFORM_BATCH, uniform_query_len=2)).describe())
    assert "graph mode: FULL_AND_PIECEWISE" in text
    assert "prefill: breakable, 1 sizes from 4 to 4 tokens" in text
    assert "decode: full, 1 sizes from 2 to 2 requests of 2 tokens" in text
    assert "size 999: above 256" in text
    assert (
        "prefill: full -> breakable (attention_support: attention backend backend supports UNIFORM_BATCH)"
        in text
    )


def test_request_and_capabilities_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GraphRequest().mode = GraphMode.FULL  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        caps().max_reqs = 3  # type: ignore[misc]


def test_breakable_replays_as_piecewise():
    assert {strategy: strategy.runtime_mode for strategy in Strategy} == {
        OFF: RuntimeMode.NONE,
        TC: RuntimeMode.PIECEWISE,
        BREAKABLE: RuntimeMode.PIECEWISE,
        FULL: RuntimeMode.FULL,
    }

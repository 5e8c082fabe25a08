"""Which graph serves a step: every size from 0 to past the largest, against a brute-force search over all
keys.
"""

from __future__ import annotations

import bisect
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.graphs.batch import BatchDescriptor, BatchShape
from gapless.graphs.dispatcher import Dispatch, Dispatcher, EagerReason
from gapless.graphs.graph_plan import GraphPlan, PhasePlan
from gapless.graphs.ladder import Ladder
from gapless.graphs.modes import AttentionSupport, GraphMode, Phase, RuntimeMode, Strategy
from gapless.graphs.plan import BackendSupport, Capabilities, GraphRequest, resolve

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
OFF, TC, BREAKABLE, FULL = Strategy.DISABLED, Strategy.TC_PIECEWISE, Strategy.BREAKABLE, Strategy.FULL
MAX_REQS = 12


def plan_of(
    request: GraphRequest, *, query_len: int = 1, max_reqs: int = MAX_REQS, chunk: int = 40
) -> GraphPlan:
    capabilities = Capabilities(
        attention=(BackendSupport(name="backend", support=AttentionSupport.ALWAYS),),
        max_reqs=max_reqs,
        chunked_prefill_size=chunk,
        available_strategies=frozenset(Strategy),
        uniform_query_len=query_len,
    )
    return resolve(request, capabilities)


def dispatcher_of(request: GraphRequest, *, with_lora: bool = False, **facts) -> Dispatcher:
    plan = plan_of(request, **facts)
    return Dispatcher.build(plan, max_reqs=facts.get("max_reqs", MAX_REQS), with_lora=with_lora)


def shape(*query_lens: int, **facts) -> BatchShape:
    return BatchShape(query_lens=query_lens, **facts)


def uniform(num_reqs: int, query_len: int = 1, **facts) -> BatchShape:
    return shape(*(query_len,) * num_reqs, **facts)


REQUESTS = {
    "none": GraphRequest(mode=GraphMode.NONE),
    "piecewise": GraphRequest(mode=GraphMode.PIECEWISE),
    "full": GraphRequest(mode=GraphMode.FULL),
    "full_decode_only": GraphRequest(mode=GraphMode.FULL_DECODE_ONLY),
    "full_and_piecewise": GraphRequest(mode=GraphMode.FULL_AND_PIECEWISE),
    "full_apart": GraphRequest(prefill=FULL, decode=FULL),
    "traced": GraphRequest(prefill=TC, decode=TC),
    "two_piecewise": GraphRequest(prefill=BREAKABLE, decode=TC),
    "full_prefill_only": GraphRequest(prefill=FULL, decode=OFF),
    "full_prefill_piecewise_decode": GraphRequest(prefill=FULL, decode=BREAKABLE),
    "decode_piecewise_only": GraphRequest(prefill=OFF, decode=BREAKABLE),
    "listed": GraphRequest(prefill_sizes=(8, 32), decode_sizes=(2, 6)),
    "few_decode": GraphRequest(decode_max=4),
}


def brute_force(dispatcher: Dispatcher, plan: GraphPlan, batch: BatchShape) -> tuple[RuntimeMode, int | None]:
    """The mode and padded tokens the documented order gives, by looking at every key there is."""
    query_len = plan.uniform_query_len
    is_decode = bool(batch.query_lens) and set(batch.query_lens) == {query_len}
    phase = DECODE if is_decode else PREFILL
    if batch.num_tokens == 0 or plan.phase(phase).strategy is OFF:
        return RuntimeMode.NONE, None
    fitting: list[tuple[int, bool, int]] = []
    for owner in (PREFILL, DECODE):
        mode = plan.phase(owner).strategy.runtime_mode
        for key in dispatcher.capture_descriptors(owner):
            fits = key.num_tokens >= batch.num_tokens and key.num_reqs >= batch.num_reqs
            serves = (is_decode or not key.uniform) and mode <= plan.phase(phase).strategy.runtime_mode
            if fits and serves and not (batch.uses_cascade and mode is RuntimeMode.FULL):
                padding = key.num_tokens - batch.num_tokens
                if is_decode or padding <= 64 or key.num_tokens <= 2 * batch.num_tokens:
                    fitting.append((-mode, owner is not phase, key.num_tokens))
    if not fitting:
        return RuntimeMode.NONE, None
    mode, _, num_tokens = min(fitting)
    return RuntimeMode(-mode), num_tokens


def check(dispatcher: Dispatcher, plan: GraphPlan, batch: BatchShape) -> Dispatch:
    found = dispatcher.dispatch(batch)
    num_tokens = found.descriptor.num_tokens if found.descriptor else None
    assert (found.mode, num_tokens) == brute_force(dispatcher, plan, batch), batch
    if found.descriptor is None:
        assert found.mode is RuntimeMode.NONE
        assert found.owner is None
        assert found.reason is not None
    else:
        assert found.reason is None
        assert found.owner is not None
        assert found.descriptor in dispatcher.capture_descriptors(found.owner)
        assert found.mode is plan.phase(found.owner).strategy.runtime_mode
        assert found.descriptor.num_tokens >= batch.num_tokens
        assert found.descriptor.num_reqs >= batch.num_reqs
    return found


@pytest.mark.parametrize("uses_cascade", [False, True], ids=["plain", "cascade"])
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("name", REQUESTS)
def test_every_size_gets_the_graph_a_full_search_finds(name, query_len, uses_cascade):
    plan = plan_of(REQUESTS[name], query_len=query_len)
    dispatcher = Dispatcher.build(plan, max_reqs=MAX_REQS)
    for num_reqs in range(MAX_REQS + 1):
        check(dispatcher, plan, uniform(num_reqs, query_len, uses_cascade=uses_cascade))
        for num_tokens in range(num_reqs, 45):  # past the largest size of every ladder
            lens = (1,) * (num_reqs - 1) + (num_tokens - num_reqs + 1,) if num_reqs else ()
            check(dispatcher, plan, shape(*lens, uses_cascade=uses_cascade))


@pytest.mark.parametrize("has_lora", [False, True])
@pytest.mark.parametrize("name", ["full_apart", "full_and_piecewise"])
def test_every_size_of_the_default_ladders_gets_the_next_one(name, has_lora):
    """All of 4,096 tokens and 256 requests, and some past them."""
    plan = plan_of(REQUESTS[name], max_reqs=256, chunk=4096)
    dispatcher = Dispatcher.build(plan, max_reqs=256, with_lora=True)
    for owner, most, make in (
        (PREFILL, 4200, lambda n: shape(n - 1, 1, has_lora=has_lora)),
        (DECODE, 300, lambda n: uniform(n, has_lora=has_lora)),
    ):
        keys = [key for key in dispatcher.capture_descriptors(owner) if key.has_lora == has_lora]
        sizes = sorted(key.num_tokens for key in keys)
        assert sizes[-1] == (4096 if owner is PREFILL else 256)
        for n in range(3, most):
            found = dispatcher.dispatch(make(n))
            place = bisect.bisect_left(sizes, n)
            if place == len(sizes):
                assert (found.descriptor, found.mode) == (None, RuntimeMode.NONE), n
            else:
                assert found.descriptor is not None, n
                assert (found.descriptor.num_tokens, found.owner) == (sizes[place], owner)
                assert found.descriptor.has_lora == has_lora


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("name", REQUESTS)
def test_every_captured_graph_is_found_again_at_its_exact_size(name, query_len):
    dispatcher = dispatcher_of(REQUESTS[name], query_len=query_len)
    for owner in (PREFILL, DECODE):
        for key in dispatcher.capture_descriptors(owner):
            if key.uniform:
                batch = uniform(key.num_reqs, query_len)
            elif owner is PREFILL and key.num_tokens != query_len:
                batch = shape(key.num_tokens)
            else:
                batch = uniform(key.num_tokens // query_len, query_len)
                if key.num_tokens % query_len or batch.num_reqs > MAX_REQS:
                    continue
            found = dispatcher.dispatch(batch)
            if owner is PREFILL and dispatcher.capture_descriptors(DECODE) and found.phase is DECODE:
                continue  # one request of one token is a decode step: decode's own graph serves it
            assert (found.descriptor, found.owner) == (key, owner)


@pytest.mark.parametrize("name", REQUESTS)
def test_captures_come_largest_first_and_once(name):
    dispatcher = dispatcher_of(REQUESTS[name])
    for owner in (PREFILL, DECODE):
        tokens = [key.num_tokens for key in dispatcher.capture_descriptors(owner)]
        assert tokens == sorted(set(tokens), reverse=True)


# --- keys ---


@pytest.mark.parametrize("query_len", [1, 2, 3, 5])
def test_full_decode_keys_are_whole_uniform_requests(query_len):
    keys = dispatcher_of(GraphRequest(), query_len=query_len).capture_descriptors(DECODE)
    assert [(key.num_tokens, key.num_reqs, key.uniform) for key in keys] == [
        (n * query_len, n, True) for n in (12, 8, 4, 2, 1)
    ]


@pytest.mark.parametrize("prefill", [BREAKABLE, TC, FULL])
def test_prefill_keys_hold_as_many_requests_as_tokens_up_to_the_limit(prefill):
    keys = dispatcher_of(GraphRequest(prefill=prefill, decode=OFF)).capture_descriptors(PREFILL)
    assert [key.num_tokens for key in keys] == [40, 32, 28, 24, 20, 16, 12, 8, 4]
    assert all(key.num_reqs == min(key.num_tokens, MAX_REQS) and not key.uniform for key in keys)


@pytest.mark.parametrize("num_reqs", range(1, MAX_REQS + 1))
def test_one_token_graph_serves_any_number_of_requests(num_reqs):
    dispatcher = dispatcher_of(GraphRequest(decode=OFF, prefill_sizes=(32,)))
    lens = (32 - 3 * num_reqs + 2,) + (2,) * (num_reqs - 1)
    assert dispatcher.dispatch(shape(*lens)).descriptor == BatchDescriptor(32, MAX_REQS)


@pytest.mark.parametrize(
    ("request_", "prefill_extra"),
    [
        (GraphRequest(mode=GraphMode.PIECEWISE), (1, 2)),
        (GraphRequest(mode=GraphMode.FULL), ()),
        (GraphRequest(mode=GraphMode.FULL, decode_sizes=(1, 3)), (1, 3)),
        (GraphRequest(mode=GraphMode.PIECEWISE, capture_sizes=(4, 8, 12, 16, 20, 24, 28, 32, 40)), ()),
    ],
)
def test_phases_of_one_kind_share_one_set_owned_by_prefill(request_, prefill_extra):
    dispatcher = dispatcher_of(request_)
    assert dispatcher.capture_descriptors(DECODE) == ()
    tokens = {key.num_tokens for key in dispatcher.capture_descriptors(PREFILL)}
    assert tokens == {4, 8, 12, 16, 20, 24, 28, 32, 40, *prefill_extra}
    assert dispatcher.dispatch(uniform(3)).owner is PREFILL
    assert dispatcher.dispatch(uniform(3)).phase is DECODE


def test_a_list_for_both_phases_is_the_whole_piecewise_set_when_speculating_too():
    dispatcher = dispatcher_of(GraphRequest(mode=GraphMode.PIECEWISE, capture_sizes=(4, 8, 40)), query_len=3)
    assert [key.num_tokens for key in dispatcher.capture_descriptors(PREFILL)] == [40, 8, 4]
    assert dispatcher.dispatch(uniform(3, 3)).descriptor == BatchDescriptor(40, MAX_REQS)


def test_two_piecewise_strategies_keep_two_sets():
    dispatcher = dispatcher_of(REQUESTS["two_piecewise"])
    assert dispatcher.dispatch(uniform(3)).owner is DECODE
    assert dispatcher.dispatch(shape(3, 5)).owner is PREFILL
    assert dispatcher.strategy(DECODE) is TC


# --- order ---


@pytest.mark.parametrize("num_reqs", range(1, 9))
def test_a_larger_full_graph_beats_a_closer_piecewise_one(num_reqs):
    request = GraphRequest(capture_sizes=(1, 2, 4, 8, 16, 24))
    dispatcher = dispatcher_of(request, query_len=3, max_reqs=8)
    found = dispatcher.dispatch(uniform(num_reqs, 3))
    assert found.mode is RuntimeMode.FULL
    assert found.descriptor is not None
    assert found.descriptor.uniform


@pytest.mark.parametrize("lens", [(3, 3, 2), (2, 4), (2, 6), (3,) * 4 + (1,)])
def test_equal_totals_of_unequal_requests_are_no_decode_step(lens):
    found = dispatcher_of(GraphRequest(), query_len=3).dispatch(shape(*lens))
    assert found.phase is PREFILL
    assert found.mode is RuntimeMode.PIECEWISE


def test_decode_that_was_asked_piecewise_never_runs_in_the_full_graphs_of_prefill():
    found = dispatcher_of(REQUESTS["full_prefill_piecewise_decode"]).dispatch(uniform(3))
    assert (found.mode, found.owner) == (RuntimeMode.PIECEWISE, DECODE)


def test_decode_past_its_own_sizes_uses_the_token_graphs_of_prefill():
    dispatcher = dispatcher_of(REQUESTS["few_decode"])
    found = dispatcher.dispatch(uniform(5))
    assert (found.mode, found.phase, found.owner) == (RuntimeMode.PIECEWISE, DECODE, PREFILL)
    assert found.descriptor == BatchDescriptor(8, 8)


def test_prefill_never_uses_uniform_graphs():
    dispatcher = dispatcher_of(GraphRequest(prefill=FULL, decode=FULL, prefill_sizes=(4,)))
    assert dispatcher.dispatch(shape(5, 3)).reason is EagerReason.LARGER_THAN_LARGEST


# --- cascade ---


@pytest.mark.parametrize(
    ("name", "decode", "prefill"),
    [
        ("none", EagerReason.MODE_NONE, EagerReason.MODE_NONE),
        ("piecewise", RuntimeMode.PIECEWISE, RuntimeMode.PIECEWISE),
        ("full", EagerReason.CASCADE, EagerReason.CASCADE),
        ("full_decode_only", EagerReason.CASCADE, EagerReason.PHASE_DISABLED),
        ("full_and_piecewise", RuntimeMode.PIECEWISE, RuntimeMode.PIECEWISE),
        ("full_apart", EagerReason.CASCADE, EagerReason.CASCADE),
        ("full_prefill_piecewise_decode", RuntimeMode.PIECEWISE, RuntimeMode.PIECEWISE),
    ],
)
def test_cascade_only_lowers_the_mode(name, decode, prefill):
    dispatcher = dispatcher_of(REQUESTS[name])
    for batch, expected in ((uniform(3), decode), (shape(2, 3), prefill)):
        plain = dispatcher.dispatch(batch)
        found = dispatcher.dispatch(BatchShape(query_lens=batch.query_lens, uses_cascade=True))
        assert found.mode <= plain.mode
        assert (found.reason if isinstance(expected, EagerReason) else found.mode) is expected


# --- reasons ---


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("lens", [(), (0,), (0, 0)])
def test_a_step_without_tokens_is_empty_in_every_mode(name, lens):
    found = dispatcher_of(REQUESTS[name]).dispatch(shape(*lens))
    assert (found.mode, found.reason) == (RuntimeMode.NONE, EagerReason.EMPTY)


@pytest.mark.parametrize(
    ("name", "batch", "reason"),
    [
        ("none", uniform(2), EagerReason.MODE_NONE),
        ("none", shape(5), EagerReason.MODE_NONE),
        ("full_decode_only", shape(5), EagerReason.PHASE_DISABLED),
        ("full_prefill_only", uniform(2), EagerReason.PHASE_DISABLED),
        ("decode_piecewise_only", shape(5), EagerReason.PHASE_DISABLED),
        ("full", shape(41), EagerReason.LARGER_THAN_LARGEST),
        ("piecewise", shape(20, 21), EagerReason.LARGER_THAN_LARGEST),
        ("full_and_piecewise", uniform(13), EagerReason.TOO_MANY_REQUESTS),
        ("full_and_piecewise", shape(*(1,) * 12, 2), EagerReason.TOO_MANY_REQUESTS),
        ("full_and_piecewise", shape(5, has_lora=True), EagerReason.LORA),
        ("full_and_piecewise", uniform(5, has_lora=True), EagerReason.LORA),
    ],
)
def test_an_eager_step_says_why(name, batch, reason):
    found = dispatcher_of(REQUESTS[name]).dispatch(batch)
    assert (found.mode, found.reason, found.descriptor) == (RuntimeMode.NONE, reason, None)


def test_decode_past_every_size_is_larger_than_largest():
    dispatcher = dispatcher_of(GraphRequest(mode=GraphMode.FULL_DECODE_ONLY, decode_max=4))
    assert dispatcher.dispatch(uniform(5)).reason is EagerReason.LARGER_THAN_LARGEST


def test_the_reason_is_that_of_the_graphs_the_phase_was_planned_with():
    dispatcher = dispatcher_of(REQUESTS["few_decode"])
    for key in dispatcher.capture_descriptors(PREFILL):
        dispatcher.drop(key, phase=PREFILL)
    assert dispatcher.dispatch(uniform(5)).reason is EagerReason.LARGER_THAN_LARGEST
    assert dispatcher.dispatch(shape(5)).reason is EagerReason.CAPTURE_FAILED


def test_requests_without_tokens_take_room_for_requests():
    dispatcher = dispatcher_of(GraphRequest(decode=OFF, prefill_sizes=(4, 8)))
    assert dispatcher.dispatch(shape(2, 0, 0, 0, 0)).descriptor == BatchDescriptor(8, 8)


# --- padding ---


@pytest.mark.parametrize("owner_mode", ["full_apart", "full_and_piecewise", "full", "piecewise"])
@pytest.mark.parametrize(
    ("num_tokens", "is_graph"),
    [(20, False), (35, False), (36, True), (50, True), (99, True), (100, True)],
)
def test_a_prefill_size_far_above_the_batch_runs_eagerly(num_tokens, is_graph, owner_mode):
    base = REQUESTS[owner_mode]
    request = GraphRequest(mode=base.mode, prefill=base.prefill, decode=base.decode, prefill_sizes=(100,))
    dispatcher = dispatcher_of(request, chunk=100)
    found = dispatcher.dispatch(shape(num_tokens))
    assert (found.mode is not RuntimeMode.NONE) == is_graph
    assert found.reason is (None if is_graph else EagerReason.PADDING_TOO_LARGE)


@pytest.mark.parametrize(("num_tokens", "size"), [(65, 130), (64, 128), (70, 140), (10, 74)])
def test_twice_the_tokens_or_sixty_four_more_is_still_a_graph(num_tokens, size):
    dispatcher = dispatcher_of(GraphRequest(prefill_sizes=(size,)), chunk=size)
    assert dispatcher.dispatch(shape(num_tokens)).mode is RuntimeMode.PIECEWISE
    assert dispatcher.dispatch(shape(min(num_tokens, size - 65) - 1)).reason is (
        EagerReason.PADDING_TOO_LARGE if size - 64 > num_tokens - 1 and 2 * (num_tokens - 1) < size else None
    )


def test_the_padding_rule_never_touches_decode():
    dispatcher = dispatcher_of(GraphRequest(mode=GraphMode.FULL, prefill_sizes=(100,)), chunk=100)
    assert dispatcher.dispatch(uniform(1)).descriptor == BatchDescriptor(100, MAX_REQS)
    dispatcher = dispatcher_of(GraphRequest(decode_sizes=(400,)), max_reqs=400)
    assert dispatcher.dispatch(uniform(1)).descriptor == BatchDescriptor(400, 400, uniform=True)


@pytest.mark.parametrize("up_to", [64, 65, 80, 97])
def test_padding_measured_to_pay_is_allowed_up_to_that_much(up_to):
    dispatcher = dispatcher_of(GraphRequest(prefill_sizes=(100,)), chunk=100)
    [key] = dispatcher.capture_descriptors(PREFILL)
    dispatcher.allow_padding(key, up_to=up_to)
    for num_tokens in range(2, 36):
        is_graph = 100 - num_tokens <= max(up_to, 64)
        assert (dispatcher.dispatch(shape(num_tokens)).mode is RuntimeMode.PIECEWISE) == is_graph


def test_padding_can_be_allowed_only_for_a_graph_that_exists():
    dispatcher = dispatcher_of(GraphRequest())
    with pytest.raises(KeyError, match="not a graph of prefill"):
        dispatcher.allow_padding(BatchDescriptor(7, 7), up_to=90)


# --- failed captures ---


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("name", [name for name in REQUESTS if name != "none"])
def test_after_any_failed_capture_every_size_still_gets_the_best_that_is_left(name, query_len):
    plan = plan_of(REQUESTS[name], query_len=query_len)
    for owner in (PREFILL, DECODE):
        for key in Dispatcher.build(plan, max_reqs=MAX_REQS).capture_descriptors(owner):
            dispatcher = Dispatcher.build(plan, max_reqs=MAX_REQS)
            dispatcher.drop(key, phase=owner)
            assert key not in dispatcher.capture_descriptors(owner)
            for num_reqs in range(1, MAX_REQS + 1):
                check(dispatcher, plan, uniform(num_reqs, query_len))
            for num_tokens in range(1, 42, 3):
                check(dispatcher, plan, shape(num_tokens, 2))


def test_a_size_with_no_larger_graph_left_is_eager_because_its_capture_failed():
    dispatcher = dispatcher_of(GraphRequest(mode=GraphMode.FULL_DECODE_ONLY))
    largest, second, *_ = dispatcher.capture_descriptors(DECODE)
    dispatcher.drop(largest, phase=DECODE)
    assert dispatcher.dispatch(uniform(9)).reason is EagerReason.CAPTURE_FAILED
    assert dispatcher.dispatch(uniform(8)).descriptor == second
    assert dispatcher.dispatch(uniform(12)).reason is EagerReason.CAPTURE_FAILED


def test_a_failed_capture_is_the_reason_when_the_next_size_is_too_large():
    dispatcher = dispatcher_of(GraphRequest(prefill_sizes=(8, 400)), chunk=400)
    dispatcher.drop(BatchDescriptor(8, 8), phase=PREFILL)
    assert dispatcher.dispatch(shape(5)).reason is EagerReason.CAPTURE_FAILED
    assert dispatcher.dispatch(shape(20)).reason is EagerReason.PADDING_TOO_LARGE


def test_decode_falls_back_to_piecewise_when_its_full_captures_failed():
    dispatcher = dispatcher_of(GraphRequest())
    for key in dispatcher.capture_descriptors(DECODE):
        dispatcher.drop(key, phase=DECODE)
    found = dispatcher.dispatch(uniform(5))
    assert (found.mode, found.descriptor) == (RuntimeMode.PIECEWISE, BatchDescriptor(8, 8))


def test_dropping_a_graph_of_another_phase_or_twice_is_a_programming_error():
    dispatcher = dispatcher_of(GraphRequest())
    key = dispatcher.capture_descriptors(DECODE)[0]
    with pytest.raises(KeyError):
        dispatcher.drop(key, phase=PREFILL)
    dispatcher.drop(key, phase=DECODE)
    with pytest.raises(KeyError):
        dispatcher.drop(key, phase=DECODE)


def test_the_last_answer_is_for_the_same_question_only():
    dispatcher = dispatcher_of(GraphRequest())
    lens = (1, 1, 1)
    plain = dispatcher.dispatch(BatchShape(query_lens=lens))
    assert dispatcher.dispatch(BatchShape(query_lens=lens)) is plain
    assert plain.mode is RuntimeMode.FULL
    assert dispatcher.dispatch(BatchShape(query_lens=lens, uses_cascade=True)).mode is not RuntimeMode.FULL
    assert dispatcher.dispatch(BatchShape(query_lens=lens, has_lora=True)).reason is EagerReason.LORA
    assert dispatcher.dispatch(BatchShape(query_lens=lens)) is plain
    assert plain.descriptor is not None
    dispatcher.drop(plain.descriptor, phase=DECODE)
    assert dispatcher.dispatch(BatchShape(query_lens=lens)).descriptor != plain.descriptor


def test_lengths_that_change_in_place_are_looked_at_again():
    dispatcher, lens = dispatcher_of(GraphRequest()), [1, 1, 1]
    shape = BatchShape(query_lens=lens)
    assert dispatcher.dispatch(shape).phase is DECODE
    lens[0] = 5
    assert dispatcher.dispatch(shape).phase is PREFILL


def test_two_dispatchers_of_one_plan_do_not_share_failures():
    plan = plan_of(GraphRequest())
    first, second = (Dispatcher.build(plan, max_reqs=MAX_REQS) for _ in range(2))
    key = first.capture_descriptors(DECODE)[0]
    first.drop(key, phase=DECODE)
    assert key in second.capture_descriptors(DECODE)


# --- adapters ---


@pytest.mark.parametrize("name", [name for name in REQUESTS if name != "none"])
def test_with_adapters_every_size_exists_twice_and_batches_keep_to_their_kind(name):
    plain, both = dispatcher_of(REQUESTS[name]), dispatcher_of(REQUESTS[name], with_lora=True)
    for owner in (PREFILL, DECODE):
        keys = both.capture_descriptors(owner)
        assert len(keys) == 2 * len(plain.capture_descriptors(owner))
        assert {key._replace(has_lora=False) for key in keys} == set(plain.capture_descriptors(owner))
    for lens, has_lora in itertools.product([(1, 1, 1), (2, 5)], [False, True]):
        found = both.dispatch(shape(*lens, has_lora=has_lora)).descriptor
        assert found is None or found.has_lora == has_lora


def test_a_failed_capture_with_adapters_leaves_the_plain_size():
    dispatcher = dispatcher_of(GraphRequest(mode=GraphMode.FULL_DECODE_ONLY), with_lora=True)
    dispatcher.drop(BatchDescriptor(12, 12, uniform=True, has_lora=True), phase=DECODE)
    assert dispatcher.dispatch(uniform(12, has_lora=True)).reason is EagerReason.CAPTURE_FAILED
    assert dispatcher.dispatch(uniform(12)).mode is RuntimeMode.FULL


# --- random plans ---

ladders = st.lists(st.integers(1, 40), min_size=1, max_size=6).map(
    lambda s: Ladder(sizes=tuple(sorted(set(s))))
)
request_ladders = st.lists(st.integers(1, MAX_REQS), min_size=1, max_size=4).map(
    lambda s: Ladder(sizes=tuple(sorted(set(s))))
)
plans = st.builds(
    lambda prefill, decode, tokens, reqs, query_len: GraphPlan(
        prefill=PhasePlan(strategy=prefill, ladder=tokens if prefill is not OFF else Ladder()),
        decode=PhasePlan(strategy=decode, ladder=reqs if decode is not OFF else Ladder()),
        mode=None,
        uniform_query_len=query_len,
    ),
    st.sampled_from(Strategy),
    st.sampled_from(Strategy),
    ladders,
    request_ladders,
    st.integers(1, 4),
)
batches = st.builds(
    BatchShape,
    query_lens=st.lists(st.integers(0, 20), max_size=MAX_REQS).map(tuple)
    | st.builds(lambda n, q: (q,) * n, st.integers(1, MAX_REQS), st.integers(1, 4)),
    uses_cascade=st.booleans(),
)


@settings(max_examples=50, deadline=None)
@given(plan=plans, some=st.lists(batches, min_size=5, max_size=20), data=st.data())
def test_any_plan_and_any_batch_agree_with_the_full_search(plan, some, data):
    dispatcher = Dispatcher.build(plan, max_reqs=MAX_REQS)
    for owner in (PREFILL, DECODE):
        for key in dispatcher.capture_descriptors(owner):
            if data.draw(st.integers(0, 4)) == 0:
                dispatcher.drop(key, phase=owner)
    for batch in some:
        check(dispatcher, plan, batch)

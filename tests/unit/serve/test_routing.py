"""Where requests go: pure decisions over loads and prefixes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.cache.prefix import extend_hashes
from gapless.serve import routing
from gapless.serve.routing import SLACK_TOKENS, Router, expected_tokens, name_prefix

BLOCK = 4
SYSTEM = list(range(100, 120))


def names(*token_ids: int, extra: bytes = b"") -> list[bytes]:
    return name_prefix(token_ids, block_size=BLOCK, extra=extra)


def test_a_prompt_goes_where_its_beginning_lies():
    router = Router()
    router.sent(2, names(*SYSTEM, 1, 2, 3))
    choice = router.choose({0: 0, 1: 0, 2: 100}, names(*SYSTEM, 7, 8, 9))
    assert (choice.replica, choice.reason, choice.num_blocks) == (2, "prefix", 5)


def test_the_deepest_holder_wins_over_one_with_less_to_do():
    router = Router()
    conversation = list(range(40))
    router.sent(0, names(*conversation[:9]))
    router.sent(1, names(*conversation[:33]))
    assert router.choose({0: 0, 1: 500}, names(*conversation)).replica == 1


def test_a_holder_with_too_much_to_do_is_passed_over():
    router = Router()
    router.sent(0, names(*SYSTEM))
    loads = {0: SLACK_TOKENS, 1: 0}
    assert router.choose(loads, names(*SYSTEM)).replica == 0
    loads[0] += 1
    assert (router.choose(loads, names(*SYSTEM)).replica, router.choose(loads, names(*SYSTEM)).reason) == (
        1,
        "load",
    )


def test_the_next_best_holder_is_asked_before_one_that_holds_nothing():
    router = Router()
    router.sent(0, names(*SYSTEM))
    router.sent(1, names(*SYSTEM[:8]))
    choice = router.choose({0: 10 * SLACK_TOKENS, 1: 5, 2: 0}, names(*SYSTEM))
    assert (choice.replica, choice.num_blocks) == (1, 1)


@pytest.mark.parametrize("prefix", [[], names(1, 2, 3), names(*range(30))], ids=["none", "short", "unknown"])
def test_without_a_known_prefix_the_least_loaded_is_chosen(prefix):
    assert Router().choose({0: 30, 1: 20, 2: 25}, prefix).replica == 1


def test_idle_replicas_take_turns():
    router, turns = Router(), []
    for _ in range(9):
        replica = router.choose({0: 0, 1: 0, 2: 0}).replica
        router.sent(replica)
        turns.append(replica)
    assert turns == [0, 1, 2] * 3


def test_by_load_prefixes_are_neither_kept_nor_followed():
    router = Router("load")
    router.sent(0, names(*SYSTEM))
    assert router.num_remembered == 0
    assert router.choose({0: 1, 1: 0}, names(*SYSTEM)).replica == 1


def test_a_dead_replica_is_forgotten_and_others_are_not():
    router = Router()
    router.sent(0, names(*SYSTEM))
    router.sent(1, names(*SYSTEM[:8]))
    router.forget(0)
    choice = router.choose({0: 0, 1: 9}, names(*SYSTEM))
    assert (choice.replica, choice.num_blocks, router.num_remembered) == (1, 1, 1)


def test_a_replica_that_may_not_be_chosen_is_not():
    router = Router()
    router.sent(0, names(*SYSTEM))
    assert router.choose({1: 5, 2: 4}, names(*SYSTEM)).replica == 2


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first(monkeypatch):
    monkeypatch.setattr(routing, "MAX_REMEMBERED", 6)
    router = Router()
    first, second = names(*range(17)), names(*range(50, 67))
    router.sent(0, first)
    router.sent(1, second)
    assert router.num_remembered == 6
    assert router.choose({0: 0, 1: 0}, second).num_blocks == 4
    assert router.choose({0: 0, 1: 0}, first[:2]).reason == "load"


def test_names_are_those_of_the_engines_cache_without_the_last_token():
    tokens = list(range(17))
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, num_blocks=4, block_size=BLOCK, extra=b"salt")
    assert name_prefix(tokens, block_size=BLOCK, extra=b"salt") == hashes
    assert name_prefix(tokens[:16], block_size=BLOCK, extra=b"salt") == hashes[:3]
    assert not set(hashes) & set(names(*tokens))


def test_a_long_prompt_is_named_as_far_as_it_pays(monkeypatch):
    monkeypatch.setattr(routing, "MAX_PREFIX_BLOCKS", 3)
    assert len(names(*range(1000))) == 3
    assert names() == names(1) == []


@pytest.mark.parametrize(
    ("n", "max_tokens", "expected"), [(1, 16, 16), (3, 16, 48), (1, None, 256), (2, 100_000, 512), (1, 0, 0)]
)
def test_expected_output_is_bounded(n, max_tokens, expected):
    assert expected_tokens(n, max_tokens) == expected


requests = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 40), st.integers(1, 9000), st.booleans()), max_size=40
)


@settings(max_examples=50, deadline=None)
@given(num_replicas=st.integers(1, 5), asked=requests, slack=st.integers(0, 5000))
def test_nobody_is_chosen_who_has_more_than_the_slack_beyond_the_least(num_replicas, asked, slack):
    """Whatever the prompts; and a choice claims no more blocks than the replica was ever sent."""
    router = Router(slack_tokens=slack)
    loads = dict.fromkeys(range(num_replicas), 0)
    sent: dict[int, set[bytes]] = {replica: set() for replica in loads}
    for family, length, weight, ends in asked:
        prefix = names(*(family * 1000 + i for i in range(length)))
        choice = router.choose(loads, prefix)
        assert loads[choice.replica] <= min(loads.values()) + slack
        assert set(prefix[: choice.num_blocks]) <= sent[choice.replica]
        assert (choice.num_blocks > 0) == (choice.reason == "prefix")
        router.sent(choice.replica, prefix)
        sent[choice.replica] |= set(prefix)
        loads[choice.replica] += weight
        if ends:
            busiest = max(loads, key=loads.__getitem__)
            loads[busiest] = 0


@settings(max_examples=50, deadline=None)
@given(asked=requests, dead=st.integers(0, 2))
def test_after_forget_a_replica_is_chosen_for_its_load_only(asked, dead):
    router = Router()
    prefixes = [names(*(family * 1000 + i for i in range(length))) for family, length, *_ in asked]
    for index, prefix in enumerate(prefixes):
        router.sent(index % 3, prefix)
    router.forget(dead)
    for prefix in prefixes:
        choice = router.choose({0: 0, 1: 0, 2: 0}, prefix)
        assert choice.replica != dead or choice.reason == "load"

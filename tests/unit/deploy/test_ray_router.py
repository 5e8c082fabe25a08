"""The router that Ray Serve loads, over replicas that are not there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("ray.serve.request_router", reason="needs ray[serve] with the request router API")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve.request_router import PendingRequest

from gapless.deploy.ray_router import PrefixAwareRouter
from gapless.serve.messages import EmbedRequest, GenerateRequest

DEPLOYMENT = DeploymentID(name="engine", app_name="gapless")


@dataclass(frozen=True)
class FakeReplica:
    replica_id: ReplicaID


def replica(name: str) -> Any:
    return FakeReplica(ReplicaID(name, deployment_id=DEPLOYMENT))


A, B, C = replica("a"), replica("b"), replica("c")


@pytest.fixture
def router() -> PrefixAwareRouter:
    async def make() -> PrefixAwareRouter:
        made = PrefixAwareRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
        made.initialize_state(block_size=16, slack_requests=2)
        return made

    return asyncio.run(make())


def asked(first: int, *, kind: Any = GenerateRequest, salt: bytes = b"") -> PendingRequest:
    async def make() -> PendingRequest:
        tokens = [first, *range(40)]
        request = kind(request_id="r", prompt_token_ids=tokens, cache_extra=salt)
        return PendingRequest(args=[request], kwargs={}, metadata=None)  # type: ignore[arg-type]

    return asyncio.run(make())


def choose(router: PrefixAwareRouter, pending: PendingRequest | None, *among: Any) -> list[Any]:
    first, rest = asyncio.run(router.choose_replicas(list(among or (A, B, C)), pending))
    assert len(first) == 1
    return [*first, *rest]


def busy(router: PrefixAwareRouter, which: Any, num_requests: int) -> None:
    router.replica_queue_len_cache.update(which.replica_id, num_requests)


@pytest.mark.parametrize("kind", [GenerateRequest, EmbedRequest])
def test_a_prompt_follows_its_prefix(router, kind):
    router.on_request_routed(asked(7, kind=kind), B.replica_id, None)
    assert choose(router, asked(7, kind=kind))[0] == B
    assert {choose(router, asked(8))[0], choose(router, asked(7, salt=b"x"))[0]} == {A, C}


def test_a_busy_holder_is_passed_over_and_the_rest_come_by_load(router):
    router.on_request_routed(asked(7), B.replica_id, None)
    busy(router, A, 5)
    busy(router, B, 7)
    busy(router, C, 6)
    assert choose(router, asked(7)) == [B, A, C]
    busy(router, B, 8)
    assert choose(router, asked(7)) == [A, C, B]


def test_all_candidates_are_named_each_once(router):
    for pending in (None, asked(1)):
        assert sorted(r.replica_id.unique_id for r in choose(router, pending)) == ["a", "b", "c"]
    assert asyncio.run(router.choose_replicas([], asked(1))) == []


def test_a_dead_replica_is_forgotten(router):
    router.on_request_routed(asked(7), B.replica_id, None)
    router.on_replica_actor_died(B.replica_id)
    router.on_request_routed(asked(9), A.replica_id, None)
    assert choose(router, asked(7), B, C)[0] in (B, C)
    assert router._choices.num_remembered == 2


def test_prompts_are_named_once_however_often_ray_asks(router):
    pending = asked(3)
    choose(router, pending)
    names = router._chosen[id(pending)].prefix
    choose(router, pending)
    assert router._chosen[id(pending)].prefix is names
    router.on_request_routed(pending, A.replica_id, None)
    assert not router._chosen


def test_a_burst_is_spread_before_ray_has_counted_any_of_it(router):
    burst = [asked(100 + number) for number in range(9)]
    firsts = [choose(router, pending)[0] for pending in burst]
    assert {each.replica_id.unique_id: firsts.count(each) for each in (A, B, C)} == {"a": 3, "b": 3, "c": 3}
    assert choose(router, burst[0])[0] in (A, B, C)
    assert len(router._chosen) == 9


def test_a_request_counts_once_between_its_sending_and_the_replicas_answer(router):
    """Ray says where a request went only when the replica has taken it; a burst goes on meanwhile."""
    burst = [asked(100 + number) for number in range(6)]
    for pending in burst[:3]:
        assert choose(router, pending, A, B)[0] == A
        pending.future.set_result(A)
        router.on_send_request(A.replica_id)
        busy(router, B, router._sent[A.replica_id])  # as busy as A, so that the next goes to A again
    for pending in burst[3:]:
        choose(router, pending, A, B)
        pending.future.set_result(B)  # for whomever it was chosen: A had no room
        router.on_send_request(B.replica_id)
    busy(router, C, 4)
    assert choose(router, None) == [A, C, B], "3, 4 and 6"


def test_what_was_sent_from_here_and_is_not_over_counts_whatever_ray_knows(router):
    for _ in range(3):
        router.on_send_request(A.replica_id)
    busy(router, A, 0)
    busy(router, B, 1)
    assert choose(router, None) == [C, B, A]
    for _ in range(5):  # more than were sent: some requests were sent before this router was
        router.on_request_completed(A.replica_id, "r")
    busy(router, C, 2)
    assert choose(router, None)[0] == A
    assert not +router._sent


def test_requests_get_the_replica_that_was_chosen_for_them():
    """A mixin of Ray's would hand replicas out in order of arrival."""
    assert "FIFOMixin" not in {base.__name__ for base in PrefixAwareRouter.__mro__}


def test_calls_that_carry_no_prompt_go_to_the_least_busy(router):
    async def make() -> PendingRequest:
        return PendingRequest(args=[], kwargs={}, metadata=None)  # type: ignore[arg-type]

    busy(router, A, 1)
    busy(router, B, 1)
    assert choose(router, asyncio.run(make()))[0] == C


def test_who_gave_up_before_a_replica_had_room_is_no_load(router):
    for number in range(6):
        pending = asked(100 + number)
        choose(router, pending, A)
        pending.future.cancel()
    busy(router, B, 1)
    busy(router, C, 1)
    assert choose(router, asked(3))[0] == A
    assert len(router._chosen) == 1


def test_a_request_that_waits_is_not_mistaken_for_a_later_one(router):
    """Its identity is its address, which is free again once nobody holds it."""
    choose(router, asked(5))
    assert all(id(each.pending) == key for key, each in router._chosen.items())
    router.on_request_routed(asked(6), B.replica_id, None)
    assert choose(router, asked(6))[0] == B

"""Deltas reach their streams in order, a few requests at a time, and together where they had to wait."""

from __future__ import annotations

import random

from gapless.serve.delivery import PER_TURN, Delivery
from gapless.serve.messages import Delta


def delta(request: int, number: int) -> Delta:
    return Delta(f"r{request}", 0, f"{number} ", [number])


def test_one_turn_serves_a_few_requests_and_says_that_others_wait() -> None:
    got: list[Delta] = []
    delivery = Delivery(lambda request_id, deltas: got.extend(deltas))
    delivery.add(delta(request, 0) for request in range(PER_TURN + 3))
    assert delivery.hand_out()
    assert [found.request_id for found in got] == [f"r{request}" for request in range(PER_TURN)]
    assert not delivery.hand_out()
    assert len(got) == PER_TURN + 3
    assert not delivery.hand_out()


def test_who_has_waited_longest_is_next_and_gets_all_that_came_meanwhile() -> None:
    got: list[Delta] = []
    delivery = Delivery(lambda request_id, deltas: got.extend(deltas))
    delivery.add([delta(0, 0), delta(1, 0), delta(2, 0)])
    assert delivery.hand_out(1)
    delivery.add([delta(0, 1), delta(1, 1), delta(2, 1)])
    assert delivery.hand_out(2)
    assert [(d.request_id, d.token_ids) for d in got] == [
        ("r0", [0]), ("r1", [0]), ("r1", [1]), ("r2", [0]), ("r2", [1]),
    ]  # fmt: skip
    assert not delivery.hand_out(None)
    assert (got[-1].request_id, got[-1].token_ids) == ("r0", [1])


def test_nothing_is_lost_doubled_or_reordered() -> None:
    rng = random.Random(0)
    got: list[Delta] = []
    delivery = Delivery(lambda request_id, deltas: got.extend(deltas))
    sent: dict[int, int] = {}
    for _ in range(500):
        step = rng.sample(range(100), rng.randrange(100))
        delivery.add([delta(request, sent.get(request, 0)) for request in step])
        for request in step:
            sent[request] = sent.get(request, 0) + 1
        delivery.hand_out(rng.choice([0, 1, 7, PER_TURN]))
    assert not delivery.hand_out(None)
    for request, count in sent.items():
        assert [d.token_ids[0] for d in got if d.request_id == f"r{request}"] == list(range(count))
    assert len(got) == sum(sent.values())

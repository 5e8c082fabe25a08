"""What a client of Ray's replicas adds up, over answers that do not come."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs ray[serve]")

from gapless.deploy.ray_client import GONE_AFTER, RayClient


class Broadcasts:
    """A handle whose replicas answer what the next entry of ``rounds`` says."""

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def broadcast(self, method: str) -> Broadcasts:
        return self

    async def results_async(self, **options: Any) -> list[Any]:
        return self.answers


def status(name: str, num_tokens: int) -> dict[str, Any]:
    return {
        "replica": name,
        "node": "n",
        "pid": 1,
        "is_healthy": True,
        "step_age_s": 0.0,
        "num_inside": 0,
        "stats": {"generation_tokens": num_tokens, "num_running": 2},
    }


def tokens_after(client: RayClient, handle: Broadcasts, *answers: Any) -> int:
    handle.answers = list(answers)
    asyncio.run(client._poll())
    total: int = client.stats()["generation_tokens"]
    return total


def test_a_replica_that_was_only_slow_to_answer_counts_once():
    handle = Broadcasts()
    client = RayClient(handle)
    assert tokens_after(client, handle, status("a", 10), status("b", 5)) == 15
    for _ in range(3):
        assert tokens_after(client, handle, status("a", 12), TimeoutError()) == 17
    assert tokens_after(client, handle, status("a", 12), status("b", 6)) == 18
    assert client.stats()["num_running"] == 4
    assert [view.index for view in client.replicas()] == [0, 1]


def test_totals_of_one_that_has_gone_stay_and_its_name_does_not():
    handle = Broadcasts()
    client = RayClient(handle)
    tokens_after(client, handle, status("a", 10), status("b", 5))
    for _ in range(GONE_AFTER + 2):
        assert tokens_after(client, handle, status("a", 10)) == 15
    assert not client._silent
    assert client.stats()["num_running"] == 2

"""What a client of Ray's replicas adds up, over answers that do not come; and how a replica ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs ray[serve]")

from gapless.deploy import ray_serve
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


@pytest.mark.parametrize("closing_s", [0.0, 60.0])
def test_a_replica_whose_engine_died_tidies_up_and_ends_in_any_case(monkeypatch, closing_s):
    happened: list[Any] = []

    class DeadEngine:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        async def start(self) -> None: ...

        async def wait_dead(self) -> str:
            return "signal 9"

        async def close(self) -> None:
            await asyncio.sleep(closing_s)
            happened.append("closed")

    monkeypatch.setattr(ray_serve, "ProcessClient", DeadEngine)
    monkeypatch.setattr(ray_serve, "CLOSE_LIMIT_S", 0.02)
    monkeypatch.setattr(ray_serve.os, "_exit", happened.append)

    async def scenario() -> None:
        replica = ray_serve.EngineReplica.__new__(ray_serve.EngineReplica)
        await replica.__init__(lambda progress: None, {})  # type: ignore[misc]
        await replica._watcher

    asyncio.run(scenario())
    assert happened == (["closed", 1] if not closing_s else [1])

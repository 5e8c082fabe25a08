"""A replica that Ray takes away: its engine ends with it and leaves no file behind."""

from __future__ import annotations

import asyncio
import gc
import os
from contextlib import nullcontext
from typing import Any

import pytest

from gapless.deploy import ray_serve
from gapless.deploy.ray_serve import EngineReplica
from gapless.serve.client import EngineDeadError


class FakeClient:
    """Dies when it is closed, as an engine does."""

    made: list[FakeClient]
    is_healthy = True

    def __init__(self, open_engine: Any, **options: Any) -> None:
        self.num_closed = 0
        self.died = asyncio.Event()
        FakeClient.made.append(self)

    async def start(self) -> None:
        """Nothing to wait for."""

    async def wait_dead(self) -> EngineDeadError:
        await self.died.wait()
        return EngineDeadError("it has been shut down")

    async def close(self) -> int:
        self.num_closed += 1
        self.died.set()
        return 0


@pytest.fixture(autouse=True)
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Codes with which the process would have ended."""
    codes: list[int] = []
    monkeypatch.setattr(FakeClient, "made", [], raising=False)
    monkeypatch.setattr(ray_serve, "ProcessClient", FakeClient)
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


async def made_replica() -> EngineReplica:
    replica = EngineReplica.__new__(EngineReplica)
    await replica.__init__(None, {})  # type: ignore[misc,arg-type]  # as Ray does
    await asyncio.sleep(0)
    return replica


def test_a_replica_that_has_drained_ends_its_engine_and_nothing_else(exits: list[int]) -> None:
    async def scenario() -> None:
        replica = await made_replica()
        await replica.__del__()  # type: ignore[attr-defined]  # as Ray does
        await asyncio.sleep(0.01)

    asyncio.run(scenario())
    assert [client.num_closed for client in FakeClient.made] == [1]
    assert exits == []  # that is for engines which died


def test_an_engine_that_dies_takes_its_replica_with_it_and_its_files_too(exits: list[int]) -> None:
    async def scenario() -> None:
        replica = await made_replica()
        FakeClient.made[0].died.set()
        await asyncio.sleep(0.01)
        del replica

    asyncio.run(scenario())
    assert [client.num_closed for client in FakeClient.made] == [1]
    assert exits == [ray_serve.EXIT_ENGINE_DIED]


@pytest.mark.parametrize("is_healthy", [True, False])
def test_ray_is_told_of_an_engine_that_shows_no_life(is_healthy: bool) -> None:
    """It asks, and replaces a replica that raises."""

    async def scenario() -> None:
        replica = await made_replica()
        FakeClient.made[0].is_healthy = is_healthy
        with nullcontext() if is_healthy else pytest.raises(RuntimeError, match="shows no life"):
            await replica.check_health()
        await replica.__del__()  # type: ignore[attr-defined]

    asyncio.run(scenario())


@pytest.mark.filterwarnings("error")
def test_a_replica_that_is_forgotten_makes_no_coroutine_that_nobody_awaits() -> None:
    async def scenario() -> None:
        replica = await made_replica()
        replica._watcher.cancel()
        del replica
        gc.collect()

    asyncio.run(scenario())
    assert not hasattr(EngineReplica, "__del__")

"""Replicas without processes and sockets: deaths, restarts and late messages at chosen moments."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from wire_fakes import World

from gapless.errors import RequestError
from gapless.serve.client import EngineBusyError, EngineRestartingError, ReplicaLostError
from gapless.serve.messages import (
    Delta,
    Failed,
    GenerateRequest,
    Media,
    MediaPart,
    Refused,
    StepOutput,
)
from gapless.serve.replica import RestartRule
from gapless.serve.replicas import ReplicaSet

NUM_EVENTS = int(os.environ.get("STORM_EVENTS", "1200"))
PART = MediaPart(
    kind="image",
    patches_PC=np.ones((20, 4), np.float32),
    grid_thw=(1, 4, 5),
    content_hash=b"h",
    ranges=[(0, 1)],
)


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))  # type: ignore[arg-type]


async def started(**options: Any) -> ReplicaSet:
    options = {"restart": RestartRule(max_restarts=10**6, first_pause_s=0.0), **options}
    client = ReplicaSet(lambda progress: None, environments=[{}] * options.pop("num", 2), **options)
    await client.start()
    return client


async def ended(client: ReplicaSet, world: World) -> None:
    for process, _ in world.alive():
        process.kill()
    await client.close()


async def turns(condition: Callable[[], Any] = lambda: False, *, at_most: int = 500) -> None:
    for _ in range(at_most):
        if condition():
            return
        await asyncio.sleep(0.001)


def picture() -> Media:
    return Media(parts=[PART], rope_positions_3T=np.zeros((3, 3), np.int32), rope_delta=0)


def request(name: str, *, media: Media | None = None, **fields: Any) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_token_ids=[1, 2, 3], media=media, **fields)


@pytest.mark.parametrize("seed", [1, 2])
def test_after_any_storm_nothing_is_left_inside_and_no_answer_is_of_two_lives(world, seed):
    """Submissions, steps, refusals, callers who go, deaths of every kind and words of the dead, at random."""
    rng = random.Random(seed)

    async def scenario():
        client = await started(num=3, max_queued_requests=10, max_media_bytes=1000)
        outcomes: dict[str, Any] = {}
        readers: dict[str, asyncio.Task[None]] = {}

        async def read(name: str, asked: GenerateRequest) -> None:
            got: dict[int, list[int]] = {}
            outcomes[name] = "cancelled"
            try:
                async for deltas in client.generate(asked):
                    for delta in deltas:
                        got.setdefault(delta.index, []).extend(delta.token_ids)
                    if rng.random() < 0.2:
                        await asyncio.sleep(0)  # a slow one
                outcomes[name] = "done"
                assert sorted(got) == list(range(asked.params.get("n", 1)))
            except ReplicaLostError:
                outcomes[name] = "lost"
            except (EngineBusyError, EngineRestartingError, RequestError) as error:
                outcomes[name] = type(error).__name__
                assert not got
            for tokens in got.values():
                assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
                assert tokens[0] % 1000 == 0
            assert len({tokens[0] for tokens in got.values()}) <= 1

        for number in range(NUM_EVENTS):
            alive = world.alive()
            busy = [(p, c, name) for p, c in alive for name in c.running]
            match rng.choices(["ask", "step", "end", "refuse", "go", "die"], [30, 40, 15, 2, 5, 2])[0]:
                case "ask":
                    name = f"r{number}"
                    media = picture() if rng.random() < 0.3 else None
                    asked = request(name, media=media, params={"n": rng.choice([1, 1, 3])})
                    readers[name] = asyncio.create_task(read(name, asked))
                case "step" | "end" as kind if busy:
                    process, channel, name = rng.choice(busy)
                    world.step(process, channel, name, ends=kind == "end")
                case "refuse" if busy:
                    _, channel, name = rng.choice(busy)
                    if not channel.running[name][0]:
                        del channel.running[name]
                        channel.say(Refused(name, "no"))
                case "go" if readers:
                    rng.choice(list(readers.values())).cancel()
                case "die" if alive:
                    process, channel = rng.choice(alive)
                    if rng.random() < 0.5:
                        channel.say(Failed(message="a bug"))
                        for name, counts in channel.running.items():  # nobody may see these
                            channel.say(StepOutput([Delta(name, i, "", [-1]) for i in range(len(counts))]))
                    process.kill()
            if rng.random() < 0.7:
                await asyncio.sleep(0)
            client.replicas()
            assert client.num_inside >= 0

        def is_over() -> bool:
            for process, channel in world.alive():
                for name in list(channel.running):
                    world.step(process, channel, name, ends=True)
            return all(reader.done() for reader in readers.values())

        await turns(is_over, at_most=3000)
        for reader in readers.values():
            assert reader.done()
            assert reader.cancelled() or reader.exception() is None
        assert {"done", "lost", "EngineBusyError", "cancelled"} <= set(outcomes.values())
        assert (client.num_inside, client._admission.num_bytes_inside, client._inside) == (0, 0, {})
        assert [replica.load_tokens for replica in client._replicas] == [0, 0, 0]
        assert await client.wait_idle(0.1)
        await ended(client, world)

    run(scenario)


@pytest.mark.parametrize("is_whole", [False, True])
def test_images_are_kept_for_another_replica_as_long_as_one_may_need_them(world, is_whole):
    async def scenario():
        client = await started()
        media = picture()
        stream = client.generate(request("a", media=media, is_whole=is_whole))
        first = asyncio.ensure_future(anext(stream))
        await turns(lambda: any(channel.running for channel in world.channels))
        world.holder("a")[0].kill()
        await turns(lambda: len([c for c in world.channels if c.requests]) == 2)
        asked = [channel.requests[0] for channel in world.channels if channel.requests]
        assert len(asked) == 2
        assert len(media.parts) == 1
        world.step(*world.holder("a"), "a")
        await first
        assert len(media.parts) == int(is_whole)
        await stream.aclose()
        await ended(client, world)

    run(scenario)


@pytest.mark.parametrize(("num_deaths", "may_restart"), [(0, True), (1, False)])
def test_a_whole_answer_may_begin_anew_until_two_replicas_have_died(world, num_deaths, may_restart):
    async def scenario():
        client = await started()
        stream = client.generate(request("a", is_whole=True, num_deaths=num_deaths))
        first = asyncio.ensure_future(anext(stream))
        await turns(lambda: any(channel.running for channel in world.channels))
        process, channel = world.holder("a")
        world.step(process, channel, "a")
        await first
        process.kill()
        with pytest.raises(ReplicaLostError) as lost:
            await anext(stream)
        assert lost.value.may_restart is may_restart
        await ended(client, world)

    run(scenario)


def test_an_error_of_the_machine_while_starting_again_is_one_more_death_and_leaks_nothing(world):
    async def scenario():
        client = await started()
        world.launch_errors = [OSError(12, "Cannot allocate memory"), OSError(24, "Too many open files")]
        world.processes[1].kill()
        await turns(lambda: client.replicas()[1].num_restarts == 3 and client.replicas()[1].is_healthy)
        view = client.replicas()[1]
        assert (view.state, view.num_restarts) == ("ready", 3)
        assert "Too many open files" in (view.last_death or "")
        assert [channel.is_closed for channel in world.channels] == [False, True, True, True, False]
        await ended(client, world)

    run(scenario)


def test_who_keeps_failing_to_start_is_given_up(world):
    async def scenario():
        client = await started(restart=RestartRule(max_restarts=2, first_pause_s=0.0))
        world.launch_errors = [OSError(12, "Cannot allocate memory")] * 2
        world.processes[1].kill()
        await turns(lambda: client.replicas()[1].state == "dead")
        assert client.replicas()[1].state == "dead"
        assert client.is_healthy
        await ended(client, world)

    run(scenario)


def test_a_late_reader_does_not_free_the_place_of_another_request_of_its_name(world):
    async def scenario():
        client = await started()
        first = client.generate(request("a"))
        reading = asyncio.ensure_future(anext(first))
        await turns(lambda: any(channel.running for channel in world.channels))
        world.step(*world.holder("a"), "a", ends=True)
        await reading  # its engine is done, its reader has not asked for the end yet
        second = client.generate(request("a"))
        again = asyncio.ensure_future(anext(second))
        await turns(lambda: any(channel.running for channel in world.channels))
        await first.aclose()
        assert client.num_inside == 1
        assert not await client.wait_idle(0.01)
        world.step(*world.holder("a"), "a", ends=True)
        await again
        await second.aclose()
        assert client.num_inside == 0
        await ended(client, world)

    run(scenario)


def test_while_all_start_again_even_a_queue_without_room_says_so(world):
    async def scenario():
        client = await started(max_queued_requests=0, restart=RestartRule(max_restarts=5, first_pause_s=60.0))
        for process in world.processes:
            process.kill()
        await turns(lambda: not any(view.is_healthy for view in client.replicas()))
        with pytest.raises(EngineRestartingError):
            await anext(client.generate(request("a")))
        await ended(client, world)

    run(scenario)

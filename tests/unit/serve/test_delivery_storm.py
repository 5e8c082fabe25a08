"""One client over a fake wire: whatever the engine says and when, each stream has its own, whole, in order.

The watcher, which looks at the wire four times a second, is switched off: a message that only it would find
hangs these tests.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from wire_fakes import FakeChannel, World

from gapless.errors import RequestError
from gapless.serve import process_client
from gapless.serve.client import EngineDeadError
from gapless.serve.delivery import PER_TURN
from gapless.serve.messages import (
    Answer,
    Delta,
    Embedding,
    EmbedRequest,
    Failed,
    GenerateRequest,
    Heartbeat,
    Refused,
    StepOutput,
)
from gapless.serve.process_client import ProcessClient

EVENTS = ("ask", "step", "burst", "end", "refuse", "go", "embed")
WEIGHTS = (40, 25, 5, 5, 2, 5, 5)
NUM_EVENTS = int(os.environ.get("STORM_EVENTS", "1500"))


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(process_client, "_WATCH_EVERY_S", 3600.0)
    return World(monkeypatch)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))  # type: ignore[arg-type]


def request(name: str, n: int = 1) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_token_ids=[1], params={"n": n})


async def started() -> ProcessClient:
    client = ProcessClient(lambda progress: None, max_queued_requests=2**20)
    await client.start()
    return client


async def collect(client: ProcessClient, asked: GenerateRequest, *, pause: Callable[[], float]) -> list[int]:
    """The numbers of its first choice; all choices must have had the same."""
    got: dict[int, list[int]] = {index: [] for index in range(asked.params["n"])}
    async for deltas in client.generate(asked):
        for delta in deltas:
            assert delta.request_id == asked.request_id
            got[delta.index] += delta.token_ids
        if (seconds := pause()) >= 0:
            await asyncio.sleep(seconds)
    assert all(numbers == got[0] for numbers in got.values())
    return got[0]


def tell(channel: FakeChannel, names: Sequence[str], *, ends: bool = False) -> None:
    """One step's message: the next number of each choice of each of them."""
    deltas = []
    for name in names:
        counts = channel.running[name]
        reason = "stop" if ends else None
        deltas += [Delta(name, i, "", [n], finish_reason=reason) for i, n in enumerate(counts)]
        channel.running[name] = [n + 1 for n in counts]
        if ends:
            del channel.running[name]
    channel.say(StepOutput(deltas))


async def quiet(client: ProcessClient) -> None:
    """Until nothing waits on the way: the client does not ask for turn after turn for ever."""
    for _ in range(10_000):
        await asyncio.sleep(0)
        if not client._reads_on and not client._delivery._waiting:
            return
    raise AssertionError("the client still reads")


@pytest.mark.parametrize("seed", range(4))
def test_in_any_storm_every_stream_has_its_own_whole_and_in_order(world, seed):
    """Requests, steps of many, bursts of messages, refusals, callers who go, embeddings and questions."""
    rng = random.Random(seed)

    async def scenario():
        client = await started()
        (channel,) = world.channels
        readers: dict[str, asyncio.Task[list[int]]] = {}
        lengths: dict[str, int] = {}
        gone: set[str] = set()
        vectors: dict[str, asyncio.Task[list[float]]] = {}

        def end(names: Sequence[str]) -> None:
            lengths.update({name: channel.running[name][0] + 1 for name in names})
            tell(channel, names, ends=True)

        for number in range(NUM_EVENTS):
            running = list(channel.running)
            some = rng.sample(running, rng.randint(0, len(running)))
            match rng.choices(
                ["ask", "step", "burst", "end", "refuse", "go", "embed"], [40, 25, 5, 5, 2, 5, 5]
            )[0]:
                case "ask":
                    for i in range(rng.choice([1, 1, 8])):
                        name = f"r{number}.{i}"
                        pause = rng.choice([-1.0, -1.0, 0.0, 0.001])
                        asked = request(name, rng.choice([1, 1, 3]))
                        readers[name] = asyncio.create_task(collect(client, asked, pause=lambda p=pause: p))
                case "step":
                    tell(channel, some)
                case "burst":
                    for _ in range(rng.choice([3, 200])):
                        tell(channel, rng.sample(some, min(len(some), 2)))
                        channel.say(Heartbeat({"number": number}))
                case "end":
                    end(some[:20])
                case "refuse" if fresh := [name for name in some if not channel.running[name][0]]:
                    lengths[fresh[0]] = -1
                    del channel.running[fresh[0]]
                    channel.say(Refused(fresh[0], "no"))
                case "go" if readers:
                    name = rng.choice(list(readers))
                    if readers[name].cancel():
                        gone.add(name)
                case "embed":
                    name = f"e{number}"
                    asked_vector = EmbedRequest(request_id=name, prompt_token_ids=[1])
                    vectors[name] = asyncio.create_task(client.embed(asked_vector))
                    await asyncio.sleep(0)
                    channel.say(Embedding(name, [float(number)]))
            for _ in range(rng.choice([0, 0, 1, 3])):
                await asyncio.sleep(0)
        await asyncio.sleep(0)  # who has just asked is on the wire
        end(list(channel.running))
        answered = asyncio.create_task(client.report())
        await asyncio.sleep(0)
        channel.say(Answer(next(iter(client._queries)), {"is": "last"}))
        assert await answered == {"is": "last"}
        results = dict(
            zip(readers, await asyncio.gather(*readers.values(), return_exceptions=True), strict=True)
        )
        for name, result in results.items():
            if name in gone and isinstance(result, asyncio.CancelledError):
                continue
            if lengths[name] < 0:
                assert isinstance(result, RequestError)
            else:
                assert result == list(range(lengths[name]))
        for name, vector in vectors.items():
            assert await vector == [float(name[1:])]
        assert gone
        assert -1 in lengths.values()
        await quiet(client)
        assert (client.num_inside, client._streams, client._embeddings) == (0, {}, {})
        assert await client.wait_idle(0.1)
        world.processes[0].kill()
        await client.close()

    run(scenario)


@pytest.mark.parametrize("how", ["kill", "failed", "failed alone"])
def test_what_was_said_before_a_death_is_read_before_it_is_raised(world, how):
    async def scenario():
        client = await started()
        (channel,), (process,) = world.channels, world.processes
        names = [f"r{i}" for i in range(5 * PER_TURN)]
        got: dict[str, list[int]] = {name: [] for name in names}

        async def read(name: str) -> None:
            async for deltas in client.generate(request(name)):
                got[name] += [token for delta in deltas for token in delta.token_ids]

        readers = [asyncio.create_task(read(name)) for name in names]
        await asyncio.sleep(0)
        for _ in range(300):  # more messages than one turn reads
            tell(channel, names)
        for _ in range(2):
            await asyncio.sleep(0)
        assert client._delivery._waiting
        tell(channel, names[1:], ends=True)
        if how != "kill":
            channel.say(Failed(message="a bug"))
        if how != "failed alone":
            process.kill()
        results = await asyncio.gather(*readers, return_exceptions=True)
        assert isinstance(results[0], EngineDeadError)
        assert results[1:] == [None] * (len(names) - 1)
        assert [len(numbers) for numbers in got.values()] == [300, *[301] * (len(names) - 1)]
        assert all(numbers == list(range(len(numbers))) for numbers in got.values())
        await quiet(client)
        process.kill()
        await client.close()

    run(scenario)


def test_while_streams_are_served_others_get_their_turns(world):
    """Of a step for very many, and the next one has come before all have theirs: a task that needs many turns
    of the loop is done long before, and so is an embedding."""

    async def scenario():
        client = await started()
        (channel,), (process,) = world.channels, world.processes
        names = [f"r{i}" for i in range(40 * PER_TURN)]
        readers = [asyncio.create_task(collect(client, request(name), pause=lambda: -1.0)) for name in names]
        vector = asyncio.create_task(client.embed(EmbedRequest(request_id="e", prompt_token_ids=[1])))
        await asyncio.sleep(0)
        tell(channel, names)
        channel.say(Embedding("e", [1.0]))
        tell(channel, names, ends=True)
        while not client._delivery._waiting:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert vector.done()
        assert client._delivery._waiting
        assert await asyncio.gather(*readers) == [[0, 1]] * len(names)
        await quiet(client)
        process.kill()
        await client.close()

    run(scenario)


@pytest.mark.parametrize("is_busy", [False, True])
def test_an_error_while_reading_costs_one_message_and_not_all_that_follow(world, is_busy):
    """``is_busy``: it happens in a turn that the client has asked for itself."""

    async def scenario():
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: errors.append(context["exception"])
        )
        client = await started()
        (channel,), (process,) = world.channels, world.processes
        reader = asyncio.create_task(collect(client, request("a"), pause=lambda: -1.0))
        others = [f"r{i}" for i in range(3 * PER_TURN)] if is_busy else []
        tasks = [asyncio.create_task(collect(client, request(name), pause=lambda: -1.0)) for name in others]
        await asyncio.sleep(0)
        if others:
            tell(channel, others)
            while not client._reads_on:
                await asyncio.sleep(0)
        receive, channel.receive = channel.receive, failing(channel)  # type: ignore[method-assign]
        channel.say(Heartbeat({}))
        while not errors:
            await asyncio.sleep(0)
        channel.receive = receive  # type: ignore[method-assign]
        tell(channel, [*others, "a"], ends=True)
        assert await reader == [0]
        assert await asyncio.gather(*tasks) == [[0, 1]] * len(others)
        assert len(errors) == 1
        process.kill()
        await client.close()

    run(scenario)


def failing(channel: FakeChannel) -> Callable[[], Any]:
    def receive() -> Any:
        channel._inbox.popleft()
        raise ValueError("no message")

    return receive

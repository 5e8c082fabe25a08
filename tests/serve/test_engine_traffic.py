"""Much traffic through one engine process: nothing lost, mixed or leaked, whoever leaves when."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from pathlib import Path

import pytest
from engine_process_fakes import OpenFake, expected_answer

from gapless.serve.messages import GenerateRequest
from gapless.serve.process_client import ProcessClient

PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_MB


def request(name: str, prompt: list[int], num_tokens: int) -> GenerateRequest:
    params = {"max_tokens": num_tokens, "temperature": 0.0}
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, params=params)


async def complete(client: ProcessClient, number: int, num_tokens: int) -> None:
    prompt = [number % 39_000 + 1, 5]
    tokens = []
    async for deltas in client.generate(request(f"r{number}", prompt, num_tokens)):
        tokens += [token for delta in deltas for token in delta.token_ids]
    assert tokens == expected_answer(prompt, num_tokens)


async def settled_stats(client: ProcessClient) -> dict:
    """Statistics made after everything has ended."""
    await client.report()  # the loop has seen all that was sent before
    before = client.stats().get("uptime_s", -1.0)
    while client.stats().get("uptime_s", -1.0) == before:
        await asyncio.sleep(0.05)
    return client.stats()


@pytest.mark.parametrize(
    "num_rounds", [3, pytest.param(20, marks=pytest.mark.soak)], ids=["short", "twenty thousand"]
)
def test_memory_stays_flat_however_many_requests_have_been(num_rounds):
    async def scenario():
        client = ProcessClient(OpenFake(), max_queued_requests=2000)
        await client.start()
        number = 0
        before: tuple[int, float] | None = None
        for _ in range(num_rounds):
            await asyncio.gather(*(complete(client, number + i, 4) for i in range(1000)))
            number += 1000
            gc.collect()  # tasks and exceptions are cycles
            before = before or (len(gc.get_objects()), resident_mb(client.pid))
        assert len(gc.get_objects()) - before[0] < 500
        assert resident_mb(client.pid) - before[1] < 8
        stats = await settled_stats(client)
        assert (stats["kv_usage"], stats["num_running"], stats["num_waiting"]) == (0.0, 0, 0)
        assert stats["requests_finished"] == {"length": number}
        assert await client.close() == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(3))
def test_readers_that_come_and_go_disturb_nobody_and_leave_nothing(seed):
    """A third reads to the end, a third leaves after some tokens, a third is cancelled at any moment; the
    cache is too small for all of them, so sequences are preempted as well."""
    chance = random.Random(seed)

    async def scenario():
        client = ProcessClient(OpenFake(max_num_reqs=64, num_blocks=150), max_queued_requests=2000)
        await client.start()

        async def leave(number: int, after: int) -> None:
            stream = client.generate(request(f"r{number}", [number + 1], 300))
            async for _ in stream:
                after -= 1
                if after < 0:
                    break
            await stream.aclose()

        async def cancel(number: int, after_s: float) -> None:
            task = asyncio.create_task(complete(client, number, 300))
            await asyncio.sleep(after_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        def one(number: int):
            kind = chance.randrange(3)
            if kind == 0:
                return complete(client, number, chance.randint(1, 60))
            return leave(number, chance.randint(0, 5)) if kind == 1 else cancel(number, chance.random() / 2)

        await asyncio.gather(*(one(number) for number in range(300)))
        assert client.num_inside == 0
        stats = await settled_stats(client)
        assert stats["num_preemptions"] > 0
        assert (stats["kv_usage"], stats["num_running"], stats["num_waiting"]) == (0.0, 0, 0)
        assert await client.close() == 0

    asyncio.run(scenario())

"""The real sockets wake the client for whatever is on them, without its watcher's help.

zmq's file descriptor tells of changes, not of messages that lie there: who does not read to the end is not
told again. Here the engine is a thread that answers each question after a few other messages at odd moments,
and says nothing else; an answer that is not read is never asked for again.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import pytest
from wire_fakes import INFO, FakeProcess

from gapless.serve import process_client
from gapless.serve.channel import Addresses, EngineChannel
from gapless.serve.delivery import PER_TURN
from gapless.serve.messages import Answer, Delta, Heartbeat, Query, Ready, Shutdown, StepOutput
from gapless.serve.process_client import ProcessClient

NUM_QUESTIONS = 300


@pytest.fixture
def engine(monkeypatch):
    """The thread, which the client takes for a process."""
    threads: list[threading.Thread] = []

    def launch(open_engine: Any, addresses: Addresses, **_: Any) -> FakeProcess:
        process = FakeProcess(0)
        threads.append(threading.Thread(target=serve, args=(addresses, process), daemon=True))
        threads[0].start()
        return process

    monkeypatch.setattr(process_client, "launch", launch)
    monkeypatch.setattr(process_client, "_WATCH_EVERY_S", 3600.0)
    yield
    threads[0].join(10)
    assert not threads[0].is_alive()


def serve(addresses: Addresses, process: FakeProcess) -> None:
    rng = random.Random(0)
    channel = EngineChannel(addresses)
    channel.send(Ready(info=INFO))
    is_over = False
    while not is_over:
        for message in channel.receive(1.0):
            if isinstance(message, Query):
                for _ in range(rng.choice([0, 0, 1, 2, 70, 200])):  # to a step's deltas nobody listens
                    deltas = [Delta(f"r{i}", 0, "", [1]) for i in range(rng.choice([0, 1, 3 * PER_TURN]))]
                    channel.send(rng.choice([StepOutput(deltas), Heartbeat({})]))
                    if rng.random() < 0.1:
                        time.sleep(rng.choice([0.0, 1e-5, 1e-4, 1e-3]))
                channel.send(Answer(message.query_id, {"id": message.query_id}))
            is_over = is_over or isinstance(message, Shutdown)
    channel.close()
    process.kill()


def test_every_message_is_read_though_nobody_looks_again(engine):
    async def scenario():
        client = ProcessClient(lambda progress: None)
        await client.start()
        for number in range(NUM_QUESTIONS):
            asked = asyncio.create_task(client.report())
            await asyncio.sleep(0)
            if number % 4 == 0:
                time.sleep(0.01)  # the loop is busy elsewhere: more lies there than one turn reads
            assert await asyncio.wait_for(asked, 10) == {"id": number}
        await client.close(drain_s=5)

    asyncio.run(scenario())

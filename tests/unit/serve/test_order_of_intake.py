"""Requests are prepared in the order of their arrival, a few per turn, and others move in between."""

from __future__ import annotations

import asyncio

import pytest

from gapless.serve.intake import Intake


def events_of(num_requests: int, *, per_turn: int, also=lambda note: None) -> list[str]:
    noted: list[str] = []

    async def scenario() -> None:
        intake, tasks = Intake(per_turn), []

        async def prepare(number: int) -> None:
            noted.append(f"prepared {number}")

        def begin(number: int) -> None:
            noted.append(f"begun {number}")
            tasks.append(asyncio.create_task(prepare(number)))

        for number in range(num_requests):
            intake.add(lambda number=number: begin(number))
        also(noted.append)
        while len(tasks) < num_requests:
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    asyncio.run(scenario())
    return noted


@pytest.mark.parametrize("per_turn", [1, 4, 100])
def test_requests_are_prepared_in_order_and_the_next_begin_only_then(per_turn):
    noted = events_of(10, per_turn=per_turn)
    assert [e for e in noted if e.startswith("prepared")] == [f"prepared {i}" for i in range(10)]
    for number in range(10 - per_turn):
        assert noted.index(f"prepared {number}") < noted.index(f"begun {number + per_turn}")


def test_others_have_turns_between_requests():
    def turn_after_turn(note) -> None:
        async def go() -> None:
            for _ in range(30):
                note("other")
                await asyncio.sleep(0)

        turns.append(asyncio.get_running_loop().create_task(go()))

    turns: list[asyncio.Task[None]] = []
    noted = events_of(40, per_turn=4, also=turn_after_turn)
    assert noted[: noted.index("prepared 39")].count("other") >= 9


def test_a_request_that_comes_when_none_waits_begins_in_the_next_turn():
    async def scenario() -> None:
        intake = Intake(per_turn=1)
        for _ in range(3):
            begun = asyncio.Event()
            intake.add(begun.set)
            assert not begun.is_set()
            await asyncio.sleep(0)
            assert begun.is_set()
            await asyncio.sleep(0)

    asyncio.run(scenario())

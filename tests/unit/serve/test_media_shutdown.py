"""Requests with images while their server shuts down: told so, and never an internal fault."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from gapless.multimodal.limits import DEFAULT_LIMITS
from gapless.multimodal.sampling import FrameSampling
from gapless.serve.client import EngineDrainingError
from gapless.serve.errors import as_api_error
from gapless.serve.media import MediaDesk, PlacedPart
from gapless.serve.metrics import RequestMetrics
from gapless.serve.settings import ServerSettings

MADE = SimpleNamespace(items=())
"""What becomes of every request that is let through."""


class Gate:
    """A loader that waits until it is let go."""

    limits = DEFAULT_LIMITS

    def __init__(self) -> None:
        self.opened, self.started = threading.Event(), threading.Event()

    def image(self, url: str, **_: Any) -> Any:
        self.started.set()
        assert self.opened.wait(10)
        return SimpleNamespace(width=1, height=1)


@pytest.fixture
def gate() -> Any:
    gate = Gate()
    yield gate
    gate.opened.set()


def desk_of(gate: Any) -> MediaDesk:
    sampling = lambda: FrameSampling(spacing="ends")  # noqa: E731
    processor: Any = SimpleNamespace(sampling=sampling, prompt=lambda *_, **__: MADE)
    return MediaDesk(processor, gate, settings=ServerSettings(), metrics=RequestMetrics(), num_threads=1)


def ask(desk: MediaDesk, url: str = "data:,") -> asyncio.Task[Any]:
    part: Any = SimpleNamespace(url=url, media_kind="image", detail="auto")
    return asyncio.ensure_future(desk.prompt([1], [PlacedPart(name="it", part=part)], max_tokens=9))


def assert_told(error: BaseException | None) -> None:
    assert isinstance(error, EngineDrainingError)
    assert as_api_error(error).status == 503


@pytest.mark.parametrize("url", ["data:,", "http://example.org/a.png"])
def test_a_request_that_comes_late_is_told_that_the_server_shuts_down(gate: Gate, url: str) -> None:
    async def scenario() -> None:
        desk = desk_of(gate)
        desk.close()
        (error,) = await asyncio.gather(ask(desk, url), return_exceptions=True)
        assert_told(error)
        assert (desk.num_inside, desk.num_held) == (0, 0)

    asyncio.run(scenario())


def test_what_has_begun_ends_well_and_what_waits_is_told(gate: Gate) -> None:
    async def scenario() -> None:
        desk = desk_of(gate)
        begun = ask(desk)
        await asyncio.to_thread(gate.started.wait, 5)
        waiting = ask(desk)
        await asyncio.sleep(0)
        desk.close()
        (error,) = await asyncio.wait_for(asyncio.gather(waiting, return_exceptions=True), 5)
        assert_told(error)
        gate.opened.set()
        assert await asyncio.wait_for(begun, 5) is MADE
        assert (desk.num_inside, desk.num_held) == (0, 0)

    asyncio.run(scenario())


def test_a_caller_that_leaves_a_closed_desk_is_still_one_that_left(gate: Gate) -> None:
    async def scenario() -> None:
        desk = desk_of(gate)
        begun = ask(desk)
        await asyncio.to_thread(gate.started.wait, 5)
        desk.close()
        begun.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begun

    asyncio.run(scenario())

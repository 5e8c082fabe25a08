"""All engine requests of one HTTP request as one stream, and work that ends when its caller has gone.

A request with several prompts becomes several engine requests, whose deltas are merged in the order in which
they come. Invariants: nothing is read ahead of the reader (so back-pressure reaches the engine client, which
merges); whatever ends the stream, every engine request that still runs is aborted by closing its iterator.
Read ``chat_stream.py`` or ``answers.py`` next.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.types import Receive

from gapless.serve.client import EngineClient
from gapless.serve.errors import ClientGoneError, ended_by_server, engine_fault
from gapless.serve.messages import Delta, GenerateRequest
from gapless.serve.metrics import RequestClock

T = TypeVar("T")
Deltas = AsyncGenerator[tuple[int, list[Delta]], None]
"""Pairs of a prompt's position and what is new in its choices."""


async def deltas_of(
    client: EngineClient, requests: Sequence[GenerateRequest], *, clock: RequestClock
) -> Deltas:
    """Raises what the engine client raises, and ``ApiError`` when the engine ended a choice by itself."""
    streams = [client.generate(request) for request in requests]
    if len(streams) == 1:  # the usual case, with no generator in between for each token
        (stream,) = streams
        try:
            async for deltas in stream:
                clock.observe(0, deltas)
                _check(deltas)
                yield 0, deltas
        finally:
            await _close(stream)
        return
    merged = _merged(streams)
    try:
        async for position, deltas in merged:
            clock.observe(position, deltas)
            _check(deltas)
            yield position, deltas
    finally:
        await merged.aclose()


class WhileConnected:
    """A block that is cancelled, and ends with ``ClientGoneError``, when the connection closes.

    The work stays in its caller's task: a request reaches the engine in the same turn of the event loop in
    which it was read, before the next one is looked at. Only for requests whose body has been read:
    ``receive`` then has nothing to say but that its other side has gone.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_gone = self._is_over = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._num_cancels = task, task.cancelling()
        self._watcher = asyncio.ensure_future(_disconnected(self._receive))
        self._watcher.add_done_callback(self._end_block)

    async def __aexit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        self._is_over = True
        self._watcher.cancel()
        if not self._is_gone:
            return
        num_others = self._task.uncancel()
        if kind is asyncio.CancelledError and num_others <= self._num_cancels:
            raise ClientGoneError("the connection was closed before the answer was complete") from None

    def _end_block(self, watcher: asyncio.Future[None]) -> None:
        if not watcher.cancelled():
            watcher.exception()  # nothing can be heard of the connection any more, whatever the reason
        if not self._is_over:
            self._is_gone = True
            self._task.cancel()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, unless the connection closes before (see ``WhileConnected``)."""
    async with WhileConnected(receive):
        return await work


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """End tasks and wait until they have cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _check(deltas: list[Delta]) -> None:
    for delta in deltas:
        if delta.finish_reason == "error" or delta.error is not None:
            raise engine_fault(delta.error)
        if delta.finish_reason == "abort":
            raise ended_by_server()


async def _merged(streams: Sequence[AsyncIterator[list[Delta]]]) -> Deltas:
    pending = {asyncio.ensure_future(_next(stream)): number for number, stream in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=pending.__getitem__):
                number = pending.pop(task)
                deltas = task.result()
                if deltas is None:
                    continue
                pending[asyncio.ensure_future(_next(streams[number]))] = number
                yield number, deltas
    finally:
        await cancel(*pending)
        for stream in streams:
            await _close(stream)


async def _next(stream: AsyncIterator[list[Delta]]) -> list[Delta] | None:
    """None at the end: a task cannot raise ``StopAsyncIteration``."""
    return await anext(stream, None)


async def _close(stream: AsyncIterator[list[Delta]]) -> None:
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()

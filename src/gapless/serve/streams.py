"""Answers on their way to readers that may be slower than the engine.

One ``AnswerStream`` per request takes deltas from the one task that reads the wire and holds them for the one
task that reads the stream. What has not been taken is merged per choice, so a reader that never comes costs
no more memory than the answer's own tokens, and nobody ever waits for it. Invariants: deltas of a choice
arrive in order; ``take`` raises only after everything that arrived before the failure has been taken. Read
``process_client.py`` for both tasks.
"""

from __future__ import annotations

import asyncio

from gapless.serve.messages import Delta, TokenLogprob


class AnswerStream:
    """Of ``num_choices`` choices. All methods run on one event loop."""

    def __init__(self, num_choices: int, *, num_media_bytes: int = 0) -> None:
        self.num_choices, self.num_media_bytes = num_choices, num_media_bytes
        self.num_unfinished = num_choices
        self._pending: dict[int, Delta | _Merged] = {}
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_complete(self) -> bool:
        """The last delta of each choice has arrived; it may not have been taken."""
        return self.num_unfinished == 0

    @property
    def is_over(self) -> bool:
        """Complete, and everything has been taken."""
        return self.is_complete and not self._pending

    def put(self, delta: Delta) -> None:
        earlier = self._pending.get(delta.index)
        if earlier is None:
            self._pending[delta.index] = delta
        elif isinstance(earlier, _Merged):
            earlier.add(delta)
        else:
            self._pending[delta.index] = _Merged(earlier, delta)
        if delta.finish_reason is not None:
            self.num_unfinished -= 1
        if self._waiter is not None:
            self._wake()

    def fail(self, error: Exception) -> None:
        """No more deltas will come."""
        if not self.is_complete:
            self._error = error
            self._wake()

    async def take(self) -> list[Delta]:
        """What has arrived since the last call, one delta per choice; waits for something. Raises what
        ``fail`` was given."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pending, self._pending = self._pending, {}
        return [delta.build() if isinstance(delta, _Merged) else delta for delta in pending.values()]

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class _Merged:
    """Several deltas of one choice as one."""

    def __init__(self, first: Delta, second: Delta) -> None:
        self._first = self._last = first
        self._texts = [first.text]
        self._token_ids = list(first.token_ids)
        self._logprobs: list[list[TokenLogprob]] | None = None
        if first.logprobs is not None:
            self._logprobs = list(first.logprobs)
        self.add(second)

    def add(self, delta: Delta) -> None:
        if delta.text:
            self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        if self._logprobs is not None and delta.logprobs is not None:
            self._logprobs += delta.logprobs
        self._last = delta

    def build(self) -> Delta:
        first, last = self._first, self._last
        return Delta(
            first.request_id,
            first.index,
            "".join(self._texts),
            self._token_ids,
            self._logprobs,
            last.finish_reason,
            last.stop_reason,
            last.error,
            first.prompt_logprobs,
            last.num_cached_tokens,
        )

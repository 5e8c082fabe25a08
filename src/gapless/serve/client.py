"""The seam between the HTTP side and whatever runs the model.

The HTTP side knows this protocol only. ``process_client.py`` implements it over the engine process; tests use
one that answers from a script. Invariants: every stream ends, with a final delta or an exception; a stream
that its reader gives up (closes, cancels) aborts its request; one slow reader never holds up another.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from gapless.errors import GaplessError
from gapless.serve.messages import Delta, EmbedRequest, EngineInfo, GenerateRequest


class EngineDeadError(GaplessError):
    """The engine process is gone or its loop has failed: a 5xx for every request."""


class EngineBusyError(GaplessError):
    """The queue is full: 429, try again after ``retry_after_s``."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDrainingError(GaplessError):
    """The server is shutting down: 503."""


class EngineClient(Protocol):
    """What the HTTP side needs of an engine. All methods run on one event loop."""

    @property
    def info(self) -> EngineInfo: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[list[Delta]]:
        """Deltas of all choices, as they come; several in one list when the reader is slower than the engine.

        Raises ``RequestError`` (refused), ``EngineBusyError``, ``EngineDrainingError`` or
        ``EngineDeadError``. Closing the iterator early aborts the request.
        """

    async def embed(self, request: EmbedRequest) -> list[float]: ...

    async def report(self) -> dict[str, Any]:
        """The report schema of ``graphs/report.py``."""

    async def reset_prefix_cache(self) -> None:
        """Returns once no later request finds what is cached now."""

    def stats(self) -> dict[str, Any]:
        """The last statistics the engine sent; see ``stats.py`` for the fields."""

    def step_age_s(self) -> float | None:
        """Seconds since the loop last showed life while it has work; None before it is ready."""

    @property
    def is_healthy(self) -> bool: ...

    @property
    def is_draining(self) -> bool:
        """Shutting down: what runs is finished, new requests are refused. Not healthy any more."""

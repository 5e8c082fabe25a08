"""The seam between the HTTP side and whatever runs the model.

The HTTP side knows this protocol only. ``process_client.py`` implements it over one engine process,
``replicas.py`` over several; tests use one that answers from a script. Invariants: every stream ends, with a
final delta or an exception; a stream that its reader gives up (closes, cancels) aborts its request; one slow
reader never holds up another.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from gapless.errors import GaplessError
from gapless.serve.messages import Delta, EmbedRequest, EngineInfo, GenerateRequest


class EngineDeadError(GaplessError):
    """The engine process is gone or its loop has failed: a 5xx for every request."""


class ReplicaLostError(EngineDeadError):
    """One of several engine processes has died in the middle of this request; others go on.

    ``may_restart``: the request was marked ``is_whole``, and may be asked again from its beginning."""

    def __init__(self, message: str, *, may_restart: bool = False) -> None:
        super().__init__(message)
        self.may_restart = may_restart


class EngineRestartingError(GaplessError):
    """Every replica is dead and at least one is being started again: 503, try again soon."""


class EngineBusyError(GaplessError):
    """The queue is full: 429, try again after ``retry_after_s``."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDrainingError(GaplessError):
    """The server is shutting down: 503."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaView:
    """One engine process as operators see it."""

    index: int
    state: Literal["ready", "starting", "dead"]
    """``starting``: again, after a death; ``dead``: and not to be started again."""
    is_healthy: bool
    pid: int | None
    num_inside: int = 0
    """Choices that run or wait there."""
    load_tokens: int = 0
    """Outstanding tokens, as the router counts them."""
    num_restarts: int = 0
    num_routed: dict[str, int] = field(default_factory=dict)
    """Requests sent there, by the router's reason; ``retry``: another replica's death brought them."""
    environment: dict[str, str] = field(default_factory=dict)
    """What its process was told beside the options, such as ``CUDA_VISIBLE_DEVICES``."""
    last_death: str | None = None
    stats: dict[str, Any] = field(default_factory=dict)
    """As ``EngineClient.stats``, with totals that go on over restarts."""


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

    def replicas(self) -> list[ReplicaView]:
        """One per engine process; ``stats`` is their sum."""


class ManagedClient(EngineClient, Protocol):
    """What the owner of the engine, ``server.py``, needs besides."""

    async def start(self, progress: Callable[[str, int, int], None] | None = None) -> None: ...

    async def close(self, *, drain_s: float = 0.0) -> int: ...

    def begin_drain(self) -> None: ...

    async def wait_idle(self, limit_s: float) -> bool: ...

    async def wait_dead(self) -> EngineDeadError: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def num_inside(self) -> int: ...

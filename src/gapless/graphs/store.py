"""The store: who owns captured graphs, their pool and their outputs.

One store is one pool, so everything in it must never overlap in time (prefill, decode, head and sampling of
one stream). It is built, captured, then *sealed*: after that a miss runs eagerly, and asking for a capture is
an error. Outputs leave the pool by a copy inside the graph into a buffer of maximum size, shared by every
size; so no graph keeps its last output alive, and a result is valid until the next run. Release drops graphs
first, memory second.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapless.errors import CaptureClosedError, CaptureError, GraphError
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.capture import capture_pass, capture_program
from gapless.graphs.device import get_device
from gapless.graphs.device.base import GraphDevice, MemoryReading, Pool
from gapless.graphs.modes import Phase, RuntimeMode, Strategy
from gapless.graphs.peers import Peers
from gapless.graphs.program import Program


class SharedPool:
    """Graph memory for several stores whose graphs never run at the same time.

    The pool is made when the first store captures and released when the last one is released; a store that
    captures after that gets a fresh pool, because a handle whose last graph has gone must not be reopened
    (vLLM #53682). Who runs graphs of the pool holds it by ``use``.
    """

    def __init__(self, device: GraphDevice) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._pool: Pool | None = None
        self._users: set[int] = set()

    @classmethod
    def on(cls, torch_device: str | torch.device) -> SharedPool:
        """A pool on a torch device. Raises ``ConfigError`` for one without graphs."""
        return cls(get_device(torch_device))

    @property
    def is_busy_here(self) -> bool:
        """True on the thread that is inside ``use``."""
        return self._thread == threading.get_ident()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Hold the pool; other threads wait. Raises ``GraphError`` from within a step of the pool itself,
        whose intermediate results would be overwritten."""
        if self.is_busy_here:
            raise GraphError("this graph memory is in use by the step that is running: not from within it")
        with self._lock:
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                self._thread = None

    @property
    def num_users(self) -> int:
        return len(self._users)

    @property
    def num_bytes(self) -> int:
        return self._pool.num_bytes if self._pool is not None else 0

    def open(self, user: object) -> Pool:
        """The pool, made if there is none; ``user`` keeps it until ``leave``."""
        self._users.add(id(user))
        self._pool = self._pool or self.device.new_pool()
        return self._pool

    def owns(self, tensor: Tensor) -> bool:
        return self._pool is not None and self._pool.owns(tensor)

    def leave(self, user: object) -> None:
        """Give the memory back if ``user`` was the last. Its graphs must have been reset before."""
        self._users.discard(id(user))
        if not self._users and self._pool is not None:
            self._pool.release()
            self._pool = None


class StoreState(enum.StrEnum):
    BUILDING = "building"
    CAPTURING = "capturing"
    SEALED = "sealed"
    RELEASED = "released"


class GraphKey(NamedTuple):
    """What identifies a graph inside a store."""

    phase: Phase
    mode: RuntimeMode
    descriptor: BatchDescriptor

    @property
    def text(self) -> str:
        """For people: ``decode size 24, 8 requests``."""
        _, requests, uniform, has_lora, variant = self.descriptor
        parts = [f"{self.phase} size {self.descriptor.num_tokens}"]
        parts += [f"{requests} requests"] if requests != 1 else []
        parts += ["uniform"] if uniform else []
        parts += ["with adapters"] if has_lora else []
        parts += [f"variant {variant}"] if variant else []
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddingTiming:
    """Measured at start-up for a size with a wide gap below it: one replay against an eager step of the
    fewest tokens that would be padded up to it.
    """

    graph_s: float
    eager_s: float
    eager_tokens: int

    @property
    def is_graph_faster(self) -> bool:
        return self.graph_s <= self.eager_s


@dataclass(kw_only=True, slots=True)
class LedgerRow:
    """What one graph cost and what it did since."""

    key: GraphKey
    strategy: Strategy
    capture_s: float
    pool_bytes: int
    """Growth of the pool by this capture; small sizes live in memory that larger ones made, so often 0."""
    driver_bytes: int
    """Device memory that disappeared beside the pool (graph objects, library workspaces); 0 on a CPU."""
    num_nodes: int
    num_memsets: int
    """Of these nodes, those that make every launch slow; on CUDA most have given way to kernels."""
    num_segments: int
    num_breaks: int
    replays: int = 0
    tokens: int = 0
    padding: int = 0
    padding_timing: PaddingTiming | None = None

    def to_dict(self) -> dict[str, Any]:
        descriptor = self.key.descriptor
        return {
            "phase": str(self.key.phase),
            "strategy": str(self.strategy),
            "num_tokens": descriptor.num_tokens,
            "num_reqs": descriptor.num_reqs,
            "uniform": descriptor.uniform,
            "nodes": self.num_nodes,
            "memsets": self.num_memsets,
            "segments": self.num_segments,
            "breaks": self.num_breaks,
            "capture_s": round(self.capture_s, 6),
            "pool_bytes": self.pool_bytes,
            "driver_bytes": self.driver_bytes,
            "replays": self.replays,
            "tokens": self.tokens,
            "padding": self.padding,
            "mean_padding": round(self.padding / self.replays, 3) if self.replays else 0.0,
            "padding_timing": asdict(self.padding_timing) if self.padding_timing is not None else None,
        }


@dataclass(slots=True)
class GraphEntry:
    """A captured graph, the views its outputs appear in, and its row in the ledger."""

    program: Program
    outputs: Any
    row: LedgerRow


@dataclass(slots=True)
class FailedCapture:
    key: GraphKey
    message: str
    cause: str
    """One line, equal for sizes that failed for the same reason."""


class GraphStore:
    """Pool, entries and ledger of one set of graphs that never overlap in time."""

    def __init__(
        self,
        device: GraphDevice,
        *,
        pool: SharedPool | None = None,
        stays_open: bool = False,
        peers: Peers | None = None,
    ) -> None:
        """``pool`` is shared with other stores; without it the store has one of its own. ``stays_open``:
        captures may go on between steps, for graphs whose keys nobody knows at start-up. ``peers``: the
        processes that capture everything of this store at the same time."""
        if pool is not None and pool.device is not device:
            raise GraphError(f"a pool of {pool.device.torch_device} cannot serve {device.torch_device}")
        self.device, self.peers = device, peers
        self.state = StoreState.BUILDING
        self.failures: list[FailedCapture] = []
        self.shared_pool = pool or SharedPool(device)
        self._stays_open = stays_open
        self._pool: Pool | None = None
        self._entries: dict[GraphKey, GraphEntry] = {}
        self._outputs: dict[str, Tensor] = {}

    @property
    def is_capturing(self) -> bool:
        return self.state is StoreState.CAPTURING

    @property
    def ledger(self) -> list[LedgerRow]:
        return [entry.row for entry in self._entries.values()]

    @property
    def pool_bytes(self) -> int:
        return self._pool.num_bytes if self._pool is not None else 0

    def output(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The shared output buffer ``name``, made at its maximum size before the first capture.

        Runners that name the same output share it. Raises ``GraphError`` for a request that would have to
        move a buffer that exists (captured graphs hold its address).
        """
        found = self._outputs.get(name)
        if found is None:
            if self.state is not StoreState.BUILDING:
                raise GraphError(f"output {name!r} must be reserved before the first capture")
            found = self._outputs[name] = torch.zeros(shape, dtype=dtype, device=self.device.torch_device)
        if found.dtype != dtype or found.shape[1:] != shape[1:] or found.shape[0] < shape[0]:
            raise GraphError(
                f"output {name!r} is {tuple(found.shape)} {found.dtype}; {shape} {dtype} does not fit. "
                "Reserve the largest size first"
            )
        return found

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Open the store for captures; sealed when the block ends well (unless it stays open), back to
        building when it raises."""
        if self.state is not StoreState.BUILDING:
            raise CaptureClosedError(f"this store is {self.state}: captures are closed")
        self._pool = self.shared_pool.open(self)
        self.state = StoreState.CAPTURING
        try:
            warming_up = nullcontext() if self.peers is None else self.peers.warming_up()
            with capture_pass(self.device, collects=not self._stays_open), warming_up:
                yield
        except BaseException:
            self.state = StoreState.BUILDING
            raise
        self.state = StoreState.BUILDING if self._stays_open else StoreState.SEALED

    def capture(self, key: GraphKey, fn: Callable[[], Any], strategy: Strategy) -> GraphEntry:
        """Capture ``fn`` under ``key``. Raises ``CaptureError`` with everything restored and nothing
        stored."""
        if not self.is_capturing or self._pool is None:
            raise CaptureClosedError(
                f"no graph for {key} and the store is {self.state}: this step must run eagerly"
            )
        before = self.device.memory(self._pool)
        start = time.perf_counter()
        program, outputs = capture_program(
            fn, device=self.device, pool=self._pool, strategy=strategy, peers=self.peers, what=key.text
        )
        capture_s = time.perf_counter() - start
        after = self.device.memory(self._pool)
        pool_bytes = after.pool_bytes - before.pool_bytes
        row = LedgerRow(
            key=key,
            strategy=strategy,
            capture_s=capture_s,
            pool_bytes=pool_bytes,
            driver_bytes=self._driver_bytes(before, after),
            num_nodes=program.num_nodes,
            num_memsets=program.num_memsets,
            num_segments=program.num_segments,
            num_breaks=program.num_breaks,
        )
        entry = self._entries[key] = GraphEntry(program, outputs, row)
        return entry

    def _driver_bytes(self, before: MemoryReading, after: MemoryReading) -> int:
        """What vanished from the device beside the pool's growth (on a CPU others move that reading)."""
        if self.device.torch_device.type == "cpu":
            return 0
        grown = max(0, after.pool_bytes - before.pool_bytes)
        return max(0, before.free_bytes - after.free_bytes - grown)

    def record_failure(self, key: GraphKey, error: CaptureError) -> FailedCapture:
        """Note a size that stays eager. The message is one line where the phase has a failure with the same
        cause: that one has the hints."""
        same = [f for f in self.failures if f.key.phase is key.phase and f.cause == error.cause]
        message = f"as size {same[0].key.descriptor.num_tokens}: {error.cause}" if same else str(error)
        failure = FailedCapture(key, message, error.cause)
        self.failures.append(failure)
        return failure

    def get(self, key: GraphKey) -> GraphEntry | None:
        return self._entries.get(key)

    def release(self) -> None:
        """Drop every graph, then the pool and the outputs. The store cannot be used afterwards; safe to call
        twice."""
        if self.state is StoreState.RELEASED:
            return
        self.device.synchronize()  # nothing may be running in memory that is about to go
        for entry in self._entries.values():
            entry.outputs = None
            entry.program.reset()
        self._entries.clear()
        self._outputs.clear()
        if self._pool is not None:
            self._pool = None
            self.shared_pool.leave(self)
        self.state = StoreState.RELEASED

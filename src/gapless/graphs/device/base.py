"""What the runtime asks of a device that can record and replay work: the seam between ``cuda`` and
``emulated``.

A ``GraphDevice`` records one *segment* at a time into a *pool*. It knows nothing of sizes, strategies or
models. Invariants: segments are recorded on one long-lived stream; a segment replays on the stream that is
current at the call; tensors allocated while recording live in the pool and their blocks are reused once their
last Python owner dies. Read ``emulated.py`` next for the meaning of each method on a CPU, ``cuda.py`` for the
real thing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """One reading, in bytes. ``pool_bytes`` is 0 where no pool was asked about."""

    pool_bytes: int
    allocated_bytes: int
    free_bytes: int
    """What the device (driver) still has; used for the cost that no allocator sees."""


class Pool(Protocol):
    """Memory shared by graphs that never overlap in time."""

    @property
    def num_bytes(self) -> int: ...

    def owns(self, tensor: torch.Tensor) -> bool:
        """True when the tensor's memory lies in this pool. Not to be asked while a segment is open."""

    def release(self) -> None:
        """Give the memory back. All segments recorded into the pool must have been reset before."""


class Segment(Protocol):
    """A recorded stretch of work."""

    @property
    def num_nodes(self) -> int:
        """Kernels (or emulated ops) in it; -1 where the device cannot tell."""

    @property
    def num_memsets(self) -> int:
        """Memset nodes among them, which make its launch slow on CUDA; -1 where the device cannot tell."""

    @property
    def launch(self) -> Callable[[], None] | None:
        """A call that does what ``replay`` does and runs no Python, until ``reset``; None where there is
        none."""

    def replay(self) -> None: ...

    def reset(self) -> None:
        """Drop the recording; ``replay`` raises afterwards. Safe to call twice."""


class GraphDevice(Protocol):
    name: str
    torch_device: torch.device
    supports_graphs: bool
    num_warmups: int
    """Warm-up runs before a capture: two on CUDA, of which sizes after the first need only one; none where
    recording has no lazy state (the runner then warms up one size per phase, for the model's own)."""

    def new_pool(self) -> Pool: ...

    def begin_segment(self, pool: Pool) -> None:
        """Start recording. Raises ``GraphError`` when a segment is already open in this process."""

    def end_segment(self) -> Segment:
        """Stop recording and make it replayable."""

    def abandon_segment(self) -> None:
        """After an exception while recording: end the recording ignoring its error and restore every state
        that the recording touched (stream, pool routing, random generator), so that eager work and later
        captures go on. A no-op when no segment is open."""

    def is_recording(self) -> bool: ...

    def pause_recording(self) -> AbstractContextManager[None]:
        """For Python that must not notice the recording, such as the guards of ``torch.compile``, which do
        not work under a dispatch mode: inside the block nothing is recorded. A no-op where recording is the
        driver's business, and when no segment is open."""

    def resume_recording(self) -> AbstractContextManager[None]:
        """Inside ``pause_recording``: the block is recorded again. The segment may be ended and another begun
        in it. A no-op when nothing is paused."""

    def record_call(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        abstract: Callable[..., Any],
    ) -> Any:
        """Call compiled code, of which a device may see nothing but the call: ``fn(*args)`` as one node.
        ``abstract`` takes the same arguments and says, on fake tensors, what ``fn`` returns: tensors,
        numbers, and tuples or lists of them."""

    @property
    def last_op(self) -> str | None:
        """The last op seen in the open or just abandoned segment, for error messages; None where unknown."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory with the same shape, strides and dtype, without owning it: the caller guarantees
        that the memory outlives every use. Never a recorded node."""

    def stream_scope(self) -> AbstractContextManager[None]:
        """Run the block on the long-lived stream that captures use (a no-op on a CPU)."""

    def step_scope(self) -> AbstractContextManager[None]:
        """``stream_scope`` for steps that follow each other closely: what was queued before the block is
        waited for, but nothing outside waits for the block. Whoever reads what a step has written waits for
        its result on the host first."""

    def synchronize(self) -> None: ...

    def memory(self, pool: Pool | None = None) -> MemoryReading: ...

    def keep_random_state(self) -> Callable[[], None]:
        """What puts the default generators, the CPU's too, back to where they are. Not while recording."""

    def trim(self) -> None:
        """Give back to the system what the process has allocated for tensors that are gone. It waits for the
        device; pools keep what is theirs."""

    def time(self, fn: Callable[[], object], *, repeats: int) -> float:
        """Median seconds of ``fn`` over ``repeats`` runs, finished work included."""

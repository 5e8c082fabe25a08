"""The CUDA device: segments are CUDA graphs, captured directly by ``capture_begin`` and ``capture_end``.

The helper ``torch.cuda.graph`` would synchronise and empty caches for every segment. All captures of a device
use one long-lived stream (cuBLAS workspaces and pool blocks belong to a stream) and the thread-local error
mode. Invariants: a pool handle stays open from its first capture to ``release`` by an *anchor* graph, because
reopening a handle whose last graph has gone trips an assertion in the allocator (vLLM #53682); no graph is
destroyed before its pool is released, because destroying one may free the cuBLAS workspace that others were
captured with (PyTorch #193402). Between the end of a capture and its first replay memset nodes give way to
kernels (``memset_nodes.py``). Read ``cuda_runtime.py`` for the calls themselves.
"""

from __future__ import annotations

import logging
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from gapless.errors import CaptureError, GraphError
from gapless.graphs.device.base import MemoryReading, Pool
from gapless.graphs.device.cuda_runtime import CudaRuntime, PoolHandle
from gapless.graphs.device.exclusive import claim_recording, release_recording
from gapless.graphs.device.memset_nodes import MemsetCount

logger = logging.getLogger(__name__)


class CudaPool:
    """A graph memory pool handle, the graphs that were captured into it, and what they hold."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._handles: list[PoolHandle] = [runtime.new_pool_handle()]
        self._ranges: list[tuple[int, int]] = []
        self._foreign: set[int] = set()
        self.num_live_segments = 0
        self.graphs: list[Any] = []
        """Every graph captured into the pool, finished or failed: reset together by ``release``."""

    @property
    def handle(self) -> PoolHandle:
        """The handle that captures go to; earlier ones still hold the graphs captured before a failure."""
        if not self._handles:
            raise GraphError("this graph pool was released; ask the device for a new one")
        return self._handles[-1]

    def renew_handle(self) -> PoolHandle:
        """Retire the current handle: after a capture that did not end, the pinned-memory allocator records to
        it for good (torch 2.11), and beginning another capture with it raises.
        """
        self._handles.append(self._runtime.new_pool_handle())
        return self.handle

    @property
    def num_bytes(self) -> int:
        if not self._handles:
            return 0
        self._read_ranges()
        return sum(end - start for start, end in self._ranges)

    def owns(self, tensor: Tensor) -> bool:
        # A snapshot per question would cost milliseconds. Ranges only grow, and whoever asks keeps foreign
        # tensors alive, so both answers can be remembered until the next capture.
        address = tensor.data_ptr()
        if self._is_inside(address):
            return True
        if address in self._foreign:
            return False
        self._read_ranges()
        if self._is_inside(address):
            return True
        self._foreign.add(address)
        return False

    def forget_foreign(self) -> None:
        self._foreign.clear()

    def release(self) -> None:
        """Destroy the graphs and return the memory to the driver. Safe to call twice."""
        if not self._handles:
            return
        if self.num_live_segments:
            raise GraphError(
                f"{self.num_live_segments} segments of this pool are still in use; reset their programs first"
            )
        self._runtime.synchronize()
        for graph in self.graphs:
            graph.reset()
        self.graphs.clear()
        self._handles.clear()
        self._ranges = []
        self._runtime.empty_cache()

    def _is_inside(self, address: int) -> bool:
        i = bisect_right(self._ranges, (address, _MAX_ADDRESS)) - 1
        return i >= 0 and address < self._ranges[i][1]

    def _read_ranges(self) -> None:
        self._ranges = sorted(span for handle in self._handles for span in self._runtime.pool_ranges(handle))


class CudaSegment:
    """One captured CUDA graph. ``reset`` retires it; the pool destroys it."""

    def __init__(
        self, launch: Callable[[], None], pool: CudaPool, *, num_nodes: int, num_memsets: int
    ) -> None:
        """``launch`` is bound to the graph."""
        self.launch: Callable[[], None] | None = launch
        self._pool = pool
        self._num_nodes, self._num_memsets = num_nodes, num_memsets
        pool.num_live_segments += 1

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @property
    def num_memsets(self) -> int:
        return self._num_memsets

    def replay(self) -> None:
        if self.launch is None:
            raise GraphError("this segment was reset; capture it again")
        self.launch()

    def reset(self) -> None:
        if self.launch is not None:
            self.launch = None
            self._pool.num_live_segments -= 1


@dataclass(frozen=True, slots=True)
class _OpenSegment:
    graph: Any
    pool: CudaPool


class CudaDevice:
    """A ``GraphDevice`` for one CUDA device. ``runtime`` is replaced in tests only."""

    def __init__(self, torch_device: torch.device, *, runtime: CudaRuntime | None = None) -> None:
        self.name = "cuda"
        self.torch_device = torch_device
        self.supports_graphs = True
        self.num_warmups = (
            2  # the second run sees what the first one made lazily (autotuned kernels, workspaces)
        )
        self._runtime = runtime or CudaRuntime(torch_device)
        self._stream_made: Any = None
        self._open: _OpenSegment | None = None

    @property
    def last_op(self) -> str | None:
        return None

    def new_pool(self) -> CudaPool:
        return CudaPool(self._runtime)

    def begin_segment(self, pool: Pool) -> None:
        assert isinstance(pool, CudaPool), f"pool of another device: {pool!r}"
        handle = pool.handle
        if self._runtime.current_stream() != self._stream:
            raise GraphError("segments are captured on the device's own stream: begin inside stream_scope()")
        claim_recording(self)
        try:
            if not pool.graphs:
                pool.graphs.append(self._capture_tiny(handle))
            pool.forget_foreign()
            graph = self._runtime.new_editable_graph()
            self._begin(graph, pool)
        except BaseException:
            release_recording(self)
            raise
        self._open = _OpenSegment(graph, pool)

    def end_segment(self) -> CudaSegment:
        opened = self._open
        if opened is None:
            raise GraphError("no segment is open")
        num_nodes = self._runtime.count_nodes(self._stream)  # while the capture is open it can be asked
        try:
            has_work = self._runtime.end(opened.graph)
        except RuntimeError as error:
            self._clean_up_failed_end(opened)
            raise CaptureError(_explain(error)) from error
        try:
            memsets = self._runtime.replace_memsets(opened.graph) if has_work else _NO_MEMSETS
            self._runtime.instantiate(opened.graph)
        except RuntimeError as error:  # the capture itself has ended well: there is nothing to undo
            raise CaptureError(f"the captured graph cannot be made ready for replays: {error}") from error
        finally:
            self._close(opened)
        return CudaSegment(
            self._runtime.launch_of(opened.graph),
            opened.pool,
            num_nodes=num_nodes if has_work else 0,
            num_memsets=memsets.left,
        )

    def abandon_segment(self) -> None:
        opened = self._open
        if opened is None:
            return
        with self._runtime.use_stream(self._stream):  # no waiting on other streams: this one is capturing
            try:
                self._runtime.end(opened.graph)
            except RuntimeError:  # expected: the original error has made the capture invalid
                self._clean_up_failed_end(opened)
            else:
                self._close(opened)

    def is_recording(self) -> bool:
        return self._open is not None

    def pause_recording(self) -> AbstractContextManager[None]:
        return nullcontext()

    def resume_recording(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record_call(
        self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], *, abstract: Callable[..., Any]
    ) -> Any:
        return fn(*args)

    def alias(self, tensor: Tensor) -> Tensor:
        return self._runtime.alias(tensor)

    @contextmanager
    def stream_scope(self) -> Iterator[None]:
        """Work queued before the block is waited for by it, and its work by what comes after."""
        outer = self._runtime.current_stream()
        if outer == self._stream:
            yield
            return
        self._stream.wait_stream(outer)
        try:
            with self._runtime.use_stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    def step_scope(self) -> AbstractContextManager[None]:
        return (
            _StepScope(self._runtime, self._stream)
            if self._runtime.is_current_device()
            else self.stream_scope()
        )

    def synchronize(self) -> None:
        self._runtime.synchronize()

    def memory(self, pool: Pool | None = None) -> MemoryReading:
        return MemoryReading(
            pool_bytes=pool.num_bytes if pool is not None else 0,
            allocated_bytes=self._runtime.memory_allocated(),
            free_bytes=self._runtime.free_memory(),
        )

    def keep_random_state(self) -> Callable[[], None]:
        of_cpu, of_device = torch.get_rng_state(), self._runtime.random_state()

        def put_back() -> None:
            torch.set_rng_state(of_cpu)
            try:
                self._runtime.set_random_state(of_device)
            except RuntimeError as error:  # it may still believe that it is being captured
                logger.warning("draws of a failed capture could not be undone: %s", error)

        return put_back

    def trim(self) -> None:
        self._runtime.empty_cache()

    def time(self, fn: Callable[[], object], *, repeats: int) -> float:
        seconds = []
        for _ in range(repeats):
            start, end = self._runtime.new_timing_event(), self._runtime.new_timing_event()
            start.record()
            fn()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        return statistics.median(seconds)

    @property
    def _stream(self) -> Any:
        if self._stream_made is None:
            self._stream_made = self._runtime.new_stream()
            self._runtime.load_tiny_kernels()
        return self._stream_made

    def _begin(self, graph: Any, pool: CudaPool) -> None:
        try:
            self._runtime.begin(graph, pool.handle)
        except RuntimeError:
            with suppress(RuntimeError):  # raises when the begin did not get as far as the allocator
                self._runtime.stop_pool_routing(pool.handle)
                self._runtime.release_pool_use(pool.handle)
            pool.graphs.append(graph)
            raise

    def _close(self, opened: _OpenSegment) -> None:
        opened.pool.graphs.append(opened.graph)
        self._open = None
        release_recording(self)

    def _clean_up_failed_end(self, opened: _OpenSegment) -> None:
        """Undo what an invalid capture leaves behind (seen on torch 2.11).

        The allocator may still route to the pool; the pool's use count is never given back, because a graph
        releases it only if its capture ended well; the default generator believes that it is being captured,
        and only a later capture that succeeds on the same stream sets it right. The graph object stays alive:
        the pinned-memory allocator keeps a callback into it. That later capture is the anchor of the pool's
        next handle.
        """
        self._close(opened)
        with suppress(RuntimeError):  # raises where PyTorch has done it already
            self._runtime.stop_pool_routing(opened.pool.handle)
        self._runtime.release_pool_use(opened.pool.handle)
        try:
            opened.pool.graphs.append(self._capture_tiny(opened.pool.renew_handle()))
        except RuntimeError as error:
            logger.warning("the random generator could not be restored after a failed capture: %s", error)

    def _capture_tiny(self, handle: PoolHandle) -> Any:
        graph = self._runtime.new_graph()
        self._runtime.begin(graph, handle)
        self._runtime.do_some_work()
        self._runtime.end(graph)
        return graph


class _StepScope:
    """``CudaDevice.step_scope``. Events between two streams, both ways in every step, cost 50 us of CPU and a
    gap between steps; a stream that is idle, as the caller's is between steps, needs none."""

    __slots__ = ("_outer", "_runtime", "_stream")

    def __init__(self, runtime: CudaRuntime, stream: Any) -> None:
        self._runtime, self._stream = runtime, stream
        self._outer: Any = None

    def __enter__(self) -> None:
        outer = self._runtime.current_stream()
        if outer == self._stream:
            return
        if not outer.query():
            self._stream.wait_stream(outer)
        self._runtime.set_stream(self._stream)
        self._outer = outer

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._outer is not None:
            self._runtime.set_stream(self._outer)


_MAX_ADDRESS = 1 << 64
_NO_MEMSETS = MemsetCount(0, 0)


def _explain(error: RuntimeError) -> str:
    if "unjoined" in str(error):
        return (
            "a stream that was forked inside the segment was not joined before the segment ended; let the "
            "current stream wait for it (torch.cuda.current_stream().wait_stream(side)) before the forward "
            f"returns or reaches a break: {error}"
        )
    return f"the capture is invalid: {error}"

"""The calls into CUDA that capturing needs, one small method each, and nothing that decides.

``cuda.py`` holds the order of these calls, which is where captures go wrong; it is tested on a CPU against a
fake of this class. Functions that PyTorch does not promise are looked up with ``hasattr``, never by version.
"""

from __future__ import annotations

import ctypes
import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from gapless.graphs.device.driver import load_driver
from gapless.graphs.device.layout import storage_bytes
from gapless.graphs.device.memset_nodes import UNKNOWN, MemsetCount, replace_memsets
from gapless.graphs.device.raw_graph import raw_graph_driver

PoolHandle = tuple[int, int]


class CudaRuntime:
    """``torch.cuda`` for one device."""

    def __init__(self, torch_device: torch.device) -> None:
        self._device = torch_device
        self._streams: dict[Any, Any] = {}

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self._device)

    def current_stream(self) -> Any:
        # Asked in every step: the object for the current stream is made once.
        which = torch._C._cuda_getCurrentStream(self._device.index)
        found = self._streams.get(which)
        if found is None:
            found = self._streams[which] = torch.cuda.current_stream(self._device)
        return found

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Its end makes the stream of before current again, and with it that stream's device, whatever the
        block has set."""
        return torch.cuda.stream(stream)

    def set_stream(self, stream: Any) -> None:
        """Make ``stream`` the thread's current one; the device must be the current one already."""
        torch.cuda.set_stream(stream)

    def is_current_device(self) -> bool:
        return torch.cuda.current_device() == self._device.index

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def new_pool_handle(self) -> PoolHandle:
        return torch.cuda.graph_pool_handle()

    def new_graph(self) -> Any:
        """A graph that the end of its capture makes ready for replays."""
        return torch.cuda.CUDAGraph()

    def new_editable_graph(self) -> Any:
        """One that ``instantiate`` makes ready. What was captured stays in host memory until its reset."""
        return torch.cuda.CUDAGraph(keep_graph=True)

    def begin(self, graph: Any, handle: PoolHandle) -> None:
        # Thread-local: what other threads do with the device cannot invalidate this capture.
        graph.capture_begin(pool=handle, capture_error_mode="thread_local")

    def end(self, graph: Any) -> bool:
        """End the capture; returns whether it recorded any work (PyTorch warns about empty graphs)."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            graph.capture_end()
        is_empty = False
        for warning in caught:
            if "CUDA Graph is empty" in str(warning.message):
                is_empty = True
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return not is_empty

    def replace_memsets(self, graph: Any) -> MemsetCount:
        """Kernels in place of the memset nodes of a captured graph that is not instantiated yet. Raises
        ``GraphError`` where the graph was spoilt by it."""
        driver = raw_graph_driver()
        return UNKNOWN if driver is None else replace_memsets(driver, graph.raw_cuda_graph())

    def instantiate(self, graph: Any) -> None:
        graph.instantiate()

    def launch_of(self, graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
        """What launches a graph that is ready: the function in C++, below a method in Python that looks for a
        tracker of inputs, which none has here."""
        return super(torch.cuda.CUDAGraph, graph).replay

    def count_nodes(self, stream: Any) -> int:
        """Nodes recorded so far by the capture that is open on ``stream``; -1 where the driver cannot be
        asked.
        """
        driver = load_driver(("cuStreamGetCaptureInfo_v2", "cuGraphGetNodes"))
        if driver is None:
            return -1
        status, graph, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t()
        failed = driver.cuStreamGetCaptureInfo_v2(
            ctypes.c_void_p(stream.cuda_stream), ctypes.byref(status), None, ctypes.byref(graph), None, None
        )
        if failed or not graph.value or driver.cuGraphGetNodes(graph, None, ctypes.byref(count)):
            return -1
        return count.value

    def stop_pool_routing(self, handle: PoolHandle) -> None:
        """Stop sending allocations to the pool after a capture that did not end. Raises if it did end."""
        torch._C._cuda_endAllocateToPool(self._device.index, handle)

    def release_pool_use(self, handle: PoolHandle) -> None:
        """Give back the use count that the begin of a capture took, where no graph will do it."""
        torch._C._cuda_releasePool(self._device.index, handle)

    def pool_ranges(self, handle: PoolHandle) -> list[tuple[int, int]]:
        """Address ranges (start, end) that the allocator holds for the pool."""
        return [
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in _snapshot(handle)
            if segment["device"] == self._device.index
            and tuple(segment.get("segment_pool_id", handle)) == tuple(handle)
        ]

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory_allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def free_memory(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def random_state(self) -> Any:
        """Of the device's default generator: seed and offset, without waiting for the device."""
        return torch.cuda.get_rng_state(self._device)

    def set_random_state(self, state: Any) -> None:
        """Raises ``RuntimeError`` while the generator is being captured, or believes so."""
        torch.cuda.set_rng_state(state, self._device)

    def load_tiny_kernels(self) -> None:
        """Run the kernel of ``do_some_work`` outside any capture (it loads lazily), with no default draw."""
        own = torch.Generator(self._device)
        torch.rand(1, device=self._device, generator=own)
        self.synchronize()

    def do_some_work(self) -> None:
        """One kernel that takes part in the default generator's bookkeeping."""
        torch.rand(1, device=self._device)

    def new_timing_event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)

    def alias(self, tensor: Tensor) -> Tensor:
        num_bytes = storage_bytes(tensor.shape, tensor.stride(), tensor.dtype)
        if num_bytes == 0:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
        storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, num_bytes)
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            storage, 0, tensor.shape, tensor.stride()
        )


def _snapshot(handle: PoolHandle) -> list[dict[str, Any]]:
    parameters = inspect.signature(torch.cuda.memory_snapshot).parameters
    if "mempool_id" not in parameters:
        return torch.cuda.memory_snapshot()
    if "include_traces" not in parameters:
        return torch.cuda.memory_snapshot(handle)
    return torch.cuda.memory_snapshot(handle, include_traces=False)

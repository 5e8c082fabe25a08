"""The driver's calls on a graph that is captured and not yet instantiated, and nothing that decides.

``memset_nodes.py`` edits such graphs and is tested on a CPU against a fake of ``RawGraphDriver``. Graphs,
nodes and functions are the driver's handles as integers. Edges carry data (a kernel may start before the one
ahead has ended), so they are asked for and added in the forms ``_v2``, whose binary interface is the same in
CUDA 12.3 to 13; every function has its argument types set, because a handle without one is cut to 32 bits.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any, NamedTuple

from gapless.graphs.device import fill_kernel
from gapless.graphs.device.driver import load_driver
from gapless.graphs.device.fill_kernel import Fill

KERNEL, MEMCPY, MEMSET, HOST, CHILD_GRAPH, EMPTY, WAIT_EVENT, RECORD_EVENT = range(8)
"""Types of nodes (``CUgraphNodeType``); there are more."""

_MEMORY_TYPE, _DEVICE_ORDINAL, _DEVICE_MEMORY = 2, 9, 2
_MAX_THREADS = 0


class DriverError(RuntimeError):
    """A call into the driver failed."""


class MemsetParams(ctypes.Structure):
    """``CUDA_MEMSET_NODE_PARAMS``: ``width`` counts elements, ``pitch`` bytes and only if ``height`` > 1."""

    _fields_ = (
        ("dst", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element_size", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class KernelParams(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS_v2``. ``kern`` and ``ctx`` are ignored where ``func`` is set."""

    _fields_ = (
        ("func", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("args", POINTER(c_void_p)),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    )


class EdgeData(ctypes.Structure):
    """``CUgraphEdgeData``: all zero for a full dependency."""

    _fields_ = (
        ("from_port", c_ubyte),
        ("to_port", c_ubyte),
        ("type", c_ubyte),
        ("reserved", c_ubyte * 5),
    )


class Edge(NamedTuple):
    """``target`` depends on ``source``; ``data`` is the 8 bytes of ``EdgeData``."""

    source: int
    target: int
    data: bytes


_OUT_HANDLE, _OUT_SIZE, _HANDLES, _EDGES = POINTER(c_void_p), POINTER(c_size_t), c_void_p, POINTER(EdgeData)

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (_OUT_HANDLE,),
    "cuCtxGetDevice": (POINTER(c_int),),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuModuleLoadData": (_OUT_HANDLE, c_char_p),
    "cuModuleGetFunction": (_OUT_HANDLE, c_void_p, c_char_p),
    "cuFuncGetAttribute": (POINTER(c_int), c_int, c_void_p),
    "cuGraphGetNodes": (c_void_p, _HANDLES, _OUT_SIZE),
    "cuGraphNodeGetType": (c_void_p, c_void_p),
    "cuGraphMemsetNodeGetParams": (c_void_p, POINTER(MemsetParams)),
    "cuGraphNodeGetDependencies_v2": (c_void_p, _HANDLES, _EDGES, _OUT_SIZE),
    "cuGraphNodeGetDependentNodes_v2": (c_void_p, _HANDLES, _EDGES, _OUT_SIZE),
    "cuGraphAddKernelNode_v2": (_OUT_HANDLE, c_void_p, _HANDLES, c_size_t, POINTER(KernelParams)),
    "cuGraphAddDependencies_v2": (c_void_p, _HANDLES, _HANDLES, _EDGES, c_size_t),
    "cuGraphDestroyNode": (c_void_p,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}


class RawGraphDriver:
    """One small method per question. All raise ``DriverError``. The context of the device whose graph it is
    must be current, as it is inside ``stream_scope``."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        for name, types in SIGNATURES.items():
            function = getattr(driver, name)
            function.argtypes, function.restype = types, c_int
        self._functions: dict[int, int | str] = {}
        """The fill kernel by context, or why that has none."""

    def nodes(self, graph: int) -> list[int]:
        count = c_size_t()
        self._call("cuGraphGetNodes", graph, None, count)
        nodes = (c_void_p * count.value)()
        if count.value:
            self._call("cuGraphGetNodes", graph, nodes, count)
        return _handles(nodes, count.value)

    def types(self, nodes: list[int]) -> list[int]:
        """In one pass without Python between two calls: a start asks for every node of every graph (0.4 us
        each on a slow CPU)."""
        found = (c_int * len(nodes))()
        start, size = ctypes.addressof(found), ctypes.sizeof(c_int)
        into = range(start, start + size * len(nodes), size)
        for error in filter(None, map(self._driver.cuGraphNodeGetType, nodes, into)):
            raise DriverError(f"cuGraphNodeGetType: {self._name(error)}")
        return list(found)

    def memset_params(self, node: int) -> MemsetParams:
        params = MemsetParams()
        self._call("cuGraphMemsetNodeGetParams", node, params)
        return params

    def edges(self, node: int) -> list[Edge]:
        """All edges that end or begin at ``node``."""
        into = self._neighbours("cuGraphNodeGetDependencies_v2", node)
        out_of = self._neighbours("cuGraphNodeGetDependentNodes_v2", node)
        return [Edge(other, node, data) for other, data in into] + [
            Edge(node, other, data) for other, data in out_of
        ]

    def is_on_device(self, address: int) -> bool:
        """Whether it is memory of the device whose context is current."""
        kind, owner, device = c_uint(), c_int(), c_int()
        self._call("cuPointerGetAttribute", ctypes.addressof(kind), _MEMORY_TYPE, address)
        self._call("cuPointerGetAttribute", ctypes.addressof(owner), _DEVICE_ORDINAL, address)
        self._call("cuCtxGetDevice", device)
        return kind.value == _DEVICE_MEMORY and owner.value == device.value

    def fill_function(self) -> int:
        """The fill kernel, loaded once per context and never unloaded: graphs hold it."""
        context = c_void_p()
        self._call("cuCtxGetCurrent", context)
        if not context.value:
            raise DriverError("no context is current")
        if context.value not in self._functions:
            self._functions[context.value] = self._load_fill()
        found = self._functions[context.value]
        if isinstance(found, str):
            raise DriverError(found)
        return found

    def add_fill(self, graph: int, function: int, fill: Fill) -> int:
        """A new node without edges; the driver copies the arguments."""
        sizes = (fill.dst, fill.pitch, fill.width, fill.height)
        values = [*map(c_uint64, sizes), c_uint(fill.pattern)]
        args = (c_void_p * len(values))(*map(ctypes.addressof, values))
        params = KernelParams(func=function, grid=fill.grid, block=(fill_kernel.BLOCK, 1, 1), args=args)
        node = c_void_p()
        self._call("cuGraphAddKernelNode_v2", node, graph, None, 0, params)
        assert node.value
        return node.value

    def add_edges(self, graph: int, edges: list[Edge]) -> None:
        count = len(edges)
        if not count:
            return
        sources = (c_void_p * count)(*(edge.source for edge in edges))
        targets = (c_void_p * count)(*(edge.target for edge in edges))
        data = (EdgeData * count).from_buffer_copy(b"".join(edge.data for edge in edges))
        self._call("cuGraphAddDependencies_v2", graph, sources, targets, data, count)

    def destroy(self, node: int) -> None:
        """Removes the node and its edges."""
        self._call("cuGraphDestroyNode", node)

    def _load_fill(self) -> int | str:
        module, function, max_threads = c_void_p(), c_void_p(), c_int()
        try:
            self._call("cuModuleLoadData", module, fill_kernel.PTX)
            self._call("cuModuleGetFunction", function, module, fill_kernel.NAME)
            # A driver that loads lazily compiles it now, where a failure does no harm, not at instantiation.
            self._call("cuFuncGetAttribute", max_threads, _MAX_THREADS, function)
        except DriverError as error:
            return f"the fill kernel cannot be loaded: {error}"
        if not function.value or max_threads.value < fill_kernel.BLOCK:
            return f"the fill kernel cannot be launched: blocks have at most {max_threads.value} threads"
        return function.value

    def _neighbours(self, name: str, node: int) -> list[tuple[int, bytes]]:
        """Asked with room to spare, as asking for their number alone is an error where edges hold data."""
        capacity = 8
        while True:
            nodes, data, count = (c_void_p * capacity)(), (EdgeData * capacity)(), c_size_t(capacity)
            self._call(name, node, nodes, data, count)
            if count.value < capacity:
                return list(zip(_handles(nodes, count.value), map(bytes, data), strict=False))
            capacity *= 4

    def _call(self, name: str, *args: Any) -> None:
        error = getattr(self._driver, name)(*args)
        if error:
            raise DriverError(f"{name}: {self._name(error)}")

    def _name(self, error: int) -> str:
        text = c_char_p()
        if self._driver.cuGetErrorName(error, text) or text.value is None:
            return f"error {error}"
        return text.value.decode()


@functools.cache
def raw_graph_driver() -> RawGraphDriver | None:
    """None where the driver is missing or older than CUDA 12.3, the first with data on edges."""
    driver = load_driver(tuple(SIGNATURES))
    return None if driver is None else RawGraphDriver(driver)


def _handles(array: Any, count: int) -> list[int]:
    return [handle or 0 for handle in array[:count]]

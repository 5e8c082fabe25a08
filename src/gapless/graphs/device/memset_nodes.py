"""Kernels in place of memset nodes, before a captured graph is instantiated.

A graph that holds memset nodes is launched slowly: a prefill of 2,048 tokens with 28 of them, which cuBLAS
puts there, took 41 us of CPU where graphs of kernels alone take 5 (H200, *lead*). ``replace_memsets`` gives
each a kernel that writes the same bytes, with the same edges. What cannot be replaced is left and counted.

Invariant: a graph is never left half edited. All questions are asked before the first change; until the
first memset node is removed a failure takes the new nodes out again; from then on it fails the capture.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from gapless.errors import GraphError
from gapless.graphs.device.fill_kernel import Fill
from gapless.graphs.device.raw_graph import (
    CHILD_GRAPH,
    EMPTY,
    HOST,
    KERNEL,
    MEMCPY,
    MEMSET,
    RECORD_EVENT,
    WAIT_EVENT,
    DriverError,
    Edge,
    MemsetParams,
)

logger = logging.getLogger(__name__)

_EDITABLE = {KERNEL, MEMCPY, MEMSET, HOST, CHILD_GRAPH, EMPTY, WAIT_EVENT, RECORD_EVENT}
"""A graph with other nodes is left alone: where it allocates memory no node can be removed, also not one
that was just added; conditional bodies and semaphores were not tried."""

_REPEATED = {1: (0xFF, 0x01010101), 2: (0xFFFF, 0x00010001), 4: (0xFFFFFFFF, 1)}
"""Element size to the bits that count and the factor that repeats them to 4 bytes."""


class MemsetCount(NamedTuple):
    """Memset nodes of a graph that were ``replaced``, and those ``left`` (-1: the driver cannot tell).
    Inside child graphs they are neither replaced nor counted."""

    replaced: int
    left: int


UNKNOWN = MemsetCount(0, -1)


class RawGraphs(Protocol):
    """What of ``raw_graph.RawGraphDriver`` is used; a test's fake is the other one. All raise
    ``DriverError``."""

    def nodes(self, graph: int) -> list[int]: ...
    def types(self, nodes: list[int]) -> list[int]: ...
    def memset_params(self, node: int) -> MemsetParams: ...
    def edges(self, node: int) -> list[Edge]: ...
    def is_on_device(self, address: int) -> bool: ...
    def fill_function(self) -> int: ...
    def add_fill(self, graph: int, function: int, fill: Fill) -> int: ...
    def add_edges(self, graph: int, edges: list[Edge]) -> None: ...
    def destroy(self, node: int) -> None: ...


def replace_memsets(driver: RawGraphs, graph: int) -> MemsetCount:
    """Raises ``GraphError`` where an edit broke off and could not be undone: the graph is then of no use."""
    try:
        nodes = driver.nodes(graph)
        types = driver.types(nodes)
    except DriverError as error:
        _say(f"the nodes of a captured graph cannot be listed: {error}")
        return UNKNOWN
    memsets = [node for node, kind in zip(nodes, types, strict=True) if kind == MEMSET]
    if not memsets or not _EDITABLE.issuperset(types):
        return MemsetCount(0, len(memsets))
    try:
        fills = _plan(driver, memsets)
        if fills:
            _edit(driver, graph, fills)
    except DriverError as error:
        _say(f"memset nodes stay in graphs, which are launched more slowly for it: {error}")
        return MemsetCount(0, len(memsets))
    return MemsetCount(len(fills), len(memsets) - len(fills))


def fill_of(params: MemsetParams) -> Fill | None:
    """The fill that writes the same bytes; None where there are none or rows begin amid an element."""
    size, height = params.element_size, params.height
    if size not in _REPEATED or not params.width or not height:
        return None
    width, pitch = params.width * size, params.pitch if height > 1 else 0
    if params.dst % size or pitch % size:
        return None
    if height > 1 and pitch == width:  # rows without gaps are one
        width, pitch, height = width * height, 0, 1
    bits, factor = _REPEATED[size]
    pattern = (params.value & bits) * factor
    return Fill(dst=params.dst, pitch=pitch, width=width, height=height, pattern=pattern)


def _plan(driver: RawGraphs, memsets: list[int]) -> dict[int, Fill]:
    fills = {}
    for node in memsets:
        fill = fill_of(driver.memset_params(node))
        if fill is not None and driver.is_on_device(fill.dst):
            fills[node] = fill
    return fills


def _edit(driver: RawGraphs, graph: int, fills: dict[int, Fill]) -> None:
    """Raises ``DriverError`` where the graph is as it was, ``GraphError`` where it is not."""
    edges = dict.fromkeys(edge for node in fills for edge in driver.edges(node))  # between two: seen twice
    function = driver.fill_function()
    added: dict[int, int] = {}
    first, *others = fills
    try:
        for node, fill in fills.items():
            added[node] = driver.add_fill(graph, function, fill)
        moved = [Edge(added.get(e.source, e.source), added.get(e.target, e.target), e.data) for e in edges]
        driver.add_edges(graph, moved)
        driver.destroy(first)
    except DriverError as error:
        _destroy(driver, added.values(), why=f"after {error}, ")
        raise
    _destroy(driver, others, why="")


@functools.cache
def _say(message: str) -> None:
    """Once, not once per graph."""
    logger.warning(message)


def _destroy(driver: RawGraphs, nodes: Iterable[int], *, why: str) -> None:
    try:
        for node in nodes:
            driver.destroy(node)
    except DriverError as error:
        raise GraphError(
            f"memset nodes were being replaced when {why}a node could not be removed: {error}"
        ) from error

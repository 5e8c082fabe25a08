"""Memset nodes give way to kernels: the edit against a graph that is made up, every failure included."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.errors import GraphError
from gapless.graphs.device import memset_nodes
from gapless.graphs.device.fill_kernel import BLOCK, MAX_BLOCKS, Fill
from gapless.graphs.device.memset_nodes import MemsetCount, fill_of, replace_memsets
from gapless.graphs.device.raw_graph import KERNEL, MEMCPY, MEMSET, DriverError, Edge, MemsetParams

FULL, PROGRAMMATIC = bytes(8), bytes([1, 0, 1, 0, 0, 0, 0, 0])
GRAPH, FUNCTION, MEM_ALLOC = 77, 99, 10


@dataclass
class FakeGraph:
    """Nodes by handle with their type or fill, and edges, as a driver keeps them. The call named ``fails``
    fails the ``fails_at``-th time, and with ``for_good`` ever after."""

    kinds: dict[int, Any] = field(default_factory=dict)
    params: dict[int, MemsetParams] = field(default_factory=dict)
    links: set[Edge] = field(default_factory=set)
    foreign: set[int] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    fails: str = ""
    fails_at: int = 1
    for_good: bool = False

    def add(self, kind: Any, *, after: tuple[int, ...] = (), data: bytes = FULL) -> int:
        node = 100 + len(self.kinds)
        self.kinds[node] = kind
        if kind == MEMSET:
            self.params[node] = memset(dst=4096 * node, width=node)
        self.links.update(Edge(source, node, data) for source in after)
        return node

    def picture(self) -> tuple[Any, ...]:
        return dict(self.kinds), set(self.links)

    def nodes(self, graph: int) -> list[int]:
        self._count("nodes")
        assert graph == GRAPH
        return list(self.kinds)

    def types(self, nodes: list[int]) -> list[int]:
        self._count("types")
        return [KERNEL if isinstance(self.kinds[node], Fill) else self.kinds[node] for node in nodes]

    def memset_params(self, node: int) -> MemsetParams:
        self._count("memset_params")
        return self.params[node]

    def edges(self, node: int) -> list[Edge]:
        self._count("edges")
        return [edge for edge in sorted(self.links) if node in edge[:2]]

    def is_on_device(self, address: int) -> bool:
        self._count("is_on_device")
        return address not in self.foreign

    def fill_function(self) -> int:
        self._count("fill_function")
        return FUNCTION

    def add_fill(self, graph: int, function: int, fill: Fill) -> int:
        self._count("add_fill")
        assert (graph, function) == (GRAPH, FUNCTION)
        node = 1000 + len(self.calls)
        self.kinds[node] = fill
        return node

    def add_edges(self, graph: int, edges: list[Edge]) -> None:
        for edge in edges[:-1]:
            self._link(edge)
        self._count("add_edges")  # a failure leaves some behind
        for edge in edges[-1:]:
            self._link(edge)

    def destroy(self, node: int) -> None:
        self._count("destroy")
        del self.kinds[node]
        self.links = {edge for edge in self.links if node not in edge[:2]}

    def _link(self, edge: Edge) -> None:
        assert edge not in self.links, "the driver refuses an edge that is there"
        assert edge.source in self.kinds
        assert edge.target in self.kinds
        self.links.add(edge)

    def _count(self, name: str) -> None:
        self.calls.append(name)
        times = self.calls.count(name)
        if name == self.fails and (times == self.fails_at or (self.for_good and times > self.fails_at)):
            raise DriverError(f"{name} on purpose")


def memset(**given: int) -> MemsetParams:
    return MemsetParams(**({"dst": 4096, "value": 0, "element_size": 1, "width": 1, "height": 1} | given))


def layers(count: int = 3) -> FakeGraph:
    """What a prefill looks like: kernels that start early, a memset and a copy in every layer."""
    graph = FakeGraph()
    last = graph.add(KERNEL)
    for _ in range(count):
        early = graph.add(KERNEL, after=(last,), data=PROGRAMMATIC)
        cleared = graph.add(MEMSET, after=(early,))
        copied = graph.add(MEMCPY, after=(cleared,))
        last = graph.add(KERNEL, after=(cleared, copied))
    return graph


@pytest.fixture(autouse=True)
def messages_are_said_again():
    memset_nodes._say.cache_clear()


def expected(graph: FakeGraph) -> tuple[Any, ...]:
    """The picture of ``graph`` with fills for memsets, nodes named by what they do instead of by handle."""
    names = {node: node for node in graph.kinds}
    names |= {node: fill_of(params) for node, params in graph.params.items() if node in graph.kinds}
    names |= {node: kind for node, kind in graph.kinds.items() if isinstance(kind, Fill)}
    links = {(names[edge.source], names[edge.target], edge.data) for edge in graph.links}
    return set(names.values()), links


def test_each_memset_gives_way_to_a_fill_with_the_same_edges():
    graph = layers()
    wanted = expected(graph)
    assert replace_memsets(graph, GRAPH) == MemsetCount(3, 0)
    assert MEMSET not in graph.kinds.values()
    assert expected(graph) == wanted
    assert sum(edge.data == PROGRAMMATIC for edge in graph.links) == 3


@st.composite
def random_graphs(draw: st.DrawFn) -> FakeGraph:
    graph = FakeGraph()
    for index in range(draw(st.integers(1, 14))):
        after = tuple(100 + i for i in range(index) if draw(st.booleans()))
        graph.add(draw(st.sampled_from([KERNEL, MEMCPY, MEMSET, MEMSET])), after=after)
    return graph


@settings(deadline=None)
@given(random_graphs())
def test_any_graph_keeps_its_shape(graph: FakeGraph) -> None:
    """Memsets after memsets, at the root, at the end, with many edges, alone."""
    wanted, memsets = expected(graph), len(graph.params)
    assert replace_memsets(graph, GRAPH) == MemsetCount(memsets, 0)
    assert MEMSET not in graph.kinds.values()
    assert expected(graph) == wanted


@settings(deadline=None)
@given(random_graphs(), st.data())
def test_a_call_that_fails_leaves_the_graph_as_it_was_or_fails_the_capture(graph, data):
    graph.fails = data.draw(st.sampled_from([name for name in dir(memset_nodes.RawGraphs) if name[0] != "_"]))
    graph.fails_at, graph.for_good = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    before, wanted = graph.picture(), expected(graph)
    try:
        count = replace_memsets(graph, GRAPH)
    except GraphError:
        assert graph.calls.count("destroy") >= 1
        return
    if count.replaced:
        assert expected(graph) == wanted
    else:
        assert graph.picture() == before
        assert count.left in (len(graph.params), -1)


@pytest.mark.parametrize("name", ["memset_params", "is_on_device", "edges", "fill_function"])
def test_nothing_is_changed_before_every_question_is_answered(name, caplog):
    graph = layers()
    graph.fails, graph.fails_at = name, 1 if name == "fill_function" else 3
    with caplog.at_level(logging.WARNING):
        assert replace_memsets(graph, GRAPH) == MemsetCount(0, 3)
        graph.calls.clear()
        assert replace_memsets(graph, GRAPH) == MemsetCount(0, 3)
    assert not {"add_fill", "add_edges", "destroy"} & set(graph.calls)
    assert [record.getMessage() for record in caplog.records] == [
        f"memset nodes stay in graphs, which are launched more slowly for it: {name} on purpose"
    ]


@pytest.mark.parametrize(("name", "at"), [("add_fill", 2), ("add_edges", 1), ("destroy", 1)])
def test_an_edit_is_undone_until_the_first_memset_is_gone(name, at):
    graph = layers()
    before = graph.picture()
    graph.fails, graph.fails_at = name, at
    assert replace_memsets(graph, GRAPH) == MemsetCount(0, 3)
    assert graph.picture() == before


@pytest.mark.parametrize(("at", "for_good"), [(2, False), (1, True)])
def test_an_edit_that_cannot_be_finished_or_undone_is_an_error(at, for_good):
    graph = layers()
    graph.fails, graph.fails_at, graph.for_good = "destroy", at, for_good
    with pytest.raises(GraphError, match="could not be removed: destroy on purpose"):
        replace_memsets(graph, GRAPH)


@pytest.mark.parametrize("name", ["nodes", "types"])
def test_a_graph_that_cannot_be_listed_stays_with_an_unknown_number(name):
    graph = layers()
    graph.fails = name
    assert replace_memsets(graph, GRAPH) == MemsetCount(0, -1)


def test_a_graph_without_memsets_costs_two_questions():
    graph = FakeGraph()
    graph.add(KERNEL, after=(graph.add(KERNEL),))
    assert replace_memsets(graph, GRAPH) == MemsetCount(0, 0)
    assert graph.calls == ["nodes", "types"]


def test_a_graph_that_allocates_memory_is_left_alone():
    """No node of it can be removed, so an edit could neither be finished nor undone."""
    graph = layers()
    graph.add(MEM_ALLOC)
    before = graph.picture()
    assert replace_memsets(graph, GRAPH) == MemsetCount(0, 3)
    assert graph.picture() == before


def test_memory_of_others_keeps_its_memset_and_the_rest_is_replaced():
    graph = layers()
    first, *_ = graph.params
    graph.foreign.add(graph.params[first].dst)
    assert replace_memsets(graph, GRAPH) == MemsetCount(2, 1)
    assert [node for node, kind in graph.kinds.items() if kind == MEMSET] == [first]


@pytest.mark.parametrize(
    ("given", "fill"),
    [
        ({"width": 17, "value": 0x1AB}, Fill(dst=4096, pitch=0, width=17, height=1, pattern=0xABABABAB)),
        (
            {"width": 3, "element_size": 2, "value": 0x7BEEF},
            Fill(dst=4096, pitch=0, width=6, height=1, pattern=0xBEEFBEEF),
        ),
        (
            {"width": 5, "element_size": 4, "value": 0xDEADBEEF, "pitch": 3},
            Fill(dst=4096, pitch=0, width=20, height=1, pattern=0xDEADBEEF),
        ),
        (
            {"width": 5, "height": 7, "pitch": 9, "value": 255},
            Fill(dst=4096, pitch=9, width=5, height=7, pattern=0xFFFFFFFF),
        ),
        (
            {"width": 4, "height": 7, "pitch": 8, "element_size": 2},
            Fill(dst=4096, pitch=0, width=56, height=1, pattern=0),
        ),
    ],
)
def test_what_a_memset_writes(given, fill):
    assert fill_of(memset(**given)) == fill


@pytest.mark.parametrize(
    "given",
    [
        {"width": 0},
        {"height": 0},
        {"element_size": 3},
        {"element_size": 8},
        {"element_size": 4, "dst": 4098},
        {"element_size": 2, "height": 2, "pitch": 7},
    ],
)
def test_a_memset_that_writes_nothing_or_amid_elements_is_left(given):
    assert fill_of(memset(**given)) is None


@given(st.integers(1, 1 << 36), st.integers(1, 1 << 20))
def test_the_grid_is_legal_and_bounded(width, height):
    columns, rows, depth = Fill(dst=0, pitch=width, width=width, height=height, pattern=0).grid
    assert depth == 1
    assert columns >= 1
    assert 1 <= rows <= height
    assert columns * rows <= MAX_BLOCKS
    assert columns == MAX_BLOCKS or columns * BLOCK * 16 >= width

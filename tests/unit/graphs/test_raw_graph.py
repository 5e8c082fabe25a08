"""What goes to the driver: structures as in NVIDIA's header, and whole edits through a library that C made.

The library is ``fake_driver.c``, compiled against the header that Triton brings, so that a handle cut to
32 bits or a field in the wrong place shows on a machine without a GPU.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from ctypes import sizeof
from pathlib import Path
from typing import Any

import pytest

from gapless.graphs.device import raw_graph
from gapless.graphs.device.fill_kernel import BLOCK
from gapless.graphs.device.memset_nodes import MemsetCount, replace_memsets
from gapless.graphs.device.raw_graph import (
    KERNEL,
    MEMSET,
    SIGNATURES,
    DriverError,
    EdgeData,
    KernelParams,
    MemsetParams,
    RawGraphDriver,
)

GRAPH, FIRST_NODE = 0x7F0000001000, 0x7F0000010000
MEMORY = 0x7F1000000000
PORT_PROGRAMMATIC, TYPE_PROGRAMMATIC = 1, 1


def offsets(structure: type[ctypes.Structure]) -> list[int]:
    return [getattr(structure, name).offset for name, *_ in structure._fields_]


def test_structures_lie_in_memory_as_the_header_of_cuda_12_and_13_has_them():
    assert offsets(MemsetParams) == [0, 8, 16, 20, 24, 32]
    assert sizeof(MemsetParams) == 40
    assert offsets(KernelParams) == [0, 8, 20, 32, 40, 48, 56, 64]
    assert sizeof(KernelParams) == 72
    assert offsets(EdgeData) == [0, 1, 2, 3]
    assert sizeof(EdgeData) == 8


def test_without_a_driver_or_with_an_old_one_there_is_no_editing(monkeypatch):
    asked = []
    monkeypatch.setattr(raw_graph, "load_driver", lambda functions: asked.append(functions))
    assert raw_graph.raw_graph_driver.__wrapped__() is None
    assert asked == [tuple(SIGNATURES)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    triton = pytest.importorskip("triton")
    include = Path(triton.__file__).parent / "backends/nvidia/include"
    if compiler is None or not (include / "cuda.h").exists():
        pytest.skip("no compiler, or no header of the driver")
    path = tmp_path_factory.mktemp("driver") / "libfake_driver.so"
    source = Path(__file__).with_name("fake_driver.c")
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", f"-I{include}", str(source), "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture
def library(compiled: Path) -> Any:
    library = ctypes.CDLL(str(compiled))
    library.fake_reset()
    library.fake_add.argtypes = (
        ctypes.c_int, ctypes.c_uint64, ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t,
    )  # fmt: skip
    return library


def edges(library: Any) -> set[tuple[int, ...]]:
    found = set()
    for index in range(library.fake_num_edges()):
        edge = (ctypes.c_int * 4)()
        library.fake_edge(index, edge)
        found.add(tuple(edge))
    assert len(found) == library.fake_num_edges()
    return found


def kernel(library: Any, node: int) -> list[int]:
    values = (ctypes.c_uint64 * 11)()
    library.fake_kernel(node, values)
    return list(values)


def test_an_edit_goes_through_the_drivers_own_types(library):
    """0 early to 1, memsets 2 and 3 one after the other, 4; 2 is followed by 4 as well."""
    for kind in (KERNEL, KERNEL):
        library.fake_add(kind, 0, 0, 0, 0)
    library.fake_add(MEMSET, MEMORY + 8, 0xABCD, 2, (1 << 32) + 3)
    library.fake_add(MEMSET, MEMORY + 1024, 0, 1, 17)
    library.fake_add(KERNEL, 0, 0, 0, 0)
    library.fake_link(0, 1, PORT_PROGRAMMATIC, TYPE_PROGRAMMATIC)
    for source, target in ((1, 2), (2, 3), (3, 4), (2, 4)):
        library.fake_link(source, target, 0, 0)
    driver = RawGraphDriver(library)
    assert replace_memsets(driver, GRAPH) == MemsetCount(2, 0)
    assert edges(library) == {
        (0, 1, PORT_PROGRAMMATIC, TYPE_PROGRAMMATIC),
        (1, 5, 0, 0),
        (5, 6, 0, 0),
        (6, 4, 0, 0),
        (5, 4, 0, 0),
    }
    assert driver.types(driver.nodes(GRAPH)) == [KERNEL] * 5
    assert kernel(library, 5) == [
        1024, 1, 1, BLOCK, 1, 1, MEMORY + 8, 0, 2 * ((1 << 32) + 3), 1, 0xABCDABCD,
    ]  # fmt: skip
    assert kernel(library, 6) == [1, 1, 1, BLOCK, 1, 1, MEMORY + 1024, 0, 17, 1, 0]


def test_edge_data_is_handed_on_as_it_is(library):
    for kind in (KERNEL, MEMSET, KERNEL):
        library.fake_add(kind, MEMORY, 0, 1, 1)
    library.fake_link(0, 1, 2, 0)
    library.fake_link(1, 2, 0, 0)
    assert replace_memsets(RawGraphDriver(library), GRAPH) == MemsetCount(1, 0)
    assert edges(library) == {(0, 3, 2, 0), (3, 2, 0, 0)}


@pytest.mark.parametrize("count", [7, 8, 9, 31, 32, 33])
def test_a_memset_with_many_edges_keeps_them_all(library, count):
    library.fake_add(MEMSET, MEMORY, 0, 1, 1)
    for node in range(1, count + 1):
        library.fake_add(KERNEL, 0, 0, 0, 0)
        library.fake_link(0, node, 0, 0)
    assert replace_memsets(RawGraphDriver(library), GRAPH) == MemsetCount(1, 0)
    assert edges(library) == {(count + 1, node, 0, 0) for node in range(1, count + 1)}


@pytest.mark.parametrize(("is_broken", "call"), [(0, ""), (1, "cuModuleLoadData"), (3, "cuFuncGetAttribute")])
def test_the_kernel_is_loaded_once_also_when_it_cannot_be(library, is_broken, call):
    ctypes.c_int.in_dll(library, "is_broken").value = is_broken
    for _ in range(2):
        library.fake_add(MEMSET, MEMORY, 0, 1, 1)
    driver = RawGraphDriver(library)
    for _ in range(3):
        if is_broken:
            with pytest.raises(DriverError, match=f"cannot be loaded: {call}: CUDA_ERROR_FAKE"):
                driver.fill_function()
        else:
            assert driver.fill_function() == 0x7F0000004000
    assert replace_memsets(driver, GRAPH) == (MemsetCount(0, 2) if is_broken else MemsetCount(2, 0))
    assert ctypes.c_int.in_dll(library, "num_loads").value == 1


def test_memory_of_another_device_and_what_is_no_memory(library):
    driver = RawGraphDriver(library)
    assert driver.is_on_device(MEMORY)
    assert not driver.is_on_device(MEMORY + 1)
    with pytest.raises(DriverError, match="cuPointerGetAttribute: CUDA_ERROR_FAKE"):
        driver.is_on_device(1)


def test_types_that_cannot_be_asked_for(library):
    library.fake_add(KERNEL, 0, 0, 0, 0)
    driver = RawGraphDriver(library)
    assert driver.types([]) == []
    assert driver.types([FIRST_NODE]) == [KERNEL]
    ctypes.c_int.in_dll(library, "is_broken").value = 2
    with pytest.raises(DriverError, match="cuGraphNodeGetType: CUDA_ERROR_FAKE"):
        driver.types([FIRST_NODE])

"""Memset nodes of captured graphs give way to kernels: same bytes, same order, on real hardware.

Memsets are called in the driver, because which operators of PyTorch use one differs by version. ``unedited``
captures the same work with its memset nodes, which shows that there were any.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from gapless.errors import CaptureError
from gapless.graphs.breakable import eager_break
from gapless.graphs.capture import capture_program, warm_up
from gapless.graphs.device.cuda import CudaDevice
from gapless.graphs.device.driver import load_driver
from gapless.graphs.device.memset_nodes import UNKNOWN
from gapless.graphs.device.raw_graph import KERNEL, MEMSET, RawGraphDriver, raw_graph_driver
from gapless.graphs.modes import Strategy
from gapless.graphs.program import GraphStep, Program
from gapless.kernels.norm import fused_add_rms_norm
from gapless.kernels.select import has_early_launch

pytestmark = pytest.mark.gpu

VALUES = {1: 0xA7, 2: 0xBEEF, 4: 0xDEADBEEF}
"""By element size; no two bytes of an element are equal, so that a shifted pattern shows."""


@pytest.fixture
def driver() -> RawGraphDriver:
    found = raw_graph_driver()
    if found is None:
        pytest.skip("this driver is older than CUDA 12.3")
    return found


def memset(
    tensor: Tensor, count: int, *, value: int = 0, element: int = 1, height: int = 1, pitch: int = 0
) -> None:
    """The driver's memset of ``count`` elements (in each of ``height`` rows) from the tensor's address on."""
    one_row, rows = f"cuMemsetD{8 * element}Async", f"cuMemsetD2D{8 * element}Async"
    library = load_driver((one_row, rows))
    kind = {1: ctypes.c_ubyte, 2: ctypes.c_ushort, 4: ctypes.c_uint}[element]
    address = ctypes.c_uint64(tensor.data_ptr())
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    number, width = kind(value), ctypes.c_size_t(count)
    if height == 1:
        error = getattr(library, one_row)(address, number, width, stream)
    else:
        error = getattr(library, rows)(
            address, ctypes.c_size_t(pitch), number, width, ctypes.c_size_t(height), stream
        )
    if error:
        raise RuntimeError(f"memset: {error}")


def capture(cuda, pool, fn: Callable[[], object], strategy: Strategy = Strategy.FULL) -> tuple[Program, Any]:
    warm_up(fn, cuda, cuda.num_warmups)
    return capture_program(fn, device=cuda, pool=pool, strategy=strategy)


@contextmanager
def unedited(cuda: CudaDevice) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda._runtime, "replace_memsets", lambda graph: UNKNOWN)
        yield


def raw_graphs(program: Program) -> list[int]:
    steps = [step for step in program.steps if isinstance(step, GraphStep)]
    # A segment keeps its graph by the bound function that launches it.
    return [step.segment.launch.__self__.raw_cuda_graph() for step in steps]


def kinds(driver: RawGraphDriver, program: Program) -> Counter[int]:
    return Counter(kind for graph in raw_graphs(program) for kind in driver.types(driver.nodes(graph)))


def edge_types(driver: RawGraphDriver, program: Program) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    for graph in raw_graphs(program):
        for node in driver.nodes(graph):
            found.update(edge.data for edge in driver.edges(node) if edge.source == node)
    return found


def captured_both_ways(cuda, pool, driver, fn, *, at_least: int) -> tuple[Program, Any]:
    """The edited program; there were memset nodes, none are left, and the shape is the same."""
    with unedited(cuda):
        before, _ = capture(cuda, pool, fn)
    program, out = capture(cuda, pool, fn)
    with_memsets, without = kinds(driver, before), kinds(driver, program)
    assert with_memsets[MEMSET] >= at_least
    assert without[MEMSET] == program.num_memsets == 0
    assert without[KERNEL] == with_memsets[KERNEL] + with_memsets[MEMSET]
    assert without.total() == with_memsets.total() == before.num_nodes == program.num_nodes
    assert edge_types(driver, program) == edge_types(driver, before)
    before.reset()
    return program, out


def noise(num_bytes: int) -> Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("element", [1, 2, 4])
def test_the_same_bytes_are_written_and_none_beside_them(element, cuda, pool, driver):
    counts = [1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 255, 4096, 4099, (1 << 20) + 5, (1 << 23) + 1]
    cases = [(offset * element, count) for count in counts for offset in (0, 1, 3, 7)]
    buffers = [noise(count * element + 128) for _, count in cases]
    expected = [torch.empty_like(buffer) for buffer in buffers]

    def write(into: list[Tensor]) -> None:
        for tensor, (offset, count) in zip(into, cases, strict=True):
            memset(tensor[32 + offset :], count, value=VALUES[element], element=element)

    program, _ = captured_both_ways(cuda, pool, driver, lambda: write(buffers), at_least=len(cases))
    for _ in range(3):
        for buffer, wanted in zip(buffers, expected, strict=True):
            buffer.random_(0, 256)
            wanted.copy_(buffer)
        write(expected)
        program.replay()
        cuda.synchronize()
        for case, buffer, wanted in zip(cases, buffers, expected, strict=True):
            assert torch.equal(buffer, wanted), case


@pytest.mark.parametrize("element", [1, 2, 4])
@pytest.mark.parametrize(
    ("count", "gap", "height"),
    [(1, 3, 5), (3, 1, 40), (17, 16, 9), (1000, 24, 333), (64, 0, 7), (5, 2, 5000)],
)
def test_rows_with_a_pitch(element, count, gap, height, cuda, pool, driver):
    pitch = (count + gap) * element
    buffer = noise(pitch * height + 256)

    def write(into: Tensor) -> None:
        memset(
            into[64 + element :], count, value=VALUES[element], element=element, height=height, pitch=pitch
        )

    program, _ = captured_both_ways(cuda, pool, driver, lambda: write(buffer), at_least=1)
    for _ in range(2):
        buffer.random_(0, 256)
        expected = buffer.clone()
        write(expected)
        program.replay()
        cuda.synchronize()
        assert torch.equal(buffer, expected)


def test_kernels_before_and_after_keep_their_order(cuda, pool, driver):
    """Large tensors, so that a lost dependency lets work overlap: each memset clears what the kernel before
    it wrote and the kernel after it adds to. The first node and the last are memsets, two are neighbours."""
    size, layers = 1 << 22, 12
    x = torch.ones(size, device="cuda")
    scratch, out, seen = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)

    def forward() -> None:
        memset(out, size, element=4)
        for _ in range(layers):
            scratch.copy_(x * 3)
            memset(scratch, size // 2, element=4)
            memset(scratch[size // 2 :], 2 * size, value=0)
            scratch.add_(x)
            out.add_(scratch)
        seen.copy_(scratch)
        memset(scratch, 4 * size)

    program, _ = captured_both_ways(cuda, pool, driver, forward, at_least=2 + 2 * layers)
    for value in (2.0, 5.0, 7.0):
        x.fill_(value)
        for tensor in (scratch, out, seen):
            tensor.fill_(float("nan"))
        program.replay()
        assert bool((out == layers * value).all())
        assert bool((seen == value).all())
        assert bool((scratch == 0).all())


def test_streams_forked_and_joined_around_memsets(cuda, pool, driver):
    size, side = 1 << 22, torch.cuda.Stream()
    x = torch.ones(size, device="cuda")
    left, right = torch.empty_like(x), torch.empty_like(x)

    def forward() -> Tensor:
        main = torch.cuda.current_stream()
        left.copy_(x)
        right.copy_(x)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            memset(left, size, element=4)
            left.add_(x)
        memset(right, size, element=4)
        right.add_(x)
        main.wait_stream(side)
        memset(x, size, value=0x40400000, element=4)  # 3.0: only once both sides have read
        return left + right + x

    program, out = captured_both_ways(cuda, pool, driver, forward, at_least=3)
    for value in (2.0, 9.0):
        x.fill_(value)
        left.fill_(float("nan"))
        right.fill_(float("nan"))
        program.replay()
        assert bool((out == 2 * value + 3).all())


def test_kernels_that_start_early_around_memsets(cuda, pool, driver):
    if not has_early_launch(cuda.torch_device):
        pytest.skip("programmatic dependent launch came with Hopper")
    x, weight = torch.randn(512, 1024, device="cuda"), torch.randn(1024, device="cuda")
    layers = 16

    def forward() -> Tensor:
        total, h = x, x
        for _ in range(layers):
            total, h = fused_add_rms_norm(h, total, weight, 1e-6)
            total, h = fused_add_rms_norm(h, total, weight, 1e-6)
            memset(h, x.numel())  # a quarter of it
        return total + h

    program, out = captured_both_ways(cuda, pool, driver, forward, at_least=layers)
    early = sum(count for data, count in edge_types(driver, program).items() if any(data))
    assert early >= layers, "the kernels of a layer were captured with full edges"
    for _ in range(3):
        x.normal_()
        out.fill_(float("nan"))
        program.replay()
        with torch.no_grad():
            assert torch.equal(out, forward())


def test_a_sum_of_many_blocks(cuda, pool, driver):
    """PyTorch clears the counters of its blocks with a memset before each run; were they not cleared, the sum
    would be wrong from the second replay on."""
    x = torch.ones(8192, 8192, device="cuda")
    program, out = captured_both_ways(cuda, pool, driver, lambda: x.sum(), at_least=1)
    for value in (1.0, 3.0, 0.5):
        x.fill_(value)
        out.fill_(float("nan"))
        program.replay()
        assert out.item() == pytest.approx(value * 8192 * 8192, rel=1e-5)


def test_matrix_products_that_cublas_splits(cuda, pool, driver):
    """Whether it does, and clears memory for it, is its own choice."""
    for rows, columns, depth in ((2048, 1024, 3072), (2048, 1024, 2048), (128, 1024, 8192), (16, 64, 16384)):
        x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16) / depth**0.5
        program, out = capture(cuda, pool, lambda x=x, weight=weight: torch.nn.functional.linear(x, weight))
        assert kinds(driver, program)[MEMSET] == program.num_memsets == 0
        for _ in range(3):
            x.normal_()
            out.fill_(float("nan"))
            program.replay()
            torch.testing.assert_close(out.float(), x.float() @ weight.float().t(), atol=5e-2, rtol=2e-2)


def test_random_numbers_and_breaks_beside_memsets(cuda, pool, driver):
    x = torch.ones(1000, device="cuda")

    @eager_break
    def times(h: Tensor) -> Tensor:
        return h * 2

    def forward() -> Tensor:
        memset(x, 1000, value=0x3F800000, element=4)
        h = times(x + torch.rand_like(x))
        memset(x, 1000, element=4)
        return h + x

    program, out = capture(cuda, pool, forward, Strategy.BREAKABLE)
    assert program.num_segments == 2
    assert program.num_memsets == kinds(driver, program)[MEMSET] == 0
    draws = []
    for _ in range(2):
        torch.manual_seed(5)
        for _ in range(2):
            x.fill_(float("nan"))
            program.replay()
            draws.append(out.clone())
    assert all(draw.min() >= 2 and draw.max() <= 4 for draw in draws)
    assert torch.equal(draws[0], draws[2])
    assert torch.equal(draws[1], draws[3])
    assert not torch.equal(draws[0], draws[1])


def test_a_failed_capture_leaves_edited_graphs_and_later_ones_alone(cuda, pool, driver):
    x = torch.ones(64, device="cuda")

    def forward() -> Tensor:
        memset(x, 64, element=4)
        return x + torch.rand_like(x)

    program, out = capture(cuda, pool, forward)
    with pytest.raises(CaptureError):
        capture_program(lambda: x * x.sum().item(), device=cuda, pool=pool, strategy=Strategy.FULL)
    later, later_out = capture(cuda, pool, forward)
    for replayed, result in ((program, out), (later, later_out), (program, out)):
        x.fill_(float("nan"))
        replayed.replay()
        assert result.min() >= 0
        assert result.max() < 1
        assert kinds(driver, replayed)[MEMSET] == 0


def test_a_memset_of_host_memory_stays_and_is_counted(cuda, pool, driver):
    host = torch.ones(64, dtype=torch.uint8, pin_memory=True)
    x = torch.ones(64, dtype=torch.uint8, device="cuda")

    def forward() -> None:
        memset(host, 64, value=7)
        memset(x, 64, value=9)

    try:
        with unedited(cuda):
            capture(cuda, pool, forward)
    except RuntimeError as error:
        pytest.skip(f"the driver does not take it: {error}")
    program, _ = capture(cuda, pool, forward)
    assert program.num_memsets == kinds(driver, program)[MEMSET] == 1
    host.zero_()
    program.replay()
    cuda.synchronize()
    assert bool((host == 7).all())
    assert bool((x == 9).all())


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="others use the memory that is counted here")
def test_memory_comes_back_with_the_pool(cuda, driver):
    """Cycles of captures cost the device nothing, raw graphs and fills included."""
    x = torch.ones(1 << 20, device="cuda")

    def forward() -> Tensor:
        h = x
        for _ in range(50):
            h = h + 1
            memset(h, 16)
        return h

    free = []
    for _ in range(12):
        pool = cuda.new_pool()
        programs = [capture(cuda, pool, forward)[0] for _ in range(4)]
        for program in programs:
            program.replay()
            program.reset()
        pool.release()
        gc.collect()
        torch.cuda.empty_cache()
        cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] >= free[2] - (4 << 20)

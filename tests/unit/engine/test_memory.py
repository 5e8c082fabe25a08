"""How many cache blocks fit on a GPU: arithmetic and order of events, with a device that only counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_model import open_tiny

from gapless.engine import memory
from gapless.engine.memory import MemoryEstimate, extrapolate, measure, num_blocks_on_gpu, report_of
from gapless.engine.penalties import most_bytes
from gapless.errors import MemoryLimitError
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.device.base import MemoryReading

GIB = 2**30


class FakeGpu:
    """A card of ``total`` bytes of which ``free`` are free; ``torch.cuda`` is made to agree with it."""

    torch_device = torch.device("cuda", 0)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, total: int, free: int, peak: int = 0) -> None:
        self.total, self.free, self.events = total, free, []
        cuda = torch.cuda
        properties = SimpleNamespace(total_memory=total)
        monkeypatch.setattr(cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(cuda, "empty_cache", lambda: self.events.append("empty"))
        monkeypatch.setattr(cuda, "memory_allocated", lambda device: 100)
        monkeypatch.setattr(cuda, "max_memory_allocated", lambda device: 100 + peak)
        monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda device: None)

    def memory(self) -> MemoryReading:
        return MemoryReading(pool_bytes=0, allocated_bytes=0, free_bytes=self.free)

    def synchronize(self) -> None:
        self.events.append("synchronize")


class FakeStore:
    """Notes the order of events; captured rows cost what the runner says."""

    def __init__(self, device: FakeGpu, peers: None = None) -> None:
        self.device, self.ledger, self.failures = device, [], []

    @property
    def pool_bytes(self) -> int:
        return sum(row.pool_bytes for row in self.ledger)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self.device.events.append("open")
        yield
        self.device.events.append("close")

    def release(self) -> None:
        self.device.events.append("release")


class FakeRunner:
    def __init__(self, store: FakeStore, costs: dict[int, tuple[int, int]], error: Exception | None = None):
        self.store, self.costs, self.error, self.captured = store, costs, error, []

    def capture(self, descriptors: list[BatchDescriptor]) -> list[BatchDescriptor]:
        if self.error is not None:
            raise self.error
        failed = []
        for descriptor in descriptors:
            if descriptor.num_tokens not in self.costs:
                self.store.failures.append(SimpleNamespace(message=f"no {descriptor.num_tokens}", cause=""))
                failed.append(descriptor)
                continue
            pool_bytes, driver_bytes = self.costs[descriptor.num_tokens]
            self.captured.append(descriptor.num_tokens)
            self.store.ledger.append(SimpleNamespace(pool_bytes=pool_bytes, driver_bytes=driver_bytes))
        return failed


def sizes(*num_tokens: int) -> list[BatchDescriptor]:
    return [BatchDescriptor(num_tokens=n, num_reqs=1) for n in num_tokens]


def estimate(**values: int) -> MemoryEstimate:
    names = ("pool_bytes", "driver_bytes", "activation_bytes", "static_bytes", "penalty_bytes", "media_bytes")
    return MemoryEstimate(**{name: values.get(name, 0) for name in names})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(memory, "GraphStore", FakeStore)

    def make(**values: int) -> FakeGpu:
        return FakeGpu(monkeypatch, **{"total": 100 * GIB, "free": 80 * GIB, **values})

    return make


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([], (0, 0)),
        ([(100, 10, 1)], (100, 10)),
        # The second size stands for the 9 others: it adds its pool bytes once, its driver bytes nine times.
        ([(100, 10, 1), (3, 4, 9)], (103, 46)),
        # Memory that something else gave back meanwhile makes nothing cheaper.
        ([(100, 10, 1), (-50, -4, 9)], (100, 10)),
        ([(100, 10, 1), (0, 2, 5), (40, 1, 1), (0, 1, 35)], (140, 56)),
    ],
)
def test_pool_growth_counts_once_and_driver_bytes_for_every_graph(samples, expected):
    assert extrapolate(samples) == expected


def test_only_graph_memory_gets_the_margin():
    total = estimate(pool_bytes=1000, driver_bytes=1000, activation_bytes=70, static_bytes=7).total_bytes
    assert total == 2200 + 77


def test_room_for_token_counts_is_set_aside():
    with_counts = estimate(pool_bytes=1000, penalty_bytes=most_bytes(max_num_reqs=8, vocab_size=100))
    assert with_counts.total_bytes == estimate(pool_bytes=1000).total_bytes + 12 * 100 * 4
    assert with_counts.to_dict()["penalty_bytes"] == 4800


def test_the_two_largest_sizes_of_each_runner_are_captured_and_everything_is_released(gpu):
    device = gpu(peak=5000)
    runners = []

    def make(store: FakeStore) -> list[tuple[FakeRunner, list[BatchDescriptor]]]:
        device.free -= 300  # static buffers
        runners.append(FakeRunner(store, {64: (1000, 10), 32: (5, 3)}))
        runners.append(FakeRunner(store, {8: (0, 2)}))
        return [(runners[0], sizes(16, 64, 4, 32)), (runners[1], sizes(8))]

    found = measure(device, make)
    assert [runner.captured for runner in runners] == [[64, 32], [8]]
    assert (found.pool_bytes, found.driver_bytes) == (1005, 10 + 3 * 3 + 2)
    assert (found.activation_bytes, found.static_bytes) == (5000, 300)
    assert device.events[-3:] == ["release", "synchronize", "empty"]


@pytest.mark.parametrize(
    ("captured", "failed", "driver_bytes"),
    [
        ([32, 16], [64], 10 + 3 * 3),  # 16 stands for itself, 8 and 4
        ([64, 16], [32], 10 + 3 * 3),
        ([16, 8], [64, 32], 10 + 3 * 2),
        ([64], [32, 16, 8, 4], 10),
        ([], [64, 32, 16, 8, 4], 0),
    ],
)
def test_sizes_that_cannot_be_captured_are_passed_over_and_named(gpu, captured, failed, driver_bytes):
    costs = dict(zip(captured, [(1000, 10), (5, 3)], strict=False))
    device = gpu()
    second = []

    def make(store: FakeStore) -> list[tuple[FakeRunner, list[BatchDescriptor]]]:
        second.append(FakeRunner(store, {2: (7, 1), 1: (7, 1)}))
        return [(FakeRunner(store, costs), sizes(64, 32, 16, 8, 4)), (second[0], sizes(1, 2))]

    found = measure(device, make)
    assert [failure.message for failure in found.failures] == [f"no {size}" for size in failed]
    assert found.driver_bytes == driver_bytes + 2
    assert found.pool_bytes == sum(pool for pool, _ in costs.values()) + 14
    assert second[0].captured == [2, 1]  # the next phase is measured all the same
    assert "release" in device.events


def test_a_largest_step_that_does_not_fit_says_what_to_lower(gpu):
    error = torch.cuda.OutOfMemoryError("out of memory")
    device = gpu()
    with pytest.raises(MemoryLimitError, match=r"80\.00 GiB.*--chunked-prefill-size"):
        measure(device, lambda store: [(FakeRunner(store, {}, error), sizes(64))])
    assert "release" in device.events


@pytest.mark.parametrize(
    ("utilization", "graph_gib", "expected"),
    [
        (0.9, 0, 70),  # 90 GiB may be used, 20 are
        (0.5, 0, 30),
        (0.9, 10, 59),  # 10 GiB of graphs and a tenth as margin
        (1.0, 0, 80),
        (0.23, 0, 3),
    ],
)
def test_blocks_fill_what_graphs_and_others_leave_of_the_share(gpu, utilization, graph_gib, expected):
    num_blocks = num_blocks_on_gpu(
        gpu(),
        estimate=estimate(pool_bytes=graph_gib * GIB),
        utilization=utilization,
        bytes_per_block=GIB,
        most=10_000,
    )
    assert num_blocks == expected


def test_no_more_blocks_than_requests_can_use(gpu):
    blocks = num_blocks_on_gpu(gpu(), estimate=estimate(), utilization=0.9, bytes_per_block=GIB, most=12)
    assert blocks == 12


@pytest.mark.parametrize(
    ("utilization", "bytes_per_block"),
    [(0.1, GIB), (0.21, GIB), (0.9, 70 * GIB)],
    ids=["others use more than the share", "room for the sink only", "blocks larger than the room"],
)
def test_no_room_for_one_block_beside_the_sink_says_what_to_change(gpu, utilization, bytes_per_block):
    with pytest.raises(MemoryLimitError, match="--gpu-memory-utilization") as error:
        num_blocks_on_gpu(
            gpu(), estimate=estimate(), utilization=utilization, bytes_per_block=bytes_per_block, most=99
        )
    assert str(utilization) in str(error.value)


def test_the_report_sets_the_estimate_beside_what_graphs_took(gpu):
    store = FakeStore(gpu())
    store.ledger.append(SimpleNamespace(pool_bytes=7, driver_bytes=3))
    report = report_of(estimate(pool_bytes=6, driver_bytes=4), store)
    assert report["actual"] == {"pool_bytes": 7, "driver_bytes": 3}
    assert (report["estimate"]["pool_bytes"], report["estimate"]["driver_bytes"]) == (6, 4)
    assert report_of(None, store)["estimate"] is None


@pytest.mark.parametrize(("share", "told"), [(0.5, True), (0.9, False)])
def test_a_share_of_memory_that_decides_nothing_is_said_to_decide_nothing(tmp_path, caplog, share, told):
    open_tiny(tmp_path, gpu_memory_utilization=share).runner.shutdown()
    assert ("--gpu-memory-utilization=0.5 has no effect" in caplog.text) is told

"""Kernels are compiled ahead: each once, none launched, and what fails is left for later."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from gapless.engine.precompile import chosen, precompile
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.modes import Phase, Strategy
from gapless.kernels import launch as launching
from gapless.kernels.launch import can_compile_ahead, compiling_ahead, launch

triton = pytest.importorskip("triton")


class FakeKernel:
    def __init__(self) -> None:
        self.warmed: list[tuple[Any, ...]] = []
        self.launched = 0

    def warmup(self, *args: Any, grid: Any, **constants: Any) -> None:
        self.warmed.append((len(args), constants["TILE"]))

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **constants: Any) -> None:
            self.launched += 1

        return run


def test_within_the_block_kernels_compile_once_for_each_specialisation_and_are_not_launched() -> None:
    kernel, tensor = FakeKernel(), torch.zeros(64)
    with compiling_ahead():
        for size, tile in ((16, 32), (32, 32), (17, 32), (16, 64), (1, 32), (48, 32)):
            launch(kernel, (1,), [tensor, size], {"TILE": tile})
    assert kernel.launched == 0
    assert kernel.warmed == [(2, 32), (2, 32), (2, 64), (2, 32)]  # divisible, not divisible, other tile, one


class CompiledLater:
    """A kernel that Triton compiles in a thread. ``driver``: what is asked for its launcher."""

    def __init__(self) -> None:
        self.src, self.metadata, self.finished = "source", "metadata", []

    def warmup(self, *args: Any, grid: Any, **constants: Any) -> None:
        from triton.runtime._async_compile import active_mode

        active_mode.get().submit(id(self), lambda: self, self.finished.append)


@pytest.mark.parametrize("fails", [False, True])
def test_what_calls_a_kernel_is_built_in_the_same_thread(fails: bool, monkeypatch) -> None:
    from triton.runtime.driver import driver

    built: list[tuple[Any, Any, bool]] = []

    def launcher(source: Any, metadata: Any) -> None:
        built.append((source, metadata, threading.current_thread() is threading.main_thread()))
        if fails:
            raise RuntimeError("there is no C compiler")

    active = type("Driver", (), {"launcher_cls": staticmethod(launcher)})()
    monkeypatch.setattr(type(driver), "active", property(lambda self: active))
    kernel = CompiledLater()
    with compiling_ahead():
        launch(kernel, (1,), [torch.zeros(4)], {"TILE": 16})
    assert built == [("source", "metadata", False)]
    assert kernel.finished == [kernel]


def test_after_the_block_launches_launch_again_also_after_an_error() -> None:
    kernel = FakeKernel()
    with pytest.raises(RuntimeError, match="mine"), compiling_ahead():
        raise RuntimeError("mine")
    launch(kernel, (1,), [torch.zeros(4)], {"TILE": 16})
    assert (kernel.launched, kernel.warmed) == (1, [])


def test_two_blocks_at_a_time_are_a_mistake() -> None:
    with compiling_ahead(), pytest.raises(AssertionError, match="ahead already"), compiling_ahead():
        pass


def test_other_threads_launch_as_ever_and_wait_to_compile_ahead() -> None:
    kernel, order = FakeKernel(), []

    def launch_and_compile() -> None:
        launch(kernel, (1,), [torch.zeros(4)], {"TILE": 16})
        launched.set()
        with compiling_ahead():
            order.append("second")

    launched = threading.Event()
    other = threading.Thread(target=launch_and_compile)
    with compiling_ahead():
        other.start()
        assert launched.wait(20)
        other.join(0.05)
        order.append("first")
    other.join(20)
    assert (kernel.launched, kernel.warmed, order) == (1, [], ["first", "second"])


def test_a_cpu_compiles_nothing_ahead() -> None:
    assert not can_compile_ahead(torch.device("cpu"))


class FakeRunner:
    phase = Phase.PREFILL

    def __init__(self, *, strategy: Strategy = Strategy.FULL, failing: tuple[int, ...] = ()) -> None:
        self.strategy, self._failing, self.ran = strategy, failing, []
        self.store = type("Store", (), {"device": type("Device", (), {"torch_device": torch.device("cpu")})})

    def compile(self, descriptor: BatchDescriptor) -> None:
        assert launching._ahead is not None
        self.ran.append(descriptor.num_tokens)
        if descriptor.num_tokens in self._failing:
            raise torch.OutOfMemoryError("too large")


def sizes(*num_tokens: int) -> list[BatchDescriptor]:
    return [BatchDescriptor(num_tokens=n, num_reqs=1) for n in num_tokens]


def test_every_runner_runs_on_its_chosen_sizes_and_a_failing_size_stops_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gapless.engine.precompile.can_compile_ahead", lambda device: True)
    first, second = FakeRunner(failing=(4096,)), FakeRunner(strategy=Strategy.DISABLED)
    third = FakeRunner()
    seen: list[tuple[int, int]] = []
    precompile(
        [(first, sizes(4096, 8, 16)), (second, sizes(8)), (third, sizes(1))],  # type: ignore[list-item]
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert (first.ran, second.ran, third.ran) == ([8, 16, 4096], [], [1])
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


def test_nothing_runs_where_nothing_can_be_compiled() -> None:
    runner = FakeRunner()
    precompile([(runner, sizes(8))])  # type: ignore[list-item]
    assert runner.ran == []


@pytest.mark.parametrize("largest", [8, 64, 65, 4096])
def test_all_small_sizes_and_the_largest_are_chosen(largest: int) -> None:
    descriptors = sizes(*range(1, 65), *range(80, 4097, 16))
    descriptors = [d for d in descriptors if d.num_tokens <= largest] + sizes(largest)
    found = [d.num_tokens for d in chosen(descriptors)]
    assert found == sorted(found)
    assert found[-1] == largest
    assert set(range(1, min(largest, 64) + 1)) <= set(found)
    assert len(found) <= 65 + 34


def test_no_sizes_no_choice() -> None:
    assert chosen([]) == []

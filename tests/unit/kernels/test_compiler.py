"""What Triton does once: in a thread, before it is asked for; launchers once for each signature."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gapless.kernels import launch as launching
from gapless.kernels.launch import compiling_ahead, launch, prepare_compiling

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from gapless.kernels import compiler


class Source:
    def __init__(self, **signature: str) -> None:
        self.signature = signature


class AsyncKernel:
    """Compiles as Triton does in its asynchronous mode: a closure that knows its source."""

    def __init__(self, source: Any, *, log: list[str], fails: bool = False) -> None:
        self.source, self.log, self.fails = source, log, fails

    def warmup(self, *args: Any, grid: Any, **constants: Any) -> None:
        from triton.runtime._async_compile import active_mode

        src = self.source

        def async_compile() -> Any:
            self.log.append("compiled")
            if self.fails:
                raise RuntimeError("does not fit")
            return SimpleNamespace(src=src, metadata="its own")

        active_mode.get().submit(id(self), async_compile, lambda kernel: None)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """What launchers were made of."""
    made: list[tuple[Any, Any]] = []
    active = SimpleNamespace(launcher_cls=lambda source, metadata: made.append((source, metadata)))
    monkeypatch.setattr(driver, "_active", active)
    return made


def launch_all(kernels: list[AsyncKernel], **options: bool) -> None:
    with compiling_ahead(**options):
        for tile, kernel in enumerate(kernels):
            launch(kernel, (1,), [torch.zeros(4)], {"TILE": tile})


def test_kernels_of_one_signature_share_a_launcher_that_waits_for_none_of_them(
    built: list[tuple[Any, Any]],
) -> None:
    log: list[str] = []
    first, second, other = Source(x="*bf16", n="i32"), Source(x="*bf16", n="i32"), Source(x="*fp16", n="i32")
    launch_all([AsyncKernel(source, log=log, fails=True) for source in (first, second, other)])
    assert {id(source) for source, _ in built} == {id(first), id(other)}
    assert all(metadata is compiler._ANY_METADATA for _, metadata in built)
    assert log == ["compiled"] * 3


def test_a_launcher_with_descriptors_of_tensors_waits_for_its_kernel(built: list[tuple[Any, Any]]) -> None:
    source = Source(x="tensordesc<fp16[64, 64]>")
    launch_all([AsyncKernel(source, log=[])])
    assert built == [(source, "its own")]


def test_threads_that_begin_late_compile_nothing_before_they_are_told(built: list[tuple[Any, Any]]) -> None:
    log: list[str] = []
    with compiling_ahead(begins_late=True) as begin:
        launch(AsyncKernel(Source(x="*bf16"), log=log), (1,), [torch.zeros(4)], {"TILE": 1})
        threading.Event().wait(0.05)
        assert (log, built) == ([], [])
        begin()
    assert log == ["compiled"]
    assert len(built) == 1
    launch_all([AsyncKernel(Source(x="*bf16"), log=log)], begins_late=True)  # the end of the block tells them
    assert log == ["compiled"] * 2


def test_who_waits_for_a_kernel_before_they_are_told_does_not_wait_for_ever(
    built: list[tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_MOST_HELD_BACK_S", 0.05)
    with compiling_ahead(begins_late=True):
        from triton.runtime._async_compile import active_mode

        mode = active_mode.get()
        assert mode is not None
        assert mode.submit("a key", lambda: SimpleNamespace(src=None, metadata=None), built.append).result()


def test_kernels_are_held_back_together_not_one_after_the_other(
    built: list[tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_MOST_HELD_BACK_S", 0.2)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    with compiling_ahead(begins_late=True):
        from triton.runtime._async_compile import active_mode

        mode = active_mode.get()
        assert mode is not None
        start = time.monotonic()
        kernels = [
            mode.submit(key, lambda: SimpleNamespace(src=None, metadata=None), built.append)
            for key in range(20)
        ]
        kernels[-1].result()
        assert time.monotonic() - start < 10 * 0.2


def scaled(x, out, n, TILE):  # type: ignore[no-untyped-def]
    pass


scaled.__annotations__ = {"TILE": "tl.constexpr"}


def test_the_source_is_found_in_what_triton_compiles(
    built: list[tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    active: Any = driver.active
    active.get_current_device, active.get_current_stream = (lambda: 0), (lambda device: 0)
    active.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    monkeypatch.setattr("triton.runtime.cache.triton_key", lambda: "a key")
    kernel = JITFunction(scaled)
    monkeypatch.setattr(kernel, "compile", lambda *args, **options: SimpleNamespace(), raising=False)
    x = torch.zeros(64, dtype=torch.bfloat16)
    with compiling_ahead():
        launch(kernel, (1,), [x, x, 32], {"TILE": 16})
    ((source, metadata),) = built
    assert list(source.signature.values()) == ["*bf16", "*bf16", "i32", "constexpr"]
    assert metadata is compiler._ANY_METADATA


def test_the_c_of_a_launcher_depends_on_nothing_of_the_kernel() -> None:
    """The launcher made beside a kernel is found in Triton's store by that kernel's own: equal text."""
    from triton.backends.nvidia.driver import CudaLauncher

    made: list[str] = []
    module = SimpleNamespace(launch=None)
    own = {"num_ctas": 2, "launch_pdl": True, "shared": 4096}
    real = SimpleNamespace(**vars(compiler._ANY_METADATA) | own)
    source = SimpleNamespace(
        signature={"x": "*bf16", "n": "i32", "eps": "fp32", "TILE": "constexpr"}, constants={(3,): 16}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("triton.backends.nvidia.driver.library_dirs", list)
        patch.setattr(
            "triton.backends.nvidia.driver.compile_module_from_src",
            lambda src, **options: made.append(src) or module,
        )
        for metadata in (compiler._ANY_METADATA, real):
            CudaLauncher(source, metadata)
    assert made[0] == made[1]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A process that has not prepared anything; what is done is written down."""
    seen: list[str] = []

    def make_driver() -> Any:
        seen.append("driver")
        return SimpleNamespace(launcher_cls=None)

    monkeypatch.setattr(compiler, "_preparing", None)
    monkeypatch.setattr("triton.runtime.cache.triton_key", lambda: seen.append("key"))
    monkeypatch.setattr(driver, "_active", None)
    monkeypatch.setattr(driver, "_default", None)
    monkeypatch.setattr(sys.modules["triton.runtime.driver"], "_create_driver", make_driver)
    monkeypatch.setattr(launching, "can_compile_ahead", lambda device: device.type == "cuda")
    return seen


def test_what_the_first_kernel_waits_for_is_done_once_and_waited_for(fresh: list[str]) -> None:
    for _ in range(3):
        prepare_compiling(torch.device("cuda", 0))
    with compiling_ahead():
        assert sorted(fresh) == ["driver", "key"]
    assert sorted(fresh) == ["driver", "key"]


def test_nothing_is_prepared_where_nothing_is_compiled(fresh: list[str]) -> None:
    prepare_compiling(torch.device("cpu"))
    compiler.wait_for_compiler()
    assert fresh == []


def test_what_cannot_be_prepared_is_left_for_the_first_kernel(
    fresh: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Any:
        raise RuntimeError("there is no C compiler")

    monkeypatch.setattr(sys.modules["triton.runtime.driver"], "_create_driver", fail)
    prepare_compiling(torch.device("cuda", 0))
    compiler.wait_for_compiler()
    assert fresh == ["key"]

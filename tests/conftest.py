"""What every test may rely on: the ``device`` fixture, and which marked tests run where."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Triton decides when a kernel is defined, its own library included: before anything imports it.
    os.environ["TRITON_INTERPRET"] = "1"

from gapless.graphs.device.emulated import EmulatedDevice

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell leaves it for what runs in the background; every process that a test starts would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wants_soak = os.environ.get("GAPLESS_SOAK") == "1"
    soak = [item for item in items if item.get_closest_marker("soak") is not None]
    if soak and not wants_soak:
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if item.get_closest_marker("soak") is None]
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def _quick_collections() -> None:
    """Every capture collects garbage: what imports made (the first capture imports a lot) is set aside, for
    visiting it a few thousand times is most of what a run of the tests would take."""
    _remember_what_is_frozen()
    first = EmulatedDevice()
    first.begin_segment(first.new_pool())
    torch.ones(1)
    first.end_segment()
    gc.collect()
    gc.freeze()


def _remember_what_is_frozen() -> None:
    """Every capture asks whether anything is frozen, and Python counts all of it to answer: 0.1 s late in
    a run. Here it counts anew only after something was frozen or taken back."""
    counted: list[int] = []
    count = gc.get_freeze_count

    def remembered() -> int:
        if not counted:
            counted.append(count())
        return counted[0]

    def forgetting(change: Callable[[], None]) -> Callable[[], None]:
        def changes() -> None:
            counted.clear()
            change()

        return changes

    gc.get_freeze_count = remembered
    gc.freeze, gc.unfreeze = forgetting(gc.freeze), forgetting(gc.unfreeze)


@pytest.fixture(scope="module", autouse=True)
def _quick_collections_after_this_module(_quick_collections: None) -> Iterator[None]:
    """What one module left behind for good (imports, caches of compilers) is no later one's burden: without
    this a capture takes half a second once a few thousand tests have run. Set up before the module's own
    fixtures, so they are gone when it ends."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    """A fresh emulated device; fails the test that leaves a segment open."""
    made = EmulatedDevice()
    yield made
    left_open = made.is_recording()
    made.abandon_segment()
    assert not left_open, "the test left a segment open"


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that was never written holds NaN: an element that a kernel leaves out is found."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).new_empty(2).isnan().all()
    with torch.no_grad():
        yield
    torch.use_deterministic_algorithms(False)

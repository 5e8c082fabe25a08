"""How many cache blocks fit: on a GPU from a measured estimate, on a CPU from a flag.

Guessing what graphs and activations cost fails both ways (out of memory at capture, or no room for the
cache), so the cost is measured before the cache is made: with a cache of one block, the largest and the
second size of each phase are warmed up and captured in a throwaway store, the rest is extrapolated, and
everything is released again. A size that cannot be captured stays eager, and the next smaller one is measured
instead. Pool memory is that of the largest sizes, since smaller graphs live inside it; driver memory grows
with every graph. The estimate and what the real captures took are both in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gapless.errors import MemoryLimitError
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.device.base import GraphDevice
from gapless.graphs.peers import Peers
from gapless.graphs.runner import WARM_UP_OUT_OF_MEMORY, GraphRunner
from gapless.graphs.store import FailedCapture, GraphStore

_MARGIN = 1.1
"""The estimate extrapolates from two sizes; fragmentation and library workspaces come on top."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes that everything but weights and cache will take."""

    pool_bytes: int
    driver_bytes: int
    activation_bytes: int
    static_bytes: int
    penalty_bytes: int = 0
    """Token counts of requests with penalties, made when the first one comes."""
    media_bytes: int = 0
    """Of a model with a vision encoder: embeddings that are kept, and the encoder's largest run."""
    failures: tuple[FailedCapture, ...] = ()
    """Sizes whose capture failed while measuring: they are not tried again."""

    @property
    def total_bytes(self) -> int:
        graph_bytes = int((self.pool_bytes + self.driver_bytes) * _MARGIN)
        steps_bytes = graph_bytes + self.activation_bytes + self.static_bytes
        return steps_bytes + self.penalty_bytes + self.media_bytes

    def to_dict(self) -> dict[str, int]:
        return {
            "pool_bytes": self.pool_bytes,
            "driver_bytes": self.driver_bytes,
            "activation_bytes": self.activation_bytes,
            "static_bytes": self.static_bytes,
            "penalty_bytes": self.penalty_bytes,
            "media_bytes": self.media_bytes,
            "total_bytes": self.total_bytes,
        }


def extrapolate(samples: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """Pool and driver bytes of whole ladders from their largest sizes.

    ``samples`` has, per captured size in order, ``(pool growth, driver growth, how many sizes it stands
    for)``. Pool growth counts once (later sizes reuse it); driver growth counts for every size it stands for.
    """
    pool_bytes = sum(max(pool, 0) for pool, _, _ in samples)
    driver_bytes = sum(max(driver, 0) * count for _, driver, count in samples)
    return pool_bytes, driver_bytes


def measure(
    device: GraphDevice,
    make_runners: Callable[[GraphStore], list[tuple[GraphRunner, list[BatchDescriptor]]]],
    *,
    penalty_bytes: int = 0,
    media_bytes: int = 0,
    peers: Peers | None = None,
) -> MemoryEstimate:
    """Capture the two largest sizes of each runner in a throwaway store and extrapolate (CUDA only).

    ``penalty_bytes`` and ``media_bytes`` are set aside. Sizes that cannot be captured are passed over and
    returned as ``failures``. Raises ``MemoryLimitError`` when the largest step does not even run eagerly for
    lack of memory.
    """
    _empty_caches(device)
    free_before = device.memory().free_bytes
    store = GraphStore(device, peers=peers)
    try:
        runners = make_runners(store)
        _empty_caches(device)  # of what compiling kernels left
        allocated = torch.cuda.memory_allocated(device.torch_device)
        torch.cuda.reset_peak_memory_stats(device.torch_device)
        static_bytes = max(0, free_before - device.memory().free_bytes)
        with store.capturing():
            samples = _capture_largest(store, runners)
        peak = torch.cuda.max_memory_allocated(device.torch_device)
        activation_bytes = max(0, peak - allocated)
    except torch.cuda.OutOfMemoryError as error:
        raise MemoryLimitError(
            f"the largest step does not fit beside the weights ({free_before / 2**30:.2f} GiB were free): "
            "lower --chunked-prefill-size or --max-running-requests"
        ) from error
    finally:
        store.release()
        _empty_caches(device)
    pool_bytes, driver_bytes = extrapolate(samples)
    return MemoryEstimate(
        pool_bytes=pool_bytes,
        driver_bytes=driver_bytes,
        activation_bytes=activation_bytes,
        static_bytes=static_bytes,
        penalty_bytes=penalty_bytes,
        media_bytes=media_bytes,
        failures=tuple(store.failures),
    )


def num_blocks_on_gpu(
    device: GraphDevice, *, estimate: MemoryEstimate, utilization: float, bytes_per_block: int, most: int
) -> int:
    """Blocks of KV cache that fit into ``utilization`` of the card, the sink block included; at most
    ``most``.

    ``free_bytes`` is read with weights loaded and caches empty. Raises ``MemoryLimitError`` when not one
    block fits.
    """
    _empty_caches(device)
    total = torch.cuda.get_device_properties(device.torch_device).total_memory
    free = device.memory().free_bytes
    room = int(total * utilization) - (total - free) - estimate.total_bytes
    num_blocks = min(room // bytes_per_block, most)
    if num_blocks < 2:
        raise MemoryLimitError(
            f"no room for the KV cache: {free / 2**30:.2f} GiB are free, graphs and activations need "
            f"{estimate.total_bytes / 2**30:.2f} GiB, and --gpu-memory-utilization {utilization} leaves "
            f"{room / 2**30:.2f} GiB for blocks of {bytes_per_block} bytes. Raise it, or lower "
            "--chunked-prefill-size or --max-running-requests"
        )
    return num_blocks


def _capture_largest(
    store: GraphStore, runners: list[tuple[GraphRunner, list[BatchDescriptor]]]
) -> list[tuple[int, int, int]]:
    samples: list[tuple[int, int, int]] = []
    for runner, descriptors in runners:
        num_left = len(descriptors)
        num_before = len(samples)
        for descriptor in sorted(descriptors, reverse=True):
            num_left -= 1
            if runner.capture([descriptor]):
                if store.failures[-1].cause == WARM_UP_OUT_OF_MEMORY:
                    raise torch.cuda.OutOfMemoryError(store.failures[-1].message)
                continue
            row = store.ledger[-1]
            if len(samples) > num_before:  # the second one stands for itself and all smaller ones
                samples.append((row.pool_bytes, row.driver_bytes, num_left + 1))
                break
            samples.append((row.pool_bytes, row.driver_bytes, 1))
    return samples


def _empty_caches(device: GraphDevice) -> None:
    device.synchronize()
    torch.cuda.empty_cache()


def report_of(estimate: MemoryEstimate | None, store: GraphStore) -> dict[str, Any]:
    """Estimate beside actual, for the report."""
    actual = {
        "pool_bytes": store.pool_bytes,
        "driver_bytes": sum(row.driver_bytes for row in store.ledger),
    }
    return {"estimate": estimate.to_dict() if estimate is not None else None, "actual": actual}

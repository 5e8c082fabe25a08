"""What memset nodes cost the launch of a graph, and what kernels in their place save.

Graphs of the same kernels with more and more memsets between them are captured twice: with the memset nodes
that the driver records, and with the kernels that take their place (``graphs/device/memset_nodes.py``). For
both: microseconds of CPU of a launch on an idle GPU, of a replay on the GPU (of ten back to back), and of the
capture's end, where nodes are listed, replaced and instantiated; further the host memory that graphs keep.

    python benchmarks/memset_nodes.py [--kernels 280] [--memsets 0 1 28 80] [--bytes 4 65536] [--output FILE]

Prints a table to stderr and one line of JSON to stdout.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_acceptance import metadata

from gapless.graphs.capture import capture_program, warm_up
from gapless.graphs.device import get_device
from gapless.graphs.device.cuda import CudaDevice
from gapless.graphs.device.cuda_runtime import CudaRuntime
from gapless.graphs.device.driver import load_driver
from gapless.graphs.device.memset_nodes import UNKNOWN, MemsetCount
from gapless.graphs.modes import Strategy

ENDS = ("replace_memsets", "instantiate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", type=int, default=280, help="in each graph, beside the memsets")
    parser.add_argument("--memsets", type=int, nargs="+", default=[0, 1, 28, 80])
    parser.add_argument("--bytes", type=int, nargs="+", default=[4, 65536], help="of each memset")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("memset nodes are of CUDA graphs: this needs a GPU")
    device = get_device("cuda")
    assert isinstance(device, CudaDevice)
    result: dict[str, Any] = {"benchmark": "memset_nodes", "kernels": arguments.kernels, "rows": []}
    for num_bytes in arguments.bytes:
        for memsets in arguments.memsets:
            for is_edited in (False, True):
                row = measure(device, arguments, memsets=memsets, num_bytes=num_bytes, is_edited=is_edited)
                result["rows"].append(row)
                print(row, file=sys.stderr, flush=True)
    result["kept"] = kept_memory(device, arguments.kernels)
    print(result["kept"], file=sys.stderr, flush=True)
    result["meta"] = metadata()
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)


def measure(
    device: CudaDevice, arguments: argparse.Namespace, *, memsets: int, num_bytes: int, is_edited: bool
) -> dict[str, Any]:
    forward = forward_of(arguments.kernels, memsets, num_bytes)
    pool, ends, launches = device.new_pool(), dict.fromkeys(ENDS, 0.0), []
    warm_up(forward, device, device.num_warmups)
    with timed_ends(ends, is_edited=is_edited):  # the last counts: the first loads the fill kernel
        programs = [
            capture_program(forward, device=device, pool=pool, strategy=Strategy.FULL)[0] for _ in range(3)
        ]
    program = programs[-1]

    def ten_times() -> None:
        for _ in range(10):
            program.replay()

    with device.stream_scope(), torch.no_grad():
        for _ in range(arguments.repeats):
            device.synchronize()
            start = time.perf_counter()
            program.replay()
            launches.append(1e6 * (time.perf_counter() - start))
        gpu_s = device.time(ten_times, repeats=20) / 10
    row = {
        "bytes": num_bytes,
        "memsets": memsets,
        "edited": is_edited,
        "memsets_left": program.num_memsets,
        "launch_us": round(statistics.median(launches), 1),
        "launch_us_p90": round(statistics.quantiles(launches, n=10)[-1], 1),
        "gpu_us": round(1e6 * gpu_s, 1),
        "edit_us": round(ends["replace_memsets"], 1),
        "instantiate_us": round(ends["instantiate"], 1),
    }
    for program in programs:
        program.reset()
    pool.release()
    return row


def forward_of(kernels: int, memsets: int, num_bytes: int) -> Callable[[], None]:
    """``kernels`` small kernels in a chain, the memsets spread over them."""
    x, cleared = torch.zeros(1024, device="cuda"), torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    library = load_driver(("cuMemsetD8Async",))
    every = kernels // memsets if memsets else 0

    def forward() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        done = 0
        for index in range(kernels):
            if every and index % every == 0 and done < memsets:
                done += 1
                error = library.cuMemsetD8Async(
                    ctypes.c_uint64(cleared.data_ptr()), ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes), stream
                )
                assert not error, error
            x.add_(1)

    return forward


@contextmanager
def timed_ends(into: dict[str, float], *, is_edited: bool) -> Iterator[None]:
    """Microseconds of the calls at the end of the captures inside; without the edit the first does
    nothing."""
    originals = {name: getattr(CudaRuntime, name) for name in ENDS}

    def timed(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: CudaRuntime, graph: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(self, graph)
            finally:
                into[name] = 1e6 * (time.perf_counter() - start)

        return call

    for name, inner in originals.items():
        setattr(CudaRuntime, name, timed(name, inner if is_edited or name == "instantiate" else leave))
    try:
        yield
    finally:
        for name, inner in originals.items():
            setattr(CudaRuntime, name, inner)


def leave(self: CudaRuntime, graph: Any) -> MemsetCount:
    return UNKNOWN


def kept_memory(device: CudaDevice, kernels: int, *, graphs: int = 200) -> dict[str, Any]:
    """Bytes of host memory per graph of ``kernels`` nodes, with what was captured kept and without it."""
    forward, pool, made, found = forward_of(kernels, 0, 4), device.new_pool(), [], {}
    for name, keeps in (("warm_up", True), ("destroyed", False), ("kept", True)):
        before = resident_bytes()
        with device.stream_scope(), torch.no_grad():
            for _ in range(graphs):
                graph = torch.cuda.CUDAGraph(keep_graph=keeps)
                graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
                forward()
                graph.capture_end()
                if keeps:
                    graph.instantiate()
                made.append(graph)
        found[name] = round((resident_bytes() - before) / graphs)
    for graph in made:  # not earlier: freed memory would be found again by the next ones, and not be seen
        graph.reset()
    return {"graphs": graphs, "nodes": kernels, "host_bytes_per_graph": found}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()

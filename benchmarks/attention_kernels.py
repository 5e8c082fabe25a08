"""Speed of the paged attention kernels alone, per call, inside a CUDA graph.

A graph holds as many calls as a model has layers, each over a cache of its own (as far as memory allows),
with a shuffled block table and random data. Prefill is given in TFLOP/s of causal attention, decode in GB/s
of keys and values. Only shapes decide what is launched, so these are the launches of the engine's buckets.

    python benchmarks/attention_kernels.py --heads 16 --kv-heads 8

Prints a table to stderr and one line of JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gapless.attention.base import AttentionMetadata
from gapless.attention.triton_paged import TritonPagedBackend
from gapless.bench.meta import describe_run

PREFILL = {str(n): [(0, n)] for n in (16, 64, 128, 256, 512, 1024, 2048, 4096)}
PREFILL["4 x 1024"] = [(0, 1024)] * 4
PREFILL["1024 after 3072"] = [(3072, 1024)]
DECODE = [(b, c) for b in (1, 8, 32, 128) for c in (64, 170, 1024, 8192) if b * c <= 128 * 1024 * 2]
CACHE_BYTES = 8 << 30
"""Distinct caches are made up to this size; calls then start over with the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    head_size: int
    block_size: int
    layers: int
    max_requests: int
    max_model_len: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One step: the calls of its layers share query, output and metadata."""

    query_THD: Tensor
    out_THD: Tensor
    caches: list[tuple[Tensor, Tensor]]
    metadata: AttentionMetadata


def main() -> None:
    arguments = parse_arguments()
    shape = Shape(
        heads=arguments.heads,
        kv_heads=arguments.kv_heads,
        head_size=arguments.head_size,
        block_size=arguments.block_size,
        layers=arguments.layers,
        max_requests=256,
        max_model_len=8448,
        dtype=getattr(torch, arguments.dtype),
    )
    result: dict[str, object] = {
        "benchmark": "attention_kernels",
        "meta": describe_run(),
        "shape": {name: str(value) for name, value in asdict(shape).items()},
        "repeats": arguments.repeats,
    }
    prefill, decode = {}, {}
    for name, requests in PREFILL.items():
        num_tokens = sum(new for _, new in requests)
        case = make_case(shape, requests, num_slots=min(num_tokens, shape.max_requests), query_len=num_tokens)
        figures = measure(case, shape, arguments.repeats)
        tflop = sum(causal_flop(shape, cached, new) for cached, new in requests) / 1e12
        figures["tflop_s"] = round(tflop / figures["us"] * 1e6, 1)
        prefill[name] = figures
        print(
            f"prefill {name:>16} {figures['us']:9.1f} us {figures['tflop_s']:7.1f} TFLOP/s", file=sys.stderr
        )
    for batch, context in DECODE:
        case = make_case(shape, [(context - 1, 1)] * batch, num_slots=batch, query_len=1)
        figures = measure(case, shape, arguments.repeats)
        num_bytes = 2 * batch * context * shape.kv_heads * shape.head_size * shape.dtype.itemsize
        figures["gb_s"] = round(num_bytes / figures["us"] / 1e3, 1)
        decode[f"{batch} x {context}"] = figures
        row = f"decode {batch:4} x {context:10} {figures['us']:9.2f} us {figures['gb_s']:7.1f} GB/s"
        print(row, file=sys.stderr)
    result |= {"prefill": prefill, "decode": decode}
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def make_case(shape: Shape, requests: list[tuple[int, int]], *, num_slots: int, query_len: int) -> Case:
    """``requests`` are (cached tokens, new tokens); ``num_slots`` are the bucket's."""
    device = torch.device("cuda")
    seq_lens = [cached + new for cached, new in requests] + [0] * (num_slots - len(requests))
    blocks = [math.ceil(n / shape.block_size) for n in seq_lens]
    num_blocks = 1 + sum(blocks)
    # Stored by column, as the engine's static input is.
    table = torch.zeros(math.ceil(shape.max_model_len / shape.block_size), num_slots, dtype=torch.int32)
    order = torch.randperm(num_blocks - 1).to(torch.int32) + 1
    for slot, own in enumerate(order.split(blocks)):
        table[: len(own), slot] = own
    lens = torch.tensor([new for _, new in requests] + [0] * (num_slots - len(requests)))
    starts = torch.zeros(num_slots + 1, dtype=torch.int32)
    starts[1:] = lens.cumsum(0)
    num_tokens = int(starts[-1])
    cache_shape = (num_blocks, shape.block_size, shape.kv_heads, shape.head_size)
    cache_bytes = 2 * math.prod(cache_shape) * shape.dtype.itemsize
    options: dict[str, Any] = {"dtype": shape.dtype, "device": device}
    query_THD = torch.randn(num_tokens, shape.heads, shape.head_size, **options)
    return Case(
        query_THD=query_THD,
        out_THD=torch.empty_like(query_THD),
        caches=[
            (torch.empty(cache_shape, **options).normal_(), torch.empty(cache_shape, **options).normal_())
            for _ in range(max(1, min(shape.layers, CACHE_BYTES // cache_bytes)))
        ],
        metadata=AttentionMetadata(
            query_start_loc=starts.to(device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            block_table=table.to(device).t(),
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int32, device=device),
            max_query_len=query_len,
            max_seq_len=shape.max_model_len,
        ),
    )


def replay_times(call: Callable[[int], None], *, layers: int, repeats: int) -> list[float]:
    """Microseconds a call in each of ``repeats`` replays of a graph that holds one call per layer."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            call(layer)
    times = []
    for repeat in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end) * 1e3 / layers)
    return times


def measure(case: Case, shape: Shape, repeats: int) -> dict[str, float]:
    """Microseconds a call: median, lowest and highest of ``repeats`` replays."""
    backend, scale = TritonPagedBackend(), shape.head_size**-0.5

    def call(layer: int) -> None:
        caches = case.caches[layer % len(case.caches)]
        backend.attend(case.query_THD, *caches, case.out_THD, case.metadata, scale=scale, window=None)

    times = replay_times(call, layers=shape.layers, repeats=repeats)
    assert not case.out_THD.isnan().any(), "attention left NaN in its output"
    return {
        "us": round(statistics.median(times), 3),
        "us_min": round(min(times), 3),
        "us_max": round(max(times), 3),
    }


def causal_flop(shape: Shape, cached: int, new: int) -> float:
    return 4 * shape.head_size * shape.heads * (new * cached + new * (new + 1) / 2)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Prefill attention on Hopper: Triton's kernel against the one in Gluon, whether each is right and how fast.

Each runs in a process of its own, which is ended after ``--timeout`` seconds: a kernel that hangs or crashes
costs its rows, no more. All are compiled first, side by side. Right means: against fp32 attention on the GPU,
over ragged batches with cached prefixes, empty slots and pad rows, with NaN in every cache slot that no
request has; and the same bits in every launch. Times are per launch, within a CUDA graph of ``--layers``
launches, each over a cache of its own.

    python benchmarks/prefill_kernels.py [--output FILE]

``triton`` and ``hopper`` are the engine with ``GAPLESS_HOPPER_ATTENTION=0`` and 1. Prints a table to stderr
and one line of JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from attention_kernels import Case, Shape, causal_flop, make_case, replay_times
from torch import Tensor

from gapless.attention.triton_paged import TritonPagedBackend
from gapless.bench.meta import describe_run
from gapless.kernels.launch import compiling_ahead

TIMED = {str(n): [(0, n)] for n in (256, 512, 1024, 2048, 4096)} | {
    "4 x 1024": [(0, 1024)] * 4,
    "1024 after 3072": [(3072, 1024)],
    # Decode beside a piece of a prompt.
    "512, of them 64 x 1 after 4095": [(4095, 1)] * 64 + [(0, 448)],
    "1024, of them 64 x 1 after 4095": [(4095, 1)] * 64 + [(0, 960)],
    "2048, of them 200 x 1 after 1000": [(1000, 1)] * 200 + [(2000, 1848)],
}
KERNELS = {"triton": "0", "hopper": "1"}
CHECKED = [
    [(0, 1)],
    [(0, 300)],
    [(0, 4096)],
    [(0, 2049)],
    [(3072, 1024)],
    [(0, 1024)] * 4,
    [(37, 129), (300, 1), (0, 0), (127, 1), (130, 255), (0, 64), (1000, 777)],
    [(5, 17)] * 40 + [(2000, 100), (0, 3)],
    [(700 + 61 * i, 1) for i in range(60)] + [(0, 452)],
]
HEADS = (16, 32)
KV_HEADS = 8
MOST_ERROR = 6e-3
"""Of norms, bf16 against fp32: the two kernels of the engine have 2 to 3e-3 (*lead*)."""


def main() -> None:
    arguments = parse_arguments()
    names = list(KERNELS)
    start = time.monotonic()
    failures = {
        name: error for name, (_, error) in run_all(compile_kernels, names, arguments).items() if error
    }
    print(f"compiled in {time.monotonic() - start:.0f} s", file=sys.stderr)
    rows: dict[str, Any] = {}
    for name in names:
        if name in failures:
            found, error = None, f"not compiled: {failures[name]}"
        else:
            found, error = run_all(check_and_time, [name], arguments)[name]
        rows[name] = found if error is None else {"error": error}
        print_row(name, rows[name])
    result = {
        "benchmark": "prefill_kernels",
        "meta": describe_run(),
        "layers": arguments.layers,
        "repeats": arguments.repeats,
        "kernels": rows,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def run_all(
    work: Callable[..., Any], names: list[str], arguments: argparse.Namespace
) -> dict[str, tuple[Any, str | None]]:
    """``work(name, arguments)`` for each name in a process: ``(result, error)``."""
    # Forked, so that torch is imported once; this process does not touch the GPU before they have ended.
    context = multiprocessing.get_context("fork")
    running = {}
    for name in names:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=in_process, args=(work, name, arguments, sender))
        process.start()
        sender.close()
        running[name] = (process, receiver)
    limit = arguments.timeout if work is check_and_time else arguments.compile_timeout
    deadline = time.monotonic() + limit
    outcome: dict[str, tuple[Any, str | None]] = {}
    for name, (process, receiver) in running.items():
        outcome[name] = (None, f"nothing heard within {limit} s")
        try:
            if receiver.poll(max(deadline - time.monotonic(), 0)):
                outcome[name] = receiver.recv()
        except EOFError:
            process.join(5)
            outcome[name] = (None, f"died with exit code {process.exitcode}")
        process.join(3)
        if process.is_alive():
            process.kill()
            process.join(20)
    return outcome


def in_process(
    work: Callable[..., Any], name: str, arguments: argparse.Namespace, sender: Connection
) -> None:
    os.environ["GAPLESS_HOPPER_ATTENTION"] = KERNELS[name]
    torch.manual_seed(0)
    try:
        sender.send((work(name, arguments), None))
    except Exception as error:
        traceback.print_exc()
        sender.send((None, f"{type(error).__name__}: {error}"[:300]))


def compile_kernels(name: str, arguments: argparse.Namespace) -> None:
    """Everything that the checks and timings of a kernel launch."""
    for heads in HEADS:
        for requests in (*CHECKED, *TIMED.values()):
            num_tokens = sum(new for _, new in requests)
            slots = max(len(requests) + 3, 64) if requests in CHECKED else min(num_tokens, 256)
            case = make_case(shape_of(heads, 1), requests, num_slots=slots, query_len=num_tokens)
            with compiling_ahead():
                attend(case, 0)


def check_and_time(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    errors = []
    for heads in HEADS:
        for requests in CHECKED:
            errors.append(check(shape_of(heads, 1), requests))
            if not errors[-1] < MOST_ERROR:
                raise AssertionError(f"error {errors[-1]:.2e} for {heads} heads, {requests[:8]}")
    times: dict[str, dict[str, float]] = {}
    for heads in HEADS:
        for label, requests in TIMED.items():
            shape = shape_of(heads, arguments.layers)
            num_tokens = sum(new for _, new in requests)
            case = make_case(
                shape, requests, num_slots=min(num_tokens, shape.max_requests), query_len=num_tokens
            )
            us = measure(case, arguments)
            flop = sum(causal_flop(shape, cached, new) for cached, new in requests)
            times[f"{heads}: {label}"] = {**us, "tflop_s": round(flop / us["us"] / 1e6, 1)}
    return {"worst_error": max(errors), "times": times}


def shape_of(heads: int, layers: int) -> Shape:
    return Shape(
        heads=heads, kv_heads=KV_HEADS, head_size=128, block_size=16, layers=layers, max_requests=256,
        max_model_len=8448, dtype=torch.bfloat16,
    )  # fmt: skip


def attend(case: Case, layer: int) -> None:
    caches, scale = case.caches[layer % len(case.caches)], case.query_THD.shape[2] ** -0.5
    TritonPagedBackend().attend(
        case.query_THD, *caches, case.out_THD, case.metadata, scale=scale, window=None
    )


def check(shape: Shape, requests: list[tuple[int, int]]) -> float:
    """The relative error of norms. Raises where two launches differ or pad rows are not zero."""
    num_tokens = sum(new for _, new in requests)
    num_pad = max(77, 512 - num_tokens)  # where both have kernels of their own
    case = make_case(shape, requests, num_slots=max(len(requests) + 3, 64), query_len=num_tokens)
    query_THD = torch.cat(
        [case.query_THD, torch.full_like(case.query_THD[:1], torch.nan).repeat(num_pad, 1, 1)]
    )
    case = replace(case, query_THD=query_THD, out_THD=torch.empty_like(query_THD))
    k_cache, v_cache = case.caches[0]
    expected, is_used = [], torch.zeros(k_cache.shape[0] * shape.block_size, dtype=torch.bool, device="cuda")
    start = 0
    for slot, (cached, new) in enumerate(requests):
        position = torch.arange(cached + new, device="cuda")
        block = case.metadata.block_table[slot][position // shape.block_size].long()
        slots = block * shape.block_size + position % shape.block_size
        is_used[slots] = True
        expected.append(attend_in_fp32(query_THD[start : start + new], k_cache, v_cache, slots))
        start += new
    for cache in (k_cache, v_cache):
        cache.view(-1, *cache.shape[2:])[~is_used] = torch.nan
    wanted = torch.cat(expected)
    first = None
    for _ in range(3):
        case.out_THD.fill_(torch.nan)
        attend(case, 0)
        attend(case, 0)
        torch.cuda.synchronize()
        if first is None:
            first = case.out_THD.clone()
        if not torch.equal(first.view(torch.int16), case.out_THD.view(torch.int16)):
            raise AssertionError(f"two launches differ: {shape.heads} heads, {requests[:8]}")
    assert first is not None
    if (first[num_tokens:] != 0).any():
        raise AssertionError(f"pad rows are not zero: {shape.heads} heads, {requests[:8]}")
    error = (first[:num_tokens].float() - wanted).norm() / wanted.norm()
    # A wrong tile among hundreds hides in a norm over all; its own rows show it.
    rows = (first[:num_tokens].float() - wanted).norm(dim=2) / wanted.norm(dim=2)
    worst = float(rows.max())
    if not worst < 5 * MOST_ERROR:
        raise AssertionError(f"a row is off by {worst:.1e}: {shape.heads} heads, {requests[:8]}")
    return float(error)


def attend_in_fp32(query_THD: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
    """Causal attention of a request's last tokens in fp32, a head at a time."""
    group = query_THD.shape[1] // k_cache.shape[2]
    key_SKD, value_SKD = (cache.view(-1, *cache.shape[2:])[slots].float() for cache in (k_cache, v_cache))
    num_new, num_keys = query_THD.shape[0], slots.shape[0]
    position = torch.arange(num_keys - num_new, num_keys, device="cuda")
    is_hidden = torch.arange(num_keys, device="cuda")[None, :] > position[:, None]
    out_THD = torch.empty(query_THD.shape, device="cuda")
    for head in range(query_THD.shape[1]):
        score = query_THD[:, head].float() @ key_SKD[:, head // group].T * query_THD.shape[2] ** -0.5
        out_THD[:, head] = score.masked_fill(is_hidden, -torch.inf).softmax(1) @ value_SKD[:, head // group]
    return out_THD


def measure(case: Case, arguments: argparse.Namespace) -> dict[str, float]:
    """Microseconds a launch: median, lowest and highest of replays."""
    times = replay_times(partial(attend, case), layers=arguments.layers, repeats=arguments.repeats)
    return {
        "us": round(statistics.median(times), 2),
        "us_min": round(min(times), 2),
        "us_max": round(max(times), 2),
    }


def print_row(name: str, row: dict[str, Any]) -> None:
    if "error" in row:
        print(f"{name:>26}  {row['error']}", file=sys.stderr)
        return
    for heads in HEADS:
        own = {label: time for label, time in row["times"].items() if label.startswith(f"{heads}:")}
        cells = " ".join(f"{label.split(': ')[1]}={time['us']:.1f}" for label, time in own.items())
        rate = own[f"{heads}: 4096"]["tflop_s"]
        print(
            f"{name:>26} {heads} heads, us: {cells}; {rate:.0f} TFLOP/s at 4096; "
            f"error {row['worst_error']:.1e}",
            file=sys.stderr,
            flush=True,
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one kernel")
    parser.add_argument(
        "--compile-timeout", type=float, default=240.0, help="seconds for all of them together"
    )
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()

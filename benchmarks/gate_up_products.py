"""The gated product of many tokens: cuBLAS alone, with the activation's kernel, and what does both.

Every variant runs in a process of its own; all compile at once and are let onto the GPU one after another,
each with a limit that begins with its turn, so that one that hangs costs only itself. A process says what it
has done, stage after stage from one tile of one launch on: of one that hangs or fails the row names the last
stage and has the figures so far. Each is checked against float32 first, also with numbers of tokens that fill
no tile, into memory that held NaN, and for equal results of equal calls. Times are medians in microseconds of
a CUDA graph that multiplies the matrices of several layers, random and more than any cache holds; cuBLAS is
timed first and last. ``--quick``: the two largest numbers of tokens only.

Usage: gate_up_products.py [--quick] [--output FILE]
The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

SHAPES = {"Qwen3-0.6B": (1024, 3072), "Llama-3.1-8B": (4096, 14336)}
"""Hidden and intermediate size."""
TOKENS = (256, 512, 1024, 2048, 4096)
CHECKED_TOKENS = (1, 333, 2048)
VARIANTS: dict[str, dict[str, int]] = {
    "128x128": {"block_o": 128, "num_stages": 4, "shared_by": 16, "skew": 0},
    "128x128 skewed": {"block_o": 128, "num_stages": 4, "shared_by": 16, "skew": 3},
    "128x128 skewed, 8 tall": {"block_o": 128, "num_stages": 4, "shared_by": 8, "skew": 3},
    "128x64 skewed": {"block_o": 64, "num_stages": 6, "shared_by": 16, "skew": 4},
}
LIMIT_S, ALL_S = 12.0, 70.0
"""Of one variant, from its turn on, and of everything."""
MIN_BYTES = 200 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    args = parser.parse_args()
    tokens = TOKENS[-2:] if args.quick else TOKENS
    if args.variant:
        run_variant(args.variant, tokens)
        return
    end = time.monotonic() + ALL_S
    names = ["library", *VARIANTS, "library again"]
    children = {name: Child(name, quick=args.quick) for name in names}
    results = {name: child.run(end) for name, child in children.items()}
    show(results, tokens)
    text = json.dumps({"benchmark": "gate_up_products", "unit": "us", "results": results, "meta": metadata()})
    if args.output:
        args.output.write_text(text + "\n")
    print(text)


class Child:
    """A process that prints ``ready`` when it has compiled and goes on when it has been given a line. From
    then on it prints stages and, as JSON, everything it has found so far."""

    def __init__(self, name: str, *, quick: bool) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, __file__, "--variant", name, *(["--quick"] if quick else [])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, bufsize=1
        )
        self.lines: list[str] = []
        self.is_ready = threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            self.is_ready.set()
        self.is_ready.set()

    def run(self, end: float) -> dict[str, Any]:
        start = time.monotonic()
        self.is_ready.wait(max(end - start, 0.1))
        waited = time.monotonic() - start
        if self.lines and self.process.poll() is None:
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write("go\n")
        limit = max(min(LIMIT_S, end - time.monotonic()), 0.1)
        self.reader.join(limit)
        is_late = self.reader.is_alive()
        if is_late:
            self.process.kill()
            self.reader.join(3)
        else:
            self.process.wait(3)
        found = [json.loads(line) for line in self.lines if line.startswith("{")]
        result: dict[str, Any] = found[-1] if found else {}
        if is_late or self.process.returncode != 0:
            why = f"killed after {limit:.0f} s" if is_late else f"exit status {self.process.returncode}"
            stages = [line for line in self.lines if not line.startswith("{")]
            self.log.seek(0)
            result["error"] = f"{why}, ready after {waited:.0f} s; did: {stages}; {self.log.read()[-1500:]}"
        return result


def run_variant(name: str, tokens: tuple[int, ...]) -> None:
    import torch
    import torch.nn.functional as F

    from gapless.kernels.activation import fused_silu_mul
    from gapless.kernels.gated_product import is_aligned, launch_gated
    from gapless.kernels.launch import compiling_ahead
    from gapless.kernels.linear_tiles import GatedTiles
    from gapless.kernels.linear_tuner import time_in_graph

    torch.set_grad_enabled(False)
    tiles = GatedTiles(block_t=128, block_i=64, **VARIANTS[name]) if name in VARIANTS else None

    def cublas(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight)

    def two_steps(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return fused_silu_mul(F.linear(x, weight))

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((x.shape[0], weight.shape[0] // 2))
        assert tiles is not None
        assert is_aligned(x, weight)
        launch_gated(x, weight, out, tiles)
        return out

    ways = {"ours": ours} if tiles else {"cublas": cublas, "cublas + silu": two_steps}
    sizes = [hidden for hidden, _ in SHAPES.values()]
    if tiles:
        sizes.insert(0, 64 * tiles.num_stages)
    with compiling_ahead():
        for hidden in sizes:
            for dtype in (torch.bfloat16, torch.float16) if tiles else (torch.bfloat16,):
                x, weight = (torch.empty(256, hidden, dtype=dtype, device="cuda") for _ in range(2))
                (ours if tiles else two_steps)(x, weight)
    print("ready", flush=True)
    sys.stdin.readline()
    result: dict[str, Any] = {}
    if tiles:
        run_small(ours, tiles)
    for model, (hidden, inner) in SHAPES.items():
        num_layers = max(2, -(-MIN_BYTES // (4 * inner * hidden)))
        weights = [make((2 * inner, hidden), hidden**-0.5) for _ in range(num_layers)]
        if tiles:
            result[model + " error"] = check(ours, hidden, weights[0])
            print(f"{model} is right", flush=True)
        num_rounds = -(-8 // num_layers)
        for num_tokens in tokens:
            x = make((num_tokens, hidden), 1.0)
            for label, multiply in ways.items():
                run = partial(call_all, multiply, x, weights * num_rounds)
                figure = round(1e3 * time_in_graph(run) / (num_rounds * num_layers), 2)
                result.setdefault(label, {}).setdefault(model, {})[str(num_tokens)] = figure
                print(json.dumps(result), flush=True)
        del weights


def run_small(ours: Callable[..., Any], tiles: Any) -> None:
    """One launch after another, each with more of what may go wrong than the one before."""
    import torch
    import torch.nn.functional as F

    ring = 64 * tiles.num_stages
    for stage, num_tokens, hidden, inner in (
        ("one tile, each buffer used once", 128, ring, tiles.block_o),
        ("one tile", 128, 1024, tiles.block_o),
        ("a tile for each program", 512, 1024, 8 * tiles.block_o),
        ("two tiles for most programs", 128, 1024, 200 * tiles.block_o),
        ("many tiles", 4096, 1024, 16 * tiles.block_o),
    ):
        x, weight = make((num_tokens, hidden), 1.0), make((2 * inner, hidden), hidden**-0.5)
        gate, up = F.linear(x.float(), weight.float()).chunk(2, dim=-1)
        expected = F.silu(gate) * up
        torch.cuda.synchronize()
        out = ours(x, weight)
        torch.cuda.synchronize()
        error = float((out.float() - expected).norm() / expected.norm())
        print(f"{stage}: error {error:.1e}", flush=True)


def call_all(multiply: Callable[..., object], x: Any, weights: list[Any]) -> None:
    for weight in weights:
        multiply(x, weight)


def make(shape: tuple[int, int], scale: float) -> Any:
    import torch

    return torch.randn(shape, device="cuda").mul_(scale).to(torch.bfloat16)


def check(ours: Callable[..., Any], hidden: int, weight: Any) -> float:
    """The largest relative error, by norms, of several numbers of tokens."""
    import torch
    import torch.nn.functional as F

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    worst = 0.0
    for dtype in (torch.bfloat16, torch.float16):
        cast = weight.to(dtype)
        for num_tokens in CHECKED_TOKENS:
            x = make((num_tokens, hidden + 64), 1.0).to(dtype)[:, :hidden]
            gate, up = F.linear(x.float(), cast.float()).chunk(2, dim=-1)
            expected = F.silu(gate) * up
            first = ours(x, cast)
            error = float((first.float() - expected).norm() / expected.norm())
            assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3), (num_tokens, dtype, error)
            assert all(torch.equal(first, ours(x, cast)) for _ in range(5)), (num_tokens, "calls differ")
            worst = max(worst, error)
    torch.use_deterministic_algorithms(False)
    return worst


def show(results: dict[str, dict[str, Any]], tokens: tuple[int, ...]) -> None:
    for name, result in results.items():
        for label, found in result.items():
            if label == "error" or label.endswith(" error"):
                print(f"{name}: {label} {found}")
                continue
            for model, figures in found.items():
                hidden, inner = SHAPES[model]
                shown = [
                    f"{t}: {figures[str(t)]} ({4e-6 * t * hidden * inner / figures[str(t)]:.0f} TFLOP/s)"
                    for t in tokens
                    if str(t) in figures
                ]
                print(f"{name}, {label}, {model}: " + "  ".join(shown))


def metadata() -> dict[str, Any]:
    from gpu_acceptance import metadata as of_machine

    return of_machine()


if __name__ == "__main__":
    main()

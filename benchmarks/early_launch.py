"""Our kernels behind products of cuBLAS, launched early (programmatic dependent launch) or when those ended.

A product of many rows fills every multiprocessor, so what is launched early behind it may win nothing and
still pay for it. Times are microseconds for a product and the kernel behind it, medians over replays of a
CUDA graph that holds 16 such pairs with weights of their own; early and late are processes of their own, one
after the other, twice. Shapes are those of Qwen3-VL-8B: its tower with 896 rows, its decoder with 288 and
1024.

    python benchmarks/early_launch.py [--output FILE]

Prints a table to stderr and one line of JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from attention_kernels import replay_times
from torch import Tensor
from torch.nn.functional import linear

from gapless.bench.meta import describe_run
from gapless.kernels import activation, layer_norm, norm, rope_cache, select

PAIRS = 16
TOWER_ROWS, DECODER_ROWS = (896,), (288, 1024)
HEAD_SIZE = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", choices=["early", "late"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child == "early", arguments.repeats)))
        return
    runs: dict[str, list[dict[str, float]]] = {"early": [], "late": []}
    for name in (*runs, *runs):
        words = [sys.executable, __file__, "--child", name, "--repeats", str(arguments.repeats)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
        runs[name].append(json.loads(done.stdout.splitlines()[-1]))
    for pair in runs["early"][0]:
        row = "  ".join(f"{name} " + " ".join(f"{run[pair]:7.2f}" for run in runs[name]) for name in runs)
        print(f"{pair:38} {row}", file=sys.stderr)
    result = {"benchmark": "early_launch", "unit": "us", "meta": describe_run(), "runs": runs}
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def measure(is_early: bool, repeats: int) -> dict[str, float]:
    """Microseconds by pair."""
    if not is_early:
        select.has_early_launch = lambda device: False  # type: ignore[assignment]
    torch.manual_seed(0)
    cases = {f"{name}, {rows} rows": (rows, *case) for rows in TOWER_ROWS for name, case in TOWER.items()}
    cases |= {
        f"{name}, {rows} rows": (rows, *case) for rows in DECODER_ROWS for name, case in DECODER.items()
    }
    found = {}
    for name, (rows, num_in, num_out, make) in cases.items():
        x_TI, bias_O = random(rows, num_in), random(num_out) if make in WITH_BIAS else None
        weights = [random(num_out, num_in) * num_in**-0.5 for _ in range(PAIRS)]
        behind = make(rows, num_out)

        def pair(
            layer: int,
            x_TI: Tensor = x_TI,
            weights: list[Tensor] = weights,
            bias_O: Tensor | None = bias_O,
            behind: Callable[[Tensor], object] = behind,
        ) -> None:
            behind(linear(x_TI, weights[layer], bias_O))

        found[name] = round(statistics.median(replay_times(pair, layers=PAIRS, repeats=repeats)), 2)
    return found


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


Make = Callable[[int, int], Callable[[Tensor], object]]


def add_layer_norm(rows: int, size: int) -> Callable[[Tensor], object]:
    residual, weight, bias = random(rows, size), random(size), random(size)
    return lambda update: layer_norm.fused_add_layer_norm(update, residual, weight, bias, 1e-6)


def rotate_of_tower(rows: int, size: int) -> Callable[[Tensor], object]:
    num_heads, head_size = 16, size // 48
    table = torch.randn(rows, 2, head_size // 2, device="cuda")
    return lambda qkv: rope_cache.rotate_heads(qkv, None, 0.0, table, None, num_heads)


def rotate_of_decoder(rows: int, size: int) -> Callable[[Tensor], object]:
    num_kv_heads = 8
    weight = random(size // HEAD_SIZE - num_kv_heads, HEAD_SIZE)
    table = torch.randn(rows, 2, HEAD_SIZE // 2, device="cuda")
    return lambda qkv: rope_cache.rotate_heads(qkv, weight, 1e-6, table, None, num_kv_heads)


def add_rms_norm(rows: int, size: int) -> Callable[[Tensor], object]:
    residual, weight = random(rows, size), random(size)
    return lambda update: norm.fused_add_rms_norm(update, residual, weight, 1e-6)


def silu_mul(rows: int, size: int) -> Callable[[Tensor], object]:
    return activation.fused_silu_mul


WITH_BIAS: tuple[Make, ...] = (add_layer_norm, rotate_of_tower)
TOWER: dict[str, tuple[int, int, Make]] = {
    "tower: q/k/v, rotation": (1152, 3456, rotate_of_tower),
    "tower: projection, layer norm": (1152, 1152, add_layer_norm),
    "tower: second of MLP, layer norm": (4304, 1152, add_layer_norm),
}
DECODER: dict[str, tuple[int, int, Make]] = {
    "decoder: q/k/v, rotation": (4096, 6144, rotate_of_decoder),
    "decoder: projection, norm": (4096, 4096, add_rms_norm),
    "decoder: gate and up, SiLU": (4096, 24576, silu_mul),
    "decoder: down, norm": (12288, 4096, add_rms_norm),
}

if __name__ == "__main__":
    main()

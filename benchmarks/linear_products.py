"""Matrix products of a few tokens, ours against cuBLAS: each alone, and the four of a layer in a chain.

Shapes come from config folders; weights are random and differ from layer to layer, so that no cache holds
them. Everything runs in CUDA graphs and is a median in microseconds per product (or per layer). ``--all``
times every candidate of the tuner too, after compiling them. ``bound`` is the weights' bytes at 4.3 TB/s.
The built-in rule of ``src/gapless/kernels/linear_rules.py`` was made from this.

Usage: linear_products.py --configs DIR... [--tokens 1 8 32] [--all] [--output FILE]
The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_acceptance import metadata
from torch import Tensor

from gapless.kernels import select
from gapless.kernels.activation import fused_silu_mul
from gapless.kernels.linear import gate_up_silu, launch_product, small_linear
from gapless.kernels.linear_choice import choose
from gapless.kernels.linear_tuner import candidates, time_in_graph
from gapless.kernels.matrices import Matrices
from gapless.models.config import DecoderConfig, parse_config

BYTES_PER_US = 4.3e6
MAX_LAYERS = 10
"""That are made; enough for any cache to be too small."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", type=Path, required=True)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 8, 16, 32, 64])
    parser.add_argument("--all", action="store_true", help="time every candidate of the tuner")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "linear_products", "unit": "us", "rows": [], "layers": []}
    with torch.no_grad():
        for folder in args.configs:
            config = parse_config(json.loads((folder / "config.json").read_text()), source=str(folder))
            products = make_products(config)
            for num_tokens in args.tokens:
                for name, matrices in products.items():
                    row = measure(matrices, num_tokens, every=args.all)
                    show(result["rows"], {"model": folder.name, "product": name, **row})
                layer = measure_layers(products, num_tokens)
                show(result["layers"], {"model": folder.name, "tokens": num_tokens, **layer})
            del products
            torch.cuda.empty_cache()
    result["meta"] = metadata()
    text = json.dumps(result)
    if args.output:
        args.output.write_text(text + "\n")
    print(text)


def make_products(config: DecoderConfig) -> dict[str, Matrices]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    shapes = {
        "qkv": (query + 2 * kv, hidden),
        "out": (hidden, query),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (config.vocab_size, hidden),
    }
    products = {}
    for name, shape in shapes.items():
        num_layers = 2 if name == "head" else min(config.num_layers, MAX_LAYERS)
        weights = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(num_layers)]
        scaled = tuple(weight.mul_(shape[1] ** -0.5) for weight in weights)
        products[name] = Matrices(weights=scaled, bias=None, is_gated=name == "gate_up")
    return products


def measure(matrices: Matrices, num_tokens: int, *, every: bool) -> dict[str, Any]:
    """Microseconds of one product: cuBLAS, what the operator chooses, the best candidate."""
    weights, is_gated = matrices.weights, matrices.is_gated
    x_TI = torch.randn(num_tokens, weights[0].shape[1], dtype=torch.bfloat16, device="cuda")

    def time_each(multiply: Callable[[Tensor], object]) -> float:
        ms = time_in_graph(lambda: [multiply(weight) for weight in weights] and None)
        return round(1e3 * ms / len(weights), 2)

    operator = gate_up_silu if is_gated else small_linear
    tiles = choose(matrices.product(num_tokens), x_TI.device)
    row: dict[str, Any] = {
        "tokens": num_tokens,
        "bound": round(weights[0].nbytes / BYTES_PER_US, 2),
        "cublas": time_each(lambda weight: library(x_TI, weight, is_gated)),
        "ours": time_each(lambda weight: operator(x_TI, weight, None)),
        "tiles": tiles and asdict(tiles),
    }
    if every:
        row["candidates"] = sorted(
            timed_candidates(matrices, num_tokens, x_TI, time_each), key=lambda entry: entry["us"]
        )[:5]
    return row


def timed_candidates(
    matrices: Matrices, num_tokens: int, x_TI: Tensor, time_each: Callable[..., float]
) -> Iterator[dict[str, Any]]:
    for tiles in candidates(matrices.product(num_tokens)):

        def ours(weight: Tensor, tiles: Any = tiles) -> Tensor:
            return launch_product(x_TI, weight, None, tiles, is_gated=matrices.is_gated)

        try:
            yield {"us": time_each(ours), "tiles": asdict(tiles)}
        except select.launch_errors() as error:
            print(f"{tiles}: {error}", file=sys.stderr)


def measure_layers(products: dict[str, Matrices], num_tokens: int) -> dict[str, float]:
    """Microseconds of a layer's four products, each reading the results of the one ahead."""
    layers = list(zip(*(products[name].weights for name in ("qkv", "out", "gate_up", "down")), strict=True))
    hidden_TE = torch.randn(num_tokens, layers[0][0].shape[1], dtype=torch.bfloat16, device="cuda")

    def chain(linear: Callable[..., Tensor], gated: Callable[..., Tensor]) -> None:
        out_TE = hidden_TE
        for qkv, out, gate_up, down in layers:
            heads_TI = linear(out_TE, qkv, None)[:, : out.shape[1]]
            out_TE = linear(gated(linear(heads_TI, out, None), gate_up, None), down, None)

    def time_layers(linear: Callable[..., Tensor], gated: Callable[..., Tensor]) -> float:
        return round(1e3 * time_in_graph(lambda: chain(linear, gated)) / len(layers), 2)

    figures = {
        "cublas": time_layers(F.linear, lambda x, weight, bias: library(x, weight, True)),
        "ours": time_layers(small_linear, gate_up_silu),
    }
    early, select.has_early_launch = select.has_early_launch, lambda device: False  # type: ignore[assignment]
    try:
        figures["ours, not early"] = time_layers(small_linear, gate_up_silu)
    finally:
        select.has_early_launch = early
    return figures


def library(x_TI: Tensor, weight_OI: Tensor, is_gated: bool) -> Tensor:
    out = F.linear(x_TI, weight_OI)
    return fused_silu_mul(out) if is_gated else out


def show(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    rows.append(row)
    print({name: value for name, value in row.items() if name not in ("tiles", "candidates")}, flush=True)


if __name__ == "__main__":
    main()

"""Matrix products of a few tokens, ours against cuBLAS: each alone, and the four of a layer in a chain.

Shapes come from config folders; weights are random and differ from layer to layer, so that no cache holds
them. Everything runs in CUDA graphs and is a median in microseconds per product (or per layer). ``--all``
times every candidate of the tuner too, after compiling them. ``bound`` is the weights' bytes at 4.3 TB/s.
The built-in rule of ``src/gapless/kernels/linear_rules.py`` was made from this.

``--summed`` measures something else: products with the residual addition and the norm behind them, every
candidate of the tuner (in 1 to 16 parts) against cuBLAS and against ``today``, the product as if no norm
followed. Product and norm alternate, and each reads what the one ahead wrote, so that an early launch has to
wait as in a step. Figures are microseconds of the two kernels; ``bound`` is that of the product alone.

Usage: linear_products.py --configs DIR... [--tokens 1 8 32] [--all] [--output FILE]
       linear_products.py --configs DIR... --summed [--products out down] [--tokens 32 128] [--output FILE]
The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_acceptance import metadata
from torch import Tensor

from gapless.kernels import select
from gapless.kernels.activation import fused_silu_mul
from gapless.kernels.launch import compiling_ahead
from gapless.kernels.linear import gate_up_silu, launch_product, small_linear
from gapless.kernels.linear_choice import choose
from gapless.kernels.linear_tiles import Tiles
from gapless.kernels.linear_tuner import candidates, time_in_graph
from gapless.kernels.matrices import Matrices
from gapless.kernels.norm import add_rms_norm_into
from gapless.kernels.summed_product import launch_summed_into
from gapless.models.config import DecoderConfig, parse_config

BYTES_PER_US = 4.3e6
SUMMED = ("out", "down")
MIN_BYTES = 200 << 20
"""Of all matrices that a run of ``--summed`` reads: several times the second-level cache."""
MAX_LAYERS = 10
"""That are made; enough for any cache to be too small."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", type=Path, required=True)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 8, 16, 32, 64])
    parser.add_argument("--all", action="store_true", help="time every candidate of the tuner")
    parser.add_argument("--summed", action="store_true", help="only products with a norm behind them")
    parser.add_argument("--products", nargs="+", choices=SUMMED, default=SUMMED, help="of --summed")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "linear_products", "unit": "us", "rows": [], "layers": []}
    if args.summed:
        result = {"benchmark": "linear_products --summed", "unit": "us", "summed": []}
    with torch.no_grad():
        for folder in args.configs:
            config = parse_config(json.loads((folder / "config.json").read_text()), source=str(folder))
            if args.summed:
                result["summed"] += measure_model_summed(folder.name, config, args.products, args.tokens)
                continue
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
    products = {}
    for name, shape in shapes_of(config).items():
        num_layers = 2 if name == "head" else min(config.num_layers, MAX_LAYERS)
        products[name] = Matrices(
            weights=make_weights(shape, num_layers), bias=None, is_gated=name == "gate_up"
        )
    return products


def shapes_of(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    return {
        "qkv": (query + 2 * kv, hidden),
        "out": (hidden, query),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (config.vocab_size, hidden),
    }


def make_weights(shape: tuple[int, int], num_layers: int) -> tuple[Tensor, ...]:
    weights = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(num_layers)]
    return tuple(weight.mul_(shape[1] ** -0.5) for weight in weights)


def measure_model_summed(
    model: str, config: DecoderConfig, names: Sequence[str], tokens: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Everything is compiled first, side by side: that is most of the time."""
    chains = []
    for name in names:
        shape = shapes_of(config)[name]
        num_layers = max(2, math.ceil(MIN_BYTES / (2 * shape[0] * shape[1])))
        group = Matrices(weights=make_weights(shape, num_layers), bias=None, is_gated=False, is_summed=True)
        chains += [(name, SummedChain(group, num_tokens)) for num_tokens in tokens]
    with compiling_ahead():
        for _, chain in chains:
            for tiles in chain.candidates:
                chain.layer(0, chain.ours(tiles))
    for name, chain in chains:
        row = {"model": model, "product": name, **chain.measure()}
        print({key: value for key, value in row.items() if key not in ("tiles", "candidates")}, flush=True)
        for entry in row["candidates"]:
            print("   ", entry["us"], {k: v for k, v in entry["tiles"].items() if k != "on_tensor_cores"})
        yield row


Step = Callable[[Tensor, Tensor, Tensor], None]
"""A product and its norm: weights, the residual stream before, and where it goes."""


class SummedChain:
    """The products of many layers, each with its norm, in static buffers: a norm writes into what the next
    product reads, of which there is more: the rest stays what it was."""

    def __init__(self, group: Matrices, num_tokens: int) -> None:
        self.weights, self.num_tokens = group.weights, num_tokens
        size, num_in = self.weights[0].shape
        assert size <= num_in
        self.product = group.product(num_tokens)
        self.candidates = list(candidates(self.product))
        self.x_TI = torch.randn(num_tokens, num_in, dtype=torch.bfloat16, device="cuda")
        self.normed_TE = self.x_TI.view(-1)[: num_tokens * size].view(num_tokens, size)
        self.residuals = [torch.randn_like(self.normed_TE) for _ in range(2)]
        self.norm_weight_E = torch.ones_like(self.residuals[0][0])

    def layer(self, index: int, step: Step) -> None:
        before, after = self.residuals[index % 2], self.residuals[(index + 1) % 2]
        step(self.weights[index], before, after)

    def ours(self, tiles: Tiles) -> Step:
        def step(weight_EI: Tensor, before_TE: Tensor, after_TE: Tensor) -> None:
            end = self.norm_weight_E, 1e-6
            launch_summed_into(self.x_TI, weight_EI, before_TE, *end, tiles, after_TE, self.normed_TE)

        return step

    def in_two(self, multiply: Callable[[Tensor, Tensor, None], Tensor]) -> Step:
        def step(weight_EI: Tensor, before_TE: Tensor, after_TE: Tensor) -> None:
            update_TE = multiply(self.x_TI, weight_EI, None)
            add_rms_norm_into(update_TE, before_TE, self.norm_weight_E, 1e-6, after_TE, self.normed_TE)

        return step

    def time(self, step: Step) -> float:
        def run() -> None:
            for index in range(len(self.weights)):
                self.layer(index, step)

        return round(1e3 * time_in_graph(run) / len(self.weights), 2)

    def measure(self) -> dict[str, Any]:
        tiles = choose(self.product, self.x_TI.device)
        timed = []
        for candidate in self.candidates:
            try:
                timed.append({"us": self.time(self.ours(candidate)), "tiles": asdict(candidate)})
            except select.launch_errors() as error:
                print(f"{candidate}: {error}", file=sys.stderr)
        cublas = self.time(self.in_two(F.linear))
        return {
            "tokens": self.num_tokens,
            "bound": round(self.weights[0].nbytes / BYTES_PER_US, 2),
            "cublas": cublas,
            "today": self.time(self.in_two(small_linear)),
            "ours": self.time(self.ours(tiles)) if isinstance(tiles, Tiles) else cublas,
            "tiles": tiles and asdict(tiles),
            "num_candidates": len(timed),
            "candidates": sorted(timed, key=lambda entry: entry["us"])[:5],
        }


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

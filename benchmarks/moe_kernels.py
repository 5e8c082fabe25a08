"""A mixture of experts, our kernels against ``grouped_mm`` and against reading the weights once.

Shapes come from a config folder; routing is random, weights differ from layer to layer, so that no cache
holds them. Everything runs in CUDA graphs and is a median in microseconds per layer. ``ours`` and
``grouped_mm`` are whole blocks behind the router's logits: routing, both products, the weighted sum; our
kernels alone are ``parts``. ``bound`` is the bytes of the experts that were chosen, at 4.3 TB/s, or the
arithmetic at 800 TFLOP/s, whichever is more. ``--sweep`` times other tiles of the two products too, for the
numbers of tokens it names or for all; tiles that do not fit stand last, with the error.

Usage: moe_kernels.py --config DIR [--tokens 1 8 32 128 512 2048] [--sweep [512 2048]] [--output FILE]
The last line is the result as JSON; the file has what was measured so far at any time.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_acceptance import metadata
from torch import Tensor

from gapless.kernels import moe, moe_sum
from gapless.kernels.launch import can_compile_ahead, compiling_ahead
from gapless.kernels.linear_tuner import time_in_graph
from gapless.kernels.moe import ExpertTiles
from gapless.kernels.norm import fused_add_rms_norm
from gapless.kernels.select import launch_errors
from gapless.models.config import parse_config
from gapless.models.grouped_experts import choose_experts, grouped_experts
from gapless.models.moe_config import ExpertConfig

BYTES_PER_US = 4.3e6
FLOPS_PER_US = 8e8
SHARED_BYTES = 227 << 10
"""Of a multiprocessor: a product keeps all its stages there."""
NUM_LAYERS = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """Weights of one layer, and a batch routed by it."""

    gate_up_NOE: Tensor
    down_NEF: Tensor
    logits_TN: Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 128, 512, 2048])
    parser.add_argument("--sweep", nargs="*", type=int, help="tokens to time other tiles for (none: all)")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    raw = json.loads((args.config / "config.json").read_text())
    config = parse_config(raw, source=str(args.config))
    if config.experts is None:
        parser.error(f"{args.config} has no experts")
    swept = [] if args.sweep is None else args.sweep or args.tokens
    result: dict[str, Any] = {"benchmark": "moe_kernels", "unit": "us", "model": args.config.name, "rows": []}
    result["meta"] = metadata()
    with torch.no_grad():
        weights = make_weights(config.experts, config.hidden_size)
        for num_tokens in args.tokens:
            rows = measure(config.experts, weights, num_tokens, sweep=num_tokens in swept)
            for count, row in enumerate(rows):
                result["rows"] = [r for r in result["rows"] if r["tokens"] != num_tokens] + [row]
                if count == 0:
                    print(row, flush=True)
                if args.output:
                    args.output.write_text(json.dumps(result) + "\n")
    print(json.dumps(result))


def make_weights(config: ExpertConfig, hidden: int) -> list[tuple[Tensor, Tensor]]:
    size, num_experts = config.intermediate_size, config.num_experts

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0.0, shape[-1] ** -0.5)

    return [
        (normal(num_experts, 2 * size, hidden), normal(num_experts, hidden, size)) for _ in range(NUM_LAYERS)
    ]


def measure(
    config: ExpertConfig, weights: list[tuple[Tensor, Tensor]], num_tokens: int, *, sweep: bool
) -> Iterator[dict[str, Any]]:
    """The row, and again with every product that was swept."""
    hidden = weights[0][0].shape[2]
    x_TE = torch.randn(num_tokens, hidden, dtype=torch.bfloat16, device="cuda")
    limits = torch.tensor([0, num_tokens], dtype=torch.int32, device="cuda")
    layers = [
        Layer(
            gate_up_NOE=gate_up,
            down_NEF=down,
            logits_TN=torch.randn(num_tokens, config.num_experts, dtype=torch.bfloat16, device="cuda"),
        )
        for gate_up, down in weights
    ]
    is_real_T = torch.ones(num_tokens, dtype=torch.bool, device="cuda")
    out_TE, norm_E = torch.empty_like(x_TE), torch.ones_like(x_TE[0])
    block_p = moe.block_slots(num_tokens, num_experts=config.num_experts, top_k=config.top_k)

    def time_layers(run: Callable[[int, Layer], object]) -> float:
        ms = time_in_graph(lambda: [run(i, layer) for i, layer in enumerate(layers)] and None)
        return round(1e3 * ms / len(layers), 2)

    def route(layer: Layer) -> tuple[Tensor, ...]:
        return moe.route_tokens(layer.logits_TN, limits, config.top_k, config.renormalizes, block_p)

    def ours(index: int, layer: Layer) -> None:
        weights_TK, _, slots, blocks, _ = route(layer)
        act = moe.expert_gate_up(x_TE, layer.gate_up_NOE, slots, blocks, config.top_k)
        by_slot = moe.expert_down(act, layer.down_NEF, slots, blocks, weights_TK)
        moe_sum.combine_experts(by_slot, limits, None, None, out_TE)

    def library(index: int, layer: Layer) -> None:
        weights_TK, experts_TK = choose_experts(
            layer.logits_TN, is_real_T, top_k=config.top_k, renormalizes=config.renormalizes
        )
        total_TE, _ = grouped_experts(x_TE, layer.gate_up_NOE, layer.down_NEF, weights_TK, experts_TK)
        out_TE.copy_(total_TE)

    routed = [route(layer) for layer in layers]
    acts = [
        moe.expert_gate_up(x_TE, layer.gate_up_NOE, r[2], r[3], config.top_k)
        for layer, r in zip(layers, routed, strict=True)
    ]
    by_slot = [
        moe.expert_down(act, layer.down_NEF, r[2], r[3], r[0])
        for act, layer, r in zip(acts, layers, routed, strict=True)
    ]
    num_chosen = sum(int((r[4] > 0).sum()) for r in routed) / len(routed)
    expert_bytes = layers[0].gate_up_NOE[0].nbytes + layers[0].down_NEF[0].nbytes
    flops = expert_bytes * num_tokens * config.top_k  # two per weight, and a weight is two bytes
    parts: dict[str, Callable[[int, Layer], object]] = {
        "route": lambda i, layer: route(layer),
        "gate_up": lambda i, layer: moe.expert_gate_up(
            x_TE, layer.gate_up_NOE, routed[i][2], routed[i][3], config.top_k
        ),
        "down": lambda i, layer: moe.expert_down(
            acts[i], layer.down_NEF, routed[i][2], routed[i][3], routed[i][0]
        ),
        "combine": lambda i, layer: moe_sum.combine_experts(by_slot[i], limits, None, None, out_TE),
        "add_norm": lambda i, layer: fused_add_rms_norm(out_TE, x_TE, norm_E, 1e-6),
        "combine_add_norm": lambda i, layer: moe_sum.combine_add_rms_norm(
            by_slot[i], limits, None, None, x_TE, norm_E, 1e-6
        ),
    }
    for run in parts.values():
        run(0, layers[0])  # compiles
    warm_up()
    row: dict[str, Any] = {
        "tokens": num_tokens,
        "experts": num_chosen,
        "bound": round(max(num_chosen * expert_bytes / BYTES_PER_US, flops / FLOPS_PER_US), 2),
        "ours": time_layers(ours),
        "grouped_mm": timed_or_error(lambda: time_layers(library)),
        "parts": {name: time_layers(run) for name, run in parts.items()},
    }
    yield row
    if sweep:
        row["tiles"] = {}
        for name, is_down in (("gate_up", False), ("down", True)):
            by_tiles = sweep_tiles(config, layers, x_TE, acts, by_slot, time_layers, is_down=is_down)
            row["tiles"][name] = by_tiles
            for entry in by_tiles[:4]:
                print(name, entry, flush=True)
            yield row


def warm_up() -> None:
    """A fifth of a second of work: while kernels were compiled, an idle GPU lowered its clocks, and the small
    kernels then took half as long again."""
    matrix = torch.zeros(8192, 8192, dtype=torch.bfloat16, device="cuda")
    for _ in range(120):
        matrix @ matrix
    torch.cuda.synchronize()


def sweep_tiles(
    config: ExpertConfig,
    layers: list[Layer],
    x_TE: Tensor,
    acts: list[Tensor],
    by_slot: list[Tensor],
    time_layers: Callable[[Callable[[int, Layer], object]], float],
    *,
    is_down: bool,
) -> list[dict[str, Any]]:
    """One of the products with every candidate, the fastest first, those with an error last."""
    num_tokens, top_k = x_TE.shape[0], config.top_k
    limits = torch.tensor([0, num_tokens], dtype=torch.int32, device="cuda")

    @functools.cache
    def routed(block_p: int) -> list[tuple[Tensor, ...]]:
        return [
            moe.route_tokens(layer.logits_TN, limits, top_k, config.renormalizes, block_p) for layer in layers
        ]

    def product(tiles: ExpertTiles, i: int, layer: Layer) -> None:
        weights_TK, _, slots, blocks, _ = routed(tiles.block_p)[i]
        source, weight = (acts[i], layer.down_NEF) if is_down else (x_TE, layer.gate_up_NOE)
        result, scales = (by_slot[i], weights_TK) if is_down else (torch.empty_like(acts[i]), None)
        moe.launch_expert_product(source, weight, slots, blocks, scales, result, tiles, top_k=top_k)

    chosen = moe.choose_tiles(
        num_tokens,
        num_experts=config.num_experts,
        top_k=top_k,
        num_out=by_slot[0].shape[1] if is_down else acts[0].shape[1],
        is_gate_up=not is_down,
    )
    wanted = list(dict.fromkeys([chosen, *candidates(chosen.block_p, is_down=is_down)]))
    if can_compile_ahead(x_TE.device):
        for tiles in wanted:
            routed(tiles.block_p)
        with compiling_ahead():
            for tiles in wanted:
                product(tiles, 0, layers[0])
    warm_up()
    timed, failed = [], []
    for tiles in wanted:
        us = timed_or_error(functools.partial(time_layers, functools.partial(product, tiles)))
        described = {"is_rule": tiles == chosen, "tiles": dataclasses.asdict(tiles)}
        if isinstance(us, float):
            timed.append({"us": us, **described})
        else:
            failed.append({"error": us, **described})
    return sorted(timed, key=lambda entry: entry["us"]) + failed


def candidates(block_p: int, *, is_down: bool) -> Iterator[ExpertTiles]:
    """About ten that make sense around ``block_p`` slots a block, of those that fit a multiprocessor."""
    # Whether the weights stand on the left, slots, output and input features, warps, stages.
    shapes: list[tuple[bool, int, int, int, int, int]] = []
    if block_p <= 64:
        for rows in sorted({min(block_p, 32), block_p}):
            shapes += [(True, rows, *rest) for rest in ((64, 128, 4, 3), (128, 64, 4, 4), (128, 128, 4, 3))]
    if block_p <= 32:
        shapes += [(True, block_p, *rest) for rest in ((64, 128, 4, 4), (64, 128, 4, 5), (64, 64, 4, 5))]
    else:
        shapes += [(False, 64, *rest) for rest in ((64, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4))]
        shapes += [(False, 128, *rest) for rest in ((64, 64, 8, 4), (128, 64, 8, 3), (128, 64, 8, 4))]
    if block_p == 128:
        shapes += [(False, 128, *rest) for rest in ((64, 64, 4, 4), (256, 64, 8, 3), (256, 64, 8, 4))]
    for is_left, rows, block_o, block_i, warps, stages in shapes:
        num_weights = block_o if is_down else 2 * block_o
        shared_bytes = (num_weights + rows) * block_i * 2 * stages
        sums = rows * num_weights // (32 * warps)  # of a thread, which has 255 registers
        if shared_bytes <= SHARED_BYTES and sums <= 128:
            yield ExpertTiles(
                block_p=rows,
                block_o=block_o,
                block_i=block_i,
                weights_left=is_left,
                num_warps=warps,
                num_stages=stages,
            )


def timed_or_error(time: Callable[[], float]) -> float | str:
    try:
        return time()
    except launch_errors() as error:  # a shape that does not fit, or cannot be captured
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return f"{type(error).__name__}: {error}".splitlines()[0]


if __name__ == "__main__":
    main()

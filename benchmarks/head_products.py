"""The head and its greedy choice: one kernel in many tilings, beside a product and a choice behind it.

Shapes come from config folders; weights are random, in copies enough that no cache holds them. A step is a
norm of the hidden states, as an engine's ends with one, and the head; steps lie in a CUDA graph, and figures
are medians of its replays in microseconds a step. ``apart`` is the product of
``kernels/linear.py`` and ``finish_greedy``. Every tiling's tokens must be the best of its own rounded logits,
and its logits near those of ``apart``. The rule of ``src/gapless/kernels/head_tiles.py`` was made from this.

Usage: head_products.py --configs DIR... [--rows 8 32 128] [--output FILE]
The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpu_acceptance import metadata
from linear_products import make_weights

from gapless.kernels.head import finish_greedy
from gapless.kernels.head_product import launch_head
from gapless.kernels.head_tiles import HeadTiles, default_head_tiles, that_fit
from gapless.kernels.launch import compiling_ahead
from gapless.kernels.linear import small_linear
from gapless.kernels.linear_tuner import time_in_graph
from gapless.kernels.norm import fused_rms_norm
from gapless.kernels.select import HOPPER_SHARED_BYTES, launch_errors
from gapless.models.config import parse_config

COPIES, STEPS = 2, 20
BLOCKS = ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8), (256, 64, 8))
"""Tokens of the vocabulary, columns and warps."""
STAGES = (3, 4, 5)
TOLERANCE = 2.0**-7
"""Of a logit: about two units in its last place."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--configs", nargs="+", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 32, 64, 128, 256])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "head_products", "unit": "us", "rows": []}
    with torch.no_grad():
        for folder in args.configs:
            config = parse_config(json.loads((folder / "config.json").read_text()), source=str(folder))
            weights = make_weights((config.vocab_size, config.hidden_size), COPIES)
            steps = [Steps(weights, num_rows) for num_rows in args.rows]
            with compiling_ahead():
                for step in steps:
                    for tiles in (None, *step.tilings()):
                        step.run(tiles, 0)
            for step in steps:
                result["rows"].append({"model": folder.name, **step.measure()})
                show(result["rows"][-1])
            del weights, steps
            torch.cuda.empty_cache()
    result["meta"] = metadata()
    text = json.dumps(result)
    if args.output:
        args.output.write_text(text + "\n")
    print(text)


def show(row: dict[str, Any]) -> None:
    timed = [(entry["us"], entry["tiles"]) for entry in row["tilings"] if "us" in entry]
    rule = next(entry.get("us") for entry in row["tilings"] if entry["is_rule"])
    print(f"{row['model']} {row['num_rows']} rows: apart {row['apart_us']}, rule {rule}", flush=True)
    for us, tiles in sorted(timed, key=lambda pair: pair[0])[:3]:
        print(f"    {us} {tiles}", flush=True)


class Steps:
    """Of one number of rows."""

    def __init__(self, weights: tuple[torch.Tensor, ...], num_rows: int) -> None:
        size, num_in = weights[0].shape
        self.weights, self.num_rows = weights, num_rows
        self.states = torch.randn(num_rows, num_in, device="cuda").bfloat16()
        self.norm_weight = torch.ones(num_in, device="cuda").bfloat16()
        self.logits = torch.zeros(num_rows, size, device="cuda")
        self.tokens = torch.zeros(num_rows, device="cuda", dtype=torch.int64)
        self.flag = torch.zeros(1, device="cuda", dtype=torch.int32)

    def tilings(self) -> Iterator[HeadTiles]:
        """The rule's first."""
        seen = []
        rule = default_head_tiles(self.num_rows)
        others = (
            HeadTiles(
                block_r=min(max(self.num_rows, 8), 256),
                block_o=block_o,
                block_i=block_i,
                num_warps=num_warps,
                num_stages=num_stages,
            )
            for block_o, block_i, num_warps in BLOCKS
            for num_stages in STAGES
        )
        for tiles in (rule, *others):
            fitting = that_fit(tiles, self.num_rows, shared_bytes=HOPPER_SHARED_BYTES)
            if fitting is not None and fitting not in seen:
                seen.append(fitting)
                yield fitting

    def run(self, tiles: HeadTiles | None, copy: int) -> None:
        hidden, weight = fused_rms_norm(self.states, self.norm_weight, 1e-6), self.weights[copy]
        if tiles is None:
            logits = small_linear(hidden, weight, None)
            finish_greedy(logits, self.logits, self.tokens, self.flag, -1)
        else:
            launch_head(hidden, weight, self.logits, self.tokens, self.flag, -1, tiles)

    def measure(self) -> dict[str, Any]:
        expected, apart = self.logits_of(None), self.microseconds(None)
        entries = []
        for index, tiles in enumerate(self.tilings()):
            entry: dict[str, Any] = {"tiles": asdict(tiles), "is_rule": index == 0}
            try:
                self.check(tiles, expected)
                entry["us"] = self.microseconds(tiles)
            except launch_errors() as error:
                entry["error"] = str(error)[:100]
            entries.append(entry)
        return {"num_rows": self.num_rows, "apart_us": apart, "tilings": entries}

    def logits_of(self, tiles: HeadTiles | None) -> torch.Tensor:
        self.flag.fill_(1)
        self.run(tiles, 0)
        self.flag.fill_(0)
        return self.logits.clone()

    def check(self, tiles: HeadTiles, expected: torch.Tensor) -> None:
        logits = self.logits_of(tiles)
        lowest = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
        assert torch.equal(self.tokens, lowest), f"{tiles}: tokens are not the best of their logits"
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)

    def microseconds(self, tiles: HeadTiles | None) -> float:
        def steps() -> None:
            for step in range(STEPS):
                self.run(tiles, step % COPIES)

        return round(1e3 * time_in_graph(steps) / STEPS, 2)


if __name__ == "__main__":
    main()

"""Whole prefill graphs by the tile of Hopper's attention kernel: what ``hopper_tile`` is chosen by.

Launches of attention alone, one behind the other, hide what a layer pays for a kernel's beginning and end,
because there the next launch runs beside it. So every tile gets an engine, with dummy weights, and the GPU
times its prefill graphs and the graph of the head, back to back. A tile is consumers, keys and stages;
``rule`` is what the rule gives, ``triton`` Triton's kernel. Logits must be those of the first tile within the
noise of bf16.

    python benchmarks/prefill_tiles.py --model DIR --tokens 512 1024 [--tiles rule triton 1:128:2 2:64:3]
    python benchmarks/prefill_tiles.py --model DIR --tokens 4096 --prompts 8 --tiles rule 2:64:3 2:128:2
    python benchmarks/prefill_tiles.py --model DIR --tiles rule --whole-layers    # prefill without a tail

Prints a table to stderr and one line of JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from host_time import gpu_us, greedy, open_model, random_prompt

from gapless import LLM
from gapless.attention import triton_paged
from gapless.attention.tile_rules import HOPPER_CONSUMER_ROWS, PrefillTile, hopper_tile
from gapless.bench.meta import describe_run
from gapless.engine.graph_set import GraphSet

MOST_NOISE = 0.05
"""Root mean square of a difference of logits, in their standard deviations: bf16 through all layers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="folder with config.json; its weights are dummies")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 768, 1024, 2048, 4096])
    parser.add_argument("--prompts", type=int, default=1, help="of equal length, that share a step's tokens")
    parser.add_argument("--tiles", nargs="+", default=["rule", "triton", "1:128:2", "2:64:3", "2:128:2"])
    parser.add_argument("--whole-layers", action="store_true", help="the last layer too, for all tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.whole_layers:
        GraphSet._has_tail = lambda self, prefill, decode: False  # type: ignore[method-assign]
    times: dict[str, dict[int, float]] = {}
    expected: dict[int, torch.Tensor] = {}
    for name in arguments.tiles:
        times[name] = measure(name, arguments, expected)
        cells = " ".join(f"{tokens}: {us:.0f}" for tokens, us in times[name].items())
        print(f"{name:>8}  us by tokens  {cells}", file=sys.stderr)
    result = {
        "benchmark": "prefill_tiles",
        "model": Path(arguments.model).name,
        "prompts": arguments.prompts,
        "meta": describe_run(),
        "unit": "us of the GPU",
        "times": times,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def measure(name: str, arguments: Namespace, expected: dict[int, torch.Tensor]) -> dict[int, float]:
    """Microseconds by tokens; ``expected`` keeps the logits of the first tile."""
    options = Namespace(
        model=arguments.model,
        device=arguments.device,
        max_model_len=max(arguments.tokens) + 16,
        max_running_requests=64,
        kv_cache_tokens=4 * max(arguments.tokens),
        prefill=None,
        decode=None,
        prefill_sizes=arguments.tokens,
        decode_sizes=[1],
    )

    def tile_of(**shape: Any) -> PrefillTile | None:
        tile = hopper_tile(**shape)
        if name == "triton" or tile is None:
            return None
        return tile if name == "rule" else tile_named(name, tile)

    times = {}
    with patch.object(triton_paged, "hopper_tile", tile_of):
        opened = open_model(options)
        llm = LLM._from_parts(opened.runner, None)
        for tokens in arguments.tokens:
            opened.runner.graphs.keeps_logits = True
            llm.generate([random_prompt(opened, tokens // arguments.prompts)] * arguments.prompts, greedy(1))
            opened.runner.graphs.keeps_logits = False
            check(name, tokens, opened.runner.graphs.logits[0].float().cpu(), expected)
            us = [gpu_us(opened, tokens) for _ in range(arguments.repeats)]
            times[tokens] = round(statistics.median(us), 1)
        opened.runner.shutdown()
    return times


def tile_named(name: str, tile: PrefillTile) -> PrefillTile:
    consumers, block_n, num_stages = map(int, name.split(":"))
    block_q = consumers * HOPPER_CONSUMER_ROWS // tile.pack
    return replace(tile, block_q=block_q, block_n=block_n, num_stages=num_stages)


def check(name: str, tokens: int, logits: torch.Tensor, expected: dict[int, torch.Tensor]) -> None:
    first = expected.setdefault(tokens, logits.clone())
    noise = float(((logits - first) / first.std()).square().mean().sqrt())
    if not noise < MOST_NOISE:
        raise AssertionError(f"tile {name} at {tokens} tokens: logits are off by {noise:.2g}")


if __name__ == "__main__":
    main()

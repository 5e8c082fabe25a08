"""Decode attention in many tilings, beside the one that the rule gives: what ``decode_tile`` is chosen by.

Each case is a batch of requests over a paged cache, of one length or of lengths from a range, which come as
they were drawn and with the longest first, as the scheduler has them; a tiling is keys a tile, warps, stages,
splits, least keys of a split, and whether keys are loaded early. Every tiling must give what the rule's
gives, within the error of its type. Times are microseconds a call, merging of splits included, medians over
replays of a CUDA graph that holds one call for each layer, each over a cache of its own
(``attention_kernels.py``). As in a step, heads come from rows of the q/k/v product and are normed and rotated
by attention; ahead of it is a norm of those rows, in the place of the product, and that norm is included.

    python benchmarks/decode_tiles.py --heads 16 32 [--output FILE]

Prints the quickest of each case to stderr and everything as one line of JSON to stdout.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from attention_kernels import Case, Shape, make_case, replay_times

from gapless.attention import triton_paged
from gapless.attention.base import Rotation
from gapless.attention.tile_rules import DecodeTile, decode_tile
from gapless.attention.triton_paged import TritonPagedBackend
from gapless.bench.meta import describe_run
from gapless.bench.workload import Lengths
from gapless.kernels.launch import compiling_ahead
from gapless.kernels.norm import fused_rms_norm

CASES = [(1, 170), (1, 700), (8, 170), (8, 700), (16, 170), (32, 100), (32, 170), (32, 700), (64, 170)]
CASES += [(128, 100), (128, 170), (128, 700), (256, 170), (256, 700)]
MIXED = Lengths(low=148, high=1044)
"""Of requests with 128 to 1,024 tokens that have drawn 20."""
MIXED_BATCHES = (64, 128, 256)
FEW_REQUESTS = 16
"""Up to here keys are split."""
MOST_COPIED_BYTES = 180 << 10
Kinds = Collection[tuple[int, int, int]]
"""Keys, warps, stages."""
GOOD: Kinds = (
    *((16, 1, 3), (32, 1, 2), (32, 1, 3), (32, 2, 3), (32, 2, 4), (64, 2, 2), (64, 2, 3)),
    *((64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3), (128, 8, 2), (128, 8, 3)),
)
"""That were among the best of some case."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 32], help="query heads, over 8 for keys")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--all", action="store_true", help="tilings that are known to be slow too")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    kinds = tuple(product((32, 64, 128), (1, 2, 4, 8), (2, 3, 4, 6))) if arguments.all else GOOD
    heads = {
        str(num_heads): measure_heads(num_heads, kinds, arguments.layers, arguments.repeats)
        for num_heads in arguments.heads
    }
    fields = list(DecodeTile.__dataclass_fields__)
    result = {
        "benchmark": "decode_tiles",
        "meta": describe_run(),
        "unit": "us",
        "tile": fields,
        "heads": heads,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result) + "\n")
    print(json.dumps(result))


def measure_heads(num_heads: int, kinds: Kinds, layers: int, repeats: int) -> dict[str, Any]:
    shape = Shape(
        heads=num_heads,
        kv_heads=8,
        head_size=128,
        block_size=16,
        layers=layers,
        max_requests=256,
        max_model_len=8448,
        dtype=torch.bfloat16,
    )
    compile_all(shape, kinds)
    gc.freeze()  # torch collects garbage at every capture
    found = {}
    for name, contexts in cases():
        batch = len(contexts)
        case = make_case(shape, [(context - 1, 1) for context in contexts], num_slots=batch, query_len=1)
        chosen = rule(shape, batch)
        expected = outcome(case, shape, chosen)
        rows = []
        for tile in tiles(shape, batch, kinds):
            difference = (outcome(case, shape, tile) - expected).abs().max().item()
            assert difference < 0.02, f"{tile} differs from the rule's by {difference}"
            with fixed(tile):
                times = replay_times(partial(attend, case, shape), layers=layers, repeats=repeats)
            rows.append((round(statistics.median(times), 2), *astuple(tile)))
        rows.sort()
        own = next(row for row in rows if row[1:] == astuple(chosen))
        found[name] = {"rule": own, "num_tilings": len(rows), "quickest": rows[:12]}
        print(f"{num_heads} heads, {name}: rule {show(own)}", file=sys.stderr)
        for row in rows[:4]:
            print(f"    {show(row)}", file=sys.stderr)
    return found


def cases() -> Iterator[tuple[str, list[int]]]:
    """Tokens of each request, with the name of the batch."""
    for batch, context in CASES:
        yield f"{batch} x {context}", [context] * batch
    for batch in MIXED_BATCHES:
        contexts = MIXED.draw(random.Random(0), batch)
        yield f"{batch} x {MIXED}", contexts
        yield f"{batch} x {MIXED}, longest first", sorted(contexts, reverse=True)


def show(row: tuple[float, ...]) -> str:
    us, _, block_n, warps, stages, splits, least, _, is_early = row
    way = "early" if is_early else "     "
    return f"{us:7.2f} us  {block_n:3} keys {warps} warps {stages} stages {splits:2} splits of {least} {way}"


def tiles(shape: Shape, batch: int, kinds: Kinds) -> Iterator[DecodeTile]:
    """The rule's first."""
    chosen = rule(shape, batch)
    yield chosen
    ways = [(chosen.num_splits, 64)]
    if batch <= FEW_REQUESTS:
        ways = [(splits, least) for splits in sorted({chosen.num_splits, 2}) for least in (64, 128)]
    elif batch <= 64:
        ways = [(1, 64), (2, 256)]
    for block_n, warps, stages in kinds:
        fits = 4 * block_n * shape.head_size * (stages - 1) <= MOST_COPIED_BYTES
        if not fits or block_n < 4 * warps:
            continue
        for (splits, least), loads_early in product(ways, (False, True)):
            tile = replace(
                chosen,
                block_n=block_n,
                num_warps=warps,
                num_stages=stages,
                num_splits=splits,
                min_keys=least,
                loads_early=loads_early,
            )
            if tile != chosen:
                yield tile


def rule(shape: Shape, batch: int) -> DecodeTile:
    tile = decode_tile(
        group=shape.heads // shape.kv_heads,
        head_size=shape.head_size,
        itemsize=shape.dtype.itemsize,
        max_query_len=1,
        num_programs=batch * shape.kv_heads,
        max_keys=shape.max_model_len,
        rotates=True,
    )
    assert tile is not None
    return tile


@contextmanager
def fixed(tile: DecodeTile) -> Iterator[None]:
    with patch.object(triton_paged, "decode_tile", lambda **_: tile):
        yield


def attend(case: Case, shape: Shape, layer: int) -> None:
    qkv_TC, rotation = new_heads(case, shape)
    fused_rms_norm(qkv_TC, qkv_TC[0], 1e-6)
    caches = case.caches[layer % len(case.caches)]
    TritonPagedBackend().attend_rotating(
        qkv_TC, rotation, *caches, case.out_THD, case.metadata, scale=shape.head_size**-0.5, window=None
    )


_new_heads: dict[int, tuple[torch.Tensor, Rotation]] = {}


def new_heads(case: Case, shape: Shape) -> tuple[torch.Tensor, Rotation]:
    """Rows of the q/k/v product of a case, and what they are rotated by; made once."""
    if id(case.query_THD) not in _new_heads:
        query_THD, head_size = case.query_THD, shape.head_size
        columns = (shape.heads + 2 * shape.kv_heads) * head_size
        angles = torch.rand(shape.max_model_len, head_size // 2, device=query_THD.device)
        rotation = Rotation(
            norm_weight_GD=torch.rand(shape.heads + shape.kv_heads, head_size).to(query_THD),
            eps=1e-6,
            rope_P2F=torch.stack((angles.cos(), angles.sin()), 1).to(query_THD),
            positions_T=case.metadata.seq_lens.long() - 1,
        )
        _new_heads.clear()
        _new_heads[id(query_THD)] = torch.randn(len(query_THD), columns).to(query_THD), rotation
    return _new_heads[id(case.query_THD)]


def outcome(case: Case, shape: Shape, tile: DecodeTile) -> torch.Tensor:
    case.out_THD.fill_(torch.nan)
    with fixed(tile):
        attend(case, shape, 0)
    return case.out_THD.float()


def compile_all(shape: Shape, kinds: Kinds) -> None:
    """In parallel, for a batch of each kind."""
    for batch in (1, 256):
        case = make_case(shape, [(31, 1)] * batch, num_slots=batch, query_len=1)
        with compiling_ahead():
            for tile in tiles(shape, batch, kinds):
                with fixed(tile):
                    attend(case, shape, 0)


if __name__ == "__main__":
    main()

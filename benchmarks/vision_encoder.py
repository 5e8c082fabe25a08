"""Latency of vision towers: encoder graphs against Transformers' own eager forward, with dummy weights.

For one image of each size: Transformers (its default attention), our eager forward, budget graphs and exact
graphs, from patches on the host to rows on the device. Ours are pixels, as the engine's processor makes them,
those of Transformers float32 values, as its own does. And what a hit in the exact cache costs over the replay
of its graph alone: of pixels, of such values, and of values that are on the device already. Then 8 images in
one call against 8 calls, and against 8 of Transformers: of 112 pixels, where a replay waits for launches and
weights, and of 224, where large towers are bound by arithmetic. And what budgets cost at start-up, by stage,
behind the seconds that making the tower takes (``tower_s``), beside which Triton gets ready. The first tower
of a process pays for what comes once; where ``TRITON_CACHE_DIR`` names an empty folder all kernels are
compiled.

    python benchmarks/vision_encoder.py --output benchmarks/results/vision_encoder.json
    python benchmarks/vision_encoder.py --tiny      # small towers on a CPU: only proves that it runs

Prints a table to stderr and one line of JSON to stdout. The file has what is known so far: a tower that fails
keeps its figures up to there and says why (``error``), the others go on, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gapless.attention.varlen import varlen_backends
from gapless.bench.meta import describe_run
from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.device import get_device
from gapless.graphs.device.base import GraphDevice
from gapless.graphs.device.upload import RawRows
from gapless.graphs.encoder import EncoderMode, EncoderOptions, EncoderRunner
from gapless.graphs.encoder_exact import ExactGraphs
from gapless.graphs.encoder_graphs import owned_rows
from gapless.graphs.encoder_packed import BudgetGraphs
from gapless.graphs.modes import Phase, RuntimeMode
from gapless.graphs.store import GraphKey
from gapless.models.vision.tower import VisionTower, make_tower
from gapless.multimodal.items import MediaItem

TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2.5-VL-7B": (
        "qwen2_5_vl",
        {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    ),
    "Qwen3-VL-8B": (
        "qwen3_vl",
        {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    ),
}
SMALL = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny Qwen2.5-VL": ("qwen2_5_vl", {**SMALL, "fullatt_block_indexes": [1]}),
    "tiny Qwen3-VL": ("qwen3_vl", {**SMALL, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}),
}
MERGE = 2
Save = Callable[[], None]
NUM_PACKED = 8


def main() -> int:
    arguments = parse_arguments()
    device = get_device(arguments.device)
    dtype = getattr(torch, arguments.dtype)
    result: dict[str, Any] = {
        "benchmark": "vision_encoder",
        "meta": describe_run(),
        "device": str(device.torch_device),
        "dtype": arguments.dtype,
        "attention": arguments.attention,
        "unfused": arguments.unfused,
        "repeats": arguments.repeats,
        "max_tokens": arguments.max_tokens,
        "towers": {},
    }

    def save() -> None:
        if arguments.output:
            arguments.output.write_text(json.dumps(result, indent=1) + "\n")

    for name in arguments.towers:
        model_type, config = (TINY if arguments.tiny else TOWERS)[name]
        print(name, file=sys.stderr)
        found = result["towers"][name] = {}
        begun = time.perf_counter()
        try:
            torch.manual_seed(0)
            tower = make_tower(
                model_type,
                config,
                dtype=dtype,
                device=device.torch_device,
                attention=arguments.attention,
                is_fused=False if arguments.unfused else None,
            )
            for parameter in tower.module.parameters():
                parameter.data.normal_(0.0, 0.02)
            device.synchronize()
            found["tower_s"] = round(time.perf_counter() - begun, 3)
            measure_tower(tower, device, arguments, found, save)
            del tower
        except Exception as error:
            traceback.print_exc()
            found["error"] = f"{type(error).__name__}: {error}"
        save()
    print(json.dumps(result))
    return 1 if any("error" in found for found in result["towers"].values()) else 0


def measure_tower(
    tower: VisionTower, device: GraphDevice, arguments: argparse.Namespace, found: dict[str, Any], save: Save
) -> None:
    """Fills ``found``, and saves it from time to time."""
    images = {side: image_of(tower, side) for side in arguments.sides}
    budget, start_up = start(tower, device, EncoderMode.BUDGET, arguments.max_tokens)
    exact, _ = start(tower, device, EncoderMode.EXACT, arguments.max_tokens)
    off, _ = start(tower, device, EncoderMode.OFF, arguments.max_tokens)
    ways: dict[str, Callable[[MediaItem], object]] = {
        "transformers": lambda item: run_transformers(tower, item),
        "eager": lambda item: off.run([item]),
        "budget": lambda item: budget.run([item]),
        "exact": lambda item: exact.run([item]),
    }
    found["start_up"] = start_up
    print(f"  start-up: {start_up}", file=sys.stderr)
    sizes = found["images"] = {}
    for side, item in images.items():
        row: dict[str, Any] = {"patches": item.num_patches}
        values = as_values(item)
        for way, run in ways.items():
            is_base = way == "transformers"  # slow, and steady
            own, times = (values, -(-arguments.repeats // 3)) if is_base else (item, arguments.repeats)
            row[way] = timed(lambda run=run, item=own: run(item), device, times)
        base = row["transformers"]["ms"]
        row["speedup"] = {way: round(base / row[way]["ms"], 2) for way in ("eager", "budget", "exact")}
        row["exact_over_graph"] = hit_cost(exact, item, device, arguments.repeats)
        sizes[str(side)] = row
        save()
        shown = "  ".join(f"{way} {row[way]['ms']:.3f} ms" for way in ways)
        print(f"  {side:>5}: {shown}  {row['speedup']}", file=sys.stderr)
    packed = found["packed"] = {}
    for side in arguments.packed_sides:
        packed[str(side)] = measure_packed(tower, budget, device, side, arguments.repeats)
        save()
    summary = budget.summary()
    found |= {
        "budgets": summary["budgets"],
        "padding_share": summary["padding_share"],
        "captures_while_serving": len(budget.report()["graphs"]) - start_up["graphs"],
        "exact": {name: exact.summary()[name] for name in ("hits", "captures", "evictions")},
    }
    for runner in (budget, exact, off):
        runner.release()


def measure_packed(
    tower: VisionTower, budget: EncoderRunner[MediaItem], device: GraphDevice, side: int, repeats: int
) -> dict[str, Any]:
    """Images of one size in one call, one by one, and one by one by Transformers."""
    images = [image_of(tower, side, seed=seed) for seed in range(NUM_PACKED)]
    values = [as_values(item) for item in images]
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "together": (lambda: budget.run(images), repeats),
        "apart": (lambda: [budget.run([item]) for item in images], repeats),
        "transformers": (lambda: [run_transformers(tower, item) for item in values], -(-repeats // 6)),
    }
    row: dict[str, Any] = {"images": NUM_PACKED, "patches": images[0].num_patches}
    assert isinstance(budget.graphs, BudgetGraphs)
    packs = budget.graphs.plan([tower.sizes_of(item) for item in images])
    tokens = [None if pack.budget is None else budget.graphs.budgets[pack.budget].tokens for pack in packs]
    row["packs"] = [[pack.num_items, budget] for pack, budget in zip(packs, tokens, strict=True)]
    for way, (run, times) in ways.items():
        row[way] = timed(run, device, times)
    base = row["together"]["ms"]
    row["speedup"] = {way: round(row[way]["ms"] / base, 2) for way in ("apart", "transformers")}
    shown = "  ".join(f"{way} {row[way]['ms']:.3f} ms" for way in ways)
    print(f"  {NUM_PACKED} of {side}: {shown}  {row['speedup']}", file=sys.stderr)
    return row


def start(
    tower: VisionTower, device: GraphDevice, mode: EncoderMode, max_tokens: int
) -> tuple[EncoderRunner[MediaItem], dict[str, Any]]:
    """A runner, captured, and what its start took. ``device_bytes`` is all that is gone from the device:
    graphs (``pool_bytes`` and ``driver_bytes``), static memory, and the ``library_bytes`` that the first run
    of anything takes (loaded kernels, workspaces of cuBLAS)."""
    device.synchronize()
    device.trim()
    free, begun = device.memory().free_bytes, time.perf_counter()
    runner: EncoderRunner[MediaItem] = EncoderRunner(
        tower, device=device, options=EncoderOptions(mode=mode, max_tokens=max_tokens)
    ).capture()
    device.synchronize()
    seconds = time.perf_counter() - begun
    gone = max(0, free - device.memory().free_bytes)
    report = runner.report()
    memory = report["memory"]
    graph_bytes, static_bytes = (
        memory["pool_bytes"] + memory["driver_bytes"],
        report["encoder"]["static_bytes"],
    )
    return runner, {
        "seconds": round(seconds, 3),
        "stages_s": report["encoder"].get("start_up_s", {}),
        "capture_s": memory["capture_s"],
        "pool_bytes": memory["pool_bytes"],
        "driver_bytes": memory["driver_bytes"],
        "static_bytes": static_bytes,
        "library_bytes": max(0, gone - graph_bytes - static_bytes),
        "device_bytes": gone,
        "graphs": len(report["graphs"]),
        "failures": len(report["failures"]),
    }


def run_transformers(tower: VisionTower, item: MediaItem) -> object:
    """Transformers' forward as it comes: boundaries and positions from the grid, its default attention."""
    module: Any = tower.module
    ours, module.config._attn_implementation = module.config._attn_implementation, "sdpa"
    try:
        with torch.no_grad():
            patches = torch.from_numpy(item.values_PC()).to(tower.device, tower.dtype)
            return module(patches, grid_thw=torch.tensor([item.grid_thw], device=tower.device))
    finally:
        module.config._attn_implementation = ours


def hit_cost(
    exact: EncoderRunner[MediaItem], item: MediaItem, device: GraphDevice, repeats: int
) -> dict[str, Any]:
    """A hit, copies in and out included, over the replay of the same graph alone: with pixels or values on
    the host, and with values that are on the device already."""
    exact.run([item])
    graphs, adapter = exact.graphs, exact.adapter
    assert isinstance(graphs, ExactGraphs)
    descriptor = graphs.find(adapter.sizes_of(item), adapter.bounds_of([item]), adapter.prepare([item]))
    assert isinstance(descriptor, BatchDescriptor), f"no graph: {descriptor}"
    entry = graphs.generation.store.get(GraphKey(Phase.ENCODER, RuntimeMode.FULL, descriptor))
    assert entry is not None
    alone = timed(entry.program.replay, device, repeats)
    hit = timed(lambda: exact.run([item]), device, repeats)
    floats = as_values(item)
    hit_of_values = timed(lambda: exact.run([floats]), device, repeats)
    values = dict(adapter.prepare([item]))
    rows = values["patches"]
    assert isinstance(rows, RawRows)
    values["patches"] = rows.to(device=device.torch_device, dtype=adapter.fields[0].dtype)
    sizes = adapter.sizes_of(item)

    def hit_on_device() -> object:
        outputs = graphs.generation.run(descriptor, RuntimeMode.FULL, values, num_real=sizes)
        return owned_rows(outputs, adapter, [sizes])

    resident = timed(hit_on_device, device, repeats)
    return {
        "nodes": entry.row.num_nodes,
        "graph_alone": alone,
        "ratio": round(hit["ms"] / alone["ms"], 3),
        "ratio_values": round(hit_of_values["ms"] / alone["ms"], 3),
        "ratio_patches_on_device": round(resident["ms"] / alone["ms"], 3),
    }


def timed(run: Callable[[], object], device: GraphDevice, repeats: int) -> dict[str, float]:
    """Milliseconds of a call and all its work on the device: median, lowest, highest; and of the call alone
    (``host_ms``), which is when its caller goes on."""
    milliseconds, until_return = [], []
    for repeat in range(repeats + 2):
        device.synchronize()
        begun = time.perf_counter()
        run()
        returned = time.perf_counter()
        device.synchronize()
        if repeat >= 2:
            until_return.append((returned - begun) * 1e3)
            milliseconds.append((time.perf_counter() - begun) * 1e3)
    return {
        "ms": round(statistics.median(milliseconds), 4),
        "ms_min": round(min(milliseconds), 4),
        "ms_max": round(max(milliseconds), 4),
        "host_ms": round(statistics.median(until_return), 4),
    }


def image_of(tower: VisionTower, side: int, *, seed: int = 0) -> MediaItem:
    """A square image as the model's processor would cut it: whole merged units, to the nearest."""
    unit = tower.config.patch_size * MERGE
    patches = max(round(side / unit), 1) * MERGE
    return tower.blank((1, patches, patches), pixels=np.random.default_rng(seed))


def as_values(item: MediaItem) -> MediaItem:
    """The same as float32, normalised by the processor."""
    return replace(item, patches_PC=item.values_PC(), normalisation=None)


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", help="default: cuda, with --tiny cpu")
    parser.add_argument("--towers", nargs="+", help=f"of {', '.join(TOWERS)} (both)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--attention", choices=("auto", *varlen_backends()), default="auto")
    parser.add_argument("--sides", type=int, nargs="+", help="pixels of square images")
    parser.add_argument("--packed-sides", type=int, nargs="+", help="pixels of images that share a call")
    parser.add_argument("--max-tokens", type=int, help="the largest budget, in patches")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--unfused", action="store_true", help="our runs on Transformers' own blocks")
    parser.add_argument("--tiny", action="store_true", help="small towers")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(given)
    tiny = arguments.tiny
    known = tuple(TINY if tiny else TOWERS)
    arguments.towers = arguments.towers or known
    if not set(arguments.towers) <= set(known):
        parser.error(f"--towers {' '.join(arguments.towers)}: choose from {', '.join(known)}")
    arguments.device = arguments.device or ("cpu" if tiny else "cuda")
    arguments.dtype = arguments.dtype or ("float32" if arguments.device == "cpu" else "bfloat16")
    arguments.sides = arguments.sides or ([56, 112, 224] if tiny else [224, 448, 672, 1024])
    arguments.packed_sides = arguments.packed_sides or ([56] if tiny else [112, 224])
    arguments.max_tokens = arguments.max_tokens or (512 if tiny else 8192)
    arguments.repeats = arguments.repeats or (3 if tiny else 30)
    return arguments


if __name__ == "__main__":
    sys.exit(main())

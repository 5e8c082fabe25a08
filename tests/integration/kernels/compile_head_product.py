"""Compiles the head that picks for a Hopper GPU, without one, as its operator launches it; prints a line of
JSON per launch, with what the assembler made of it.

Run by ``test_compiled_head.py`` in a process of its own, where Triton is not interpreting.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from compile_fused_kernels import TYPE_NAMES, compiled_for

from gapless.kernels import head_product, head_product_jit
from gapless.kernels.head_product import launch_head
from gapless.kernels.head_tiles import HeadTiles, default_head_tiles
from integration.attention.sass import disassemble, unwritten_registers

EARLY = HeadTiles(block_r=64, block_o=64, block_i=128, num_early=2, prefetch=256, num_warps=4, num_stages=3)
SPLIT = HeadTiles(block_r=8, block_o=32, block_i=64, split=4, num_early=1, num_warps=4, num_stages=3)
CASES = [
    *((rows, 1024, 151936, torch.bfloat16, default_head_tiles(rows)) for rows in (8, 16, 32, 64, 128)),
    (32, 4096, 128256, torch.float16, default_head_tiles(32)),
    (64, 4096, 128256, torch.float16, default_head_tiles(64)),
    (64, 1024, 151936, torch.bfloat16, EARLY),
    (8, 1024, 151936, torch.bfloat16, SPLIT),
]


def main() -> None:
    head_product.launch = report  # type: ignore[attr-defined]
    head_product.launch_options = lambda device: {"EARLY": True, "launch_pdl": True}  # type: ignore[attr-defined]
    head_product.pick_best = lambda *args: None  # type: ignore[attr-defined]
    assert head_product._kernels() is head_product_jit
    for num_rows, num_in, size, dtype, tiles in CASES:
        hidden = torch.empty(num_rows, num_in, dtype=dtype, device="meta")
        weight = torch.empty(size, num_in, dtype=dtype, device="meta")
        logits = torch.empty(num_rows, size, device="meta")
        tokens = torch.empty(num_rows, dtype=torch.int64, device="meta")
        flag = torch.empty(1, dtype=torch.int32, device="meta")
        launch_head(hidden, weight, logits, tokens, flag, -1, tiles)


def report(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    options = {name: constants[name] for name in ("num_warps", "num_stages")}
    values = {n: v for n, v in constants.items() if n not in (*options, "launch_pdl")}
    compiled = compiled_for(kernel, args, values, **options)
    with tempfile.TemporaryDirectory() as folder:
        assembly = disassemble(compiled.asm["cubin"], Path(folder))
    ptx = compiled.asm["ptx"]
    before_wait, _, behind_wait = ptx.partition("griddepcontrol.wait")
    described = {
        "grid": grid,
        "dtype": TYPE_NAMES[args[0].dtype],
        "rows_pad": constants["ROWS_PAD"],
        "early": constants["NUM_EARLY"],
        "shared_bytes": compiled.metadata.shared,
        "unwritten": unwritten_registers(assembly),
        "spills": assembly.count("STL") + assembly.count("LDL"),
        "product_waits": [assembly.count("WARPGROUP.DEPBAR"), ptx.count("wgmma.wait_group")],
        "groups_multiply": "wgmma.mma" in ptx,
        "wide_copies": ptx.count("cp.async.cg"),
        "loads_before_wait": before_wait.count("ld.global"),
        "calls_before_wait": before_wait.count("prefetch.global.L2"),
        "stores_before_wait": before_wait.count("st.global"),
        "stores": behind_wait.count("st.global"),
        "reordered": _reordered(compiled.asm["ttgir"]),
    }
    print(json.dumps(described))


def _reordered(ttgir: str) -> list[str]:
    """Tensors of several dimensions that go through shared memory to be held by other threads."""
    found = re.findall(r"convert_layout %\S+ : tensor<((?:\d+x)+)\w+", ttgir)
    return [shape for shape in found if shape.count("x") > 1]


if __name__ == "__main__":
    main()

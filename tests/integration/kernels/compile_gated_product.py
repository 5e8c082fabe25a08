"""Compiles the gated product of many tokens for a Hopper GPU, without one; prints a line of JSON per case.

Run by ``test_gated_product.py`` in a process of its own, where Triton is not interpreting.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from gapless.kernels import gated_product, gated_product_jit
from gapless.kernels.linear_tiles import GatedTiles
from integration.attention.sass import disassemble, unwritten_registers

LARGE = {"block_t": 128, "block_o": 128, "block_i": 64, "num_stages": 4, "shared_by": 16}
NARROW = {"block_t": 128, "block_o": 64, "block_i": 64, "num_stages": 6, "shared_by": 16}
CASES = (
    (torch.bfloat16, 1024, {**LARGE, "skew": 0}),
    (torch.float16, 1024, {**LARGE, "skew": 3}),
    (torch.bfloat16, 4096, {**LARGE, "skew": 3, "shared_by": 8}),
    (torch.bfloat16, 1024, {**NARROW, "skew": 4}),
    (torch.bfloat16, 1024, {**NARROW, "block_o": 32, "skew": 0}),
)
"""Type, input features and tiles."""


def main() -> None:
    for dtype, num_in, sizes in CASES:
        compiled = compile_for(dtype, num_in, GatedTiles(**sizes))
        with tempfile.TemporaryDirectory() as folder:
            assembly = disassemble(compiled.asm["cubin"], Path(folder))
        report = {
            "sizes": sizes,
            "num_in": num_in,
            "shared_bytes": compiled.metadata.shared,
            "unwritten": unwritten_registers(assembly),
            "spills": assembly.count("STL") + assembly.count("LDL"),
            "waits": [assembly.count("WARPGROUP.DEPBAR"), compiled.asm["ptx"].count("wgmma.wait_group")],
            "ttgir": compiled.asm["ttgir"],
        }
        print(json.dumps(report))


def compile_for(dtype: torch.dtype, num_in: int, tiles: GatedTiles) -> Any:
    kernel = gated_product_jit.gated_product_kernel
    constants = {
        **gated_product._constants(tiles, num_in, torch.device("cpu")),
        "EARLY": True,
        "launch_pdl": True,
    }
    blocks = {
        "x_TI": (tiles.block_t, tiles.block_i),
        "weight_OI": (tiles.block_o, tiles.block_i),
        "out_TO": (tiles.block_t // 2, tiles.block_o),
    }
    name_of = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    places = {name: index for index, name in enumerate(kernel.arg_names)}
    signature = {}
    for name in kernel.arg_names:
        signature[name] = "constexpr" if name in constants else "i32"
        if name in blocks:
            rows, columns = blocks[name]
            layout = gated_product._layout(blocks[name])
            signature[name] = f"tensordesc<{name_of[dtype]}[{rows}, {columns}],{layout!r}>"
    source = GluonASTSource(
        kernel,
        signature=signature,
        constexprs={(places[name],): constants.pop(name) for name in list(constants) if name in places},
        attrs={(places["num_out"],): [["tt.divisibility", 16]]},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=constants)


if __name__ == "__main__":
    main()

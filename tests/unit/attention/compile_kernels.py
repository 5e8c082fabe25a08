"""Compiles the Triton kernels for a Hopper GPU, without one, and prints the shared memory of each: what the
interpreter cannot show. Run by ``test_triton_interpreter.py`` in a process of its own, where Triton is not
interpreting."""

from __future__ import annotations

import itertools

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gapless.attention import triton_kernels
from gapless.attention.triton_paged import _choose_tile, _next_power_of_2

_TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compile_kernel(kernel: triton.JITFunction, dtype: torch.dtype, constants: dict, options: dict) -> int:
    signature = dict.fromkeys(kernel.arg_names, "i32")
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name == "scale":
            signature[name] = "fp32"
        elif name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
            signature[name] = "*i32"
        elif name.endswith(("_THD", "_TKD", "_cache")):
            signature[name] = "*" + _TYPE_NAMES[dtype]
    places = {name: index for index, name in enumerate(kernel.arg_names)}
    aligned = [n for n, kind in signature.items() if kind.startswith("*") or "stride" in n]
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(places[name],): value for name, value in constants.items()},
        attrs={(places[name],): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared


def main() -> None:
    write = {"NUM_KV_HEADS": 3, "HEAD_SIZE": 40, "BLOCK_SIZE": 16, "ROW_PAD": 128}
    print(compile_kernel(triton_kernels.write_kv_kernel, torch.bfloat16, write, {}))
    shapes = [
        (3, 64, torch.bfloat16),
        (4, 128, torch.bfloat16),
        (1, 80, torch.float16),
        (2, 32, torch.float32),
    ]
    for (group, head_size, dtype), max_query_len in itertools.product(shapes, (1, 512)):
        tile = _choose_tile(
            group=group, head_size=head_size, itemsize=dtype.itemsize, max_query_len=max_query_len
        )
        constants = {
            "HEAD_SIZE": head_size,
            "HEAD_PAD": _next_power_of_2(head_size),
            "GROUP": group,
            "GROUP_PAD": _next_power_of_2(group),
            "BLOCK_SIZE": 16,
            "BLOCK_Q": tile.block_q,
            "BLOCK_N": tile.block_n,
            "WINDOW": 100 if max_query_len == 1 else 0,
            "ONE_TILE_PER_REQUEST": max_query_len == 1,
            "DOT_PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        }
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        print(compile_kernel(triton_kernels.paged_attention_kernel, dtype, constants, options))


if __name__ == "__main__":
    main()

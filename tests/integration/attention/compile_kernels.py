"""Compiles the Triton kernels for a Hopper GPU, without one, and prints the shared memory of each: what the
interpreter cannot show. Fails where the assembler made a mistake that ``sass.py`` knows. Run by
``test_triton_interpreter.py`` in a process of its own, where Triton is not interpreting. ``--all`` compiles
every shape instead of the largest, ``--ada`` what a GPU with 99 KiB of shared memory gets."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import triton
from sass import disassemble, unwritten_registers
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from gapless.attention import hopper_kernel, hopper_prefill, triton_decode, triton_kernels, triton_varlen
from gapless.attention.tile_rules import DecodeTile, decode_tile, encoder_tile, hopper_tile, prefill_tile
from gapless.attention.triton_launch import rotated_rows
from gapless.kernels.select import next_power_of_2

_SEGMENTS = ("cu_seqlens", "cu_seqlens_kk")
_TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compile_kernel(
    kernel: triton.JITFunction,
    dtype: torch.dtype,
    constants: dict,
    options: dict,
    unaligned: tuple[str, ...] = (),
    source_type: type[ASTSource] = ASTSource,
    capability: int = 90,
) -> int:
    """``unaligned``: arguments that 16 does not divide."""
    signature = dict.fromkeys(kernel.arg_names, "i32")
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("scale", "eps"):
            signature[name] = "fp32"
        elif name == "positions_T":
            signature[name] = "*i64"
        elif name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping", *_SEGMENTS):
            signature[name] = "*i32"
        elif name.startswith(("part_", "stat_")):
            signature[name] = "*fp32"
        elif name.endswith("_cache") and "PAGE_ROWS" in constants:
            layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
            signature[name] = f"tensordesc<{_TYPE_NAMES[dtype]}[{constants['PAGE_ROWS']}, 64],{layout!r}>"
        elif name.endswith(("_THD", "_TKD", "_SHD", "_cache", "_GD", "_P2F")):
            signature[name] = "*" + _TYPE_NAMES[dtype]
    places = {name: index for index, name in enumerate(kernel.arg_names)}
    aligned = [n for n, kind in signature.items() if kind.startswith("*") or "stride" in n]
    aligned = [n for n in aligned if n not in unaligned]
    source = source_type(
        kernel,
        signature=signature,
        constexprs={(places[name],): value for name, value in constants.items()},
        attrs={(places[name],): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    if capability != 90:
        return compiled.metadata.shared
    with tempfile.TemporaryDirectory() as folder:
        assembly = disassemble(compiled.asm["cubin"], Path(folder))
    unwritten = unwritten_registers(assembly)
    assert not unwritten, f"{kernel.__name__} {constants} {options}: {unwritten}"
    if "ROTATED_ROWS" in constants:
        assert "STL" not in assembly, f"{constants} {options}: registers spill"
    if constants.get("CALLED_AHEAD") and constants["EARLY"]:
        ptx = compiled.asm["ptx"]
        last_wait = ptx.rfind("griddepcontrol.wait")  # there is another one for programs without keys
        assert -1 < ptx.find("prefetch.global.L2") < last_wait, "nothing is called ahead"
    if constants.get("LOADS_EARLY") and constants["EARLY"]:
        ptx = compiled.asm["ptx"]
        assert -1 < ptx.find("cp.async.cg") < ptx.rfind("griddepcontrol.wait"), "no key is loaded early"
    # Where it runs out of registers the assembler waits for every single product.
    waits = assembly.count("WARPGROUP.DEPBAR"), compiled.asm["ptx"].count("wgmma.wait_group")
    assert waits[0] <= waits[1], f"{kernel.__name__} {constants} {options}: {waits[0]} waits for {waits[1]}"
    return compiled.metadata.shared


def main() -> None:
    if "--ada" in sys.argv:
        for shape in ((4, 128, torch.bfloat16), (2, 256, torch.bfloat16), (1, 128, torch.float32)):
            compile_paged(*shape, 89, shared_bytes=99 << 10)
        compile_encoder_kernels([(128, 8192, 8)], capability=89)
        return
    write = {"NUM_KV_HEADS": 3, "HEAD_SIZE": 40, "BLOCK_SIZE": 16, "ROW_PAD": 128}
    print(compile_kernel(triton_kernels.write_kv_kernel, torch.bfloat16, write, {}))
    shapes = [(4, 128, torch.bfloat16)]
    if "--all" in sys.argv:
        shapes += [(3, 64, torch.bfloat16), (1, 80, torch.float16), (2, 32, torch.float32)]
    for group, head_size, dtype in shapes:
        decode = compile_paged(group, head_size, dtype, 90)
    merge = {
        **shared_constants(group, head_size),
        **decode_constants(decode, group),
        "SPLITS_PAD": next_power_of_2(decode.num_splits),
    }
    print(compile_kernel(triton_decode.combine_splits_kernel, torch.float32, merge, {}))
    compile_hopper_kernel([(2, 128, 16, num_tokens) for num_tokens in (512, 1024, 4096)])
    compile_encoder_kernels([(80, 8192, 8)])
    if "--all" in sys.argv:
        for num_tokens in (512, 1024, 4096):
            shapes = ((1, 128, 16), (4, 128, 16), (8, 128, 128), (3, 64, 24))
            compile_hopper_kernel([(*shape, num_tokens) for shape in shapes])
        compile_encoder_kernels([(72, 8192, 8), (128, 64, 8), (72, 8192, 1), (72, 64, 8), (36, 8192, 4)])


def compile_paged(
    group: int, head_size: int, dtype: torch.dtype, capability: int, **limit: int
) -> DecodeTile:
    """Prefill and decode; returns the tiles of decode."""
    common = shared_constants(group, head_size, is_early=capability >= 90)
    both = {
        **common,
        "BLOCK_SIZE": 16,
        "DOT_PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }
    size = {"group": group, "head_size": head_size, "itemsize": dtype.itemsize, **limit}
    for num_tokens in (4096,) if capability == 90 else (4096, 256):
        prefill = prefill_tile(**size, num_tokens=num_tokens)
        constants = {
            **both,
            "PACK": prefill.pack,
            "BLOCK_Q": prefill.block_q,
            "BLOCK_N": prefill.block_n,
            "WINDOW": 100 if group == 1 else 0,
            "SPLIT_LOOP": prefill.split_loop,
        }
        options = {"num_warps": prefill.num_warps, "num_stages": prefill.num_stages}
        kernel = triton_kernels.prefill_attention_kernel
        print(compile_kernel(kernel, dtype, constants, options, capability=capability))

    kernel = triton_decode.decode_attention_kernel
    # One request's small tile, the largest there is, one that loads early, one of a warp; without a rotation.
    for num_programs, rotates in ((8, True), (64, True), (256, True), (1024, True), (64, False)):
        decode = decode_tile(
            **size, max_query_len=1, num_programs=num_programs, max_keys=8192, rotates=rotates
        )
        assert decode is not None
        constants = {**both, **decode_constants(decode, group), "CALLED_AHEAD": decode.called_ahead}
        constants["LOADS_EARLY"] = decode.loads_early
        rows = decode.block_q * constants["GROUP_PAD"]
        constants["ROTATED_ROWS"] = rotated_rows(decode, rows, constants["GROUP_PAD"]) if rotates else 0
        constants["HAS_NORM"] = constants["HAS_POSITIONS"] = rotates
        options = {"num_warps": decode.num_warps, "num_stages": decode.num_stages}
        print(compile_kernel(kernel, dtype, constants, options, capability=capability))
    return decode


def shared_constants(group: int, head_size: int, *, is_early: bool = True) -> dict:
    return {
        "HEAD_SIZE": head_size,
        "HEAD_PAD": next_power_of_2(head_size),
        "GROUP": group,
        "EARLY": is_early,
    }


def decode_constants(tile: DecodeTile, group: int) -> dict:
    return {
        "GROUP_PAD": next_power_of_2(group),
        "BLOCK_Q": tile.block_q,
        "BLOCK_N": tile.block_n,
        "WINDOW": 100,
    }


def compile_hopper_kernel(shapes: list[tuple[int, int, int, int]]) -> None:
    """``shapes``: groups, head sizes, block sizes and tokens of 16 heads."""
    for group, head_size, block_size, num_tokens in shapes:
        tile = hopper_tile(
            num_heads=16,
            group=group,
            head_size=head_size,
            itemsize=2,
            num_tokens=num_tokens,
            block_size=block_size,
            window=0,
        )
        assert tile is not None
        constants = dict(
            hopper_prefill.kernel_constants(tile, group, head_size, block_size, torch.device("cpu"))
        )
        options = {"num_warps": constants.pop("num_warps")}
        constants["EARLY"] = True
        kernel = hopper_kernel.hopper_prefill_kernel
        print(compile_kernel(kernel, torch.bfloat16, constants, options, source_type=GluonASTSource))


def compile_encoder_kernels(shapes: list[tuple[int, int, int]], *, capability: int = 90) -> None:
    """``shapes``: head sizes, rows of 16 heads, and what all strides are multiples of."""
    for head_size, num_rows, unit in shapes:
        tile = encoder_tile(num_heads=16, num_rows=num_rows, max_len=num_rows, itemsize=2)
        constants = triton_varlen.kernel_constants(
            head_size, tile, torch.bfloat16, unit, is_aligned=unit == 8
        )
        constants["EARLY"] = capability >= 90
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
        kernel = triton_varlen.varlen_attention_kernel
        heads = tuple(name for name in kernel.arg_names if name.endswith("_stride_h"))
        is_even = head_size // unit % 16 == 0
        unaligned = () if is_even else heads
        print(compile_kernel(kernel, torch.bfloat16, constants, options, unaligned, capability=capability))


if __name__ == "__main__":
    main()

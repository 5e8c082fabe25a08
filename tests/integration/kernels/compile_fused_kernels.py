"""Compiles the fused kernels for a Hopper GPU, without one, as the operators launch them; prints one line of
JSON per launch with what the assembler reports and the widest memory accesses.

Run by ``test_compiled_kernels.py`` in a process of its own, where Triton is not interpreting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gapless.kernels import (
    activation,
    head,
    jit,
    layer_norm,
    layer_norm_jit,
    media,
    media_jit,
    mrope,
    norm,
    penalty,
    penalty_jit,
    pixels,
    pixels_jit,
    rope_cache,
    sample,
    sample_jit,
    step_arrays,
    step_arrays_jit,
)
from kernel_oracles import make_rope, poisoned_caches

TYPE_NAMES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


Describe = Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]


class CompilingKernels:
    """Stands in for the module of kernels: a launch compiles and notes what came out, and what ``describe``
    says of arguments and constants."""

    def __init__(self, source: Any, describe: Describe | None = None) -> None:
        self.source, self.describe = source, describe

    def __getattr__(self, name: str) -> Any:
        return Launcher(getattr(self.source, name), self.describe)


class Launcher:
    def __init__(self, kernel: Any, describe: Describe | None) -> None:
        self.kernel, self.describe = kernel, describe

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(
            *args: Any, num_warps: int, num_stages: int = 3, launch_pdl: bool = False, **constants: Any
        ) -> None:
            assert launch_pdl == ("EARLY" in constants)
            constants.pop("enable_fp_fusion", None)  # an option of the compiler
            described = {} if self.describe is None else self.describe(args, constants)
            report = compile_launch(self.kernel, args, constants, num_warps, num_stages)
            print(json.dumps({"kernel": self.kernel.__name__, "grid": grid, **described, **report}))

        return launch


def compiled_for(
    kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], num_warps: int, num_stages: int
) -> Any:
    signature: dict[str, str] = {}
    aligned = []
    for name, value in zip(kernel.arg_names, args, strict=False):
        if isinstance(value, torch.Tensor):
            signature[name] = TYPE_NAMES[value.dtype]
            aligned.append(name)
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                aligned.append(name)
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    places = {name: index for index, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(places[name],): value for name, value in constants.items()},
        attrs={(places[name],): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def compile_launch(
    kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], num_warps: int, num_stages: int
) -> dict[str, Any]:
    compiled = compiled_for(kernel, args, constants, num_warps, num_stages)
    ptx = compiled.asm["ptx"]
    accesses = re.findall(r"(ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx)
    before_wait = ptx.partition("griddepcontrol.wait")[0]
    width = {
        kind: max((int(v or 1) * int(bits) for k, v, bits in accesses if k == kind), default=0)
        for kind in ("ld", "st")
    }
    return {
        "num_warps": num_warps,
        "shared_bytes": compiled.metadata.shared,
        "load_bits": width["ld"],
        "store_bits": width["st"],
        "wide_copies": ptx.count("cp.async.cg"),
        "tensor_core_products": ptx.count("mma.sync") + ptx.count("wgmma.mma"),
        "waits": "griddepcontrol.wait" in ptx,
        "stores_before_wait": before_wait.count("st.global"),
        "loads_before_wait": before_wait.count("ld.global"),
        "releases_before_wait": before_wait.count("griddepcontrol.launch_dependents"),
        "has_positions": constants.get("HAS_POSITIONS", True),
        "approximate_angles": ptx.count("cos.approx") + ptx.count("sin.approx"),
    }


def main() -> None:
    sources = {
        norm: jit,
        activation: jit,
        head: jit,
        rope_cache: jit,
        sample: sample_jit,
        penalty: penalty_jit,
    }
    by_module = {media: media_jit, mrope: media_jit, layer_norm: layer_norm_jit, pixels: pixels_jit}
    by_module |= {step_arrays: step_arrays_jit}
    for module, source in by_module.items():
        module._kernels = lambda source=source: CompilingKernels(source)  # type: ignore[attr-defined]
    for module, source in sources.items():
        kernels = CompilingKernels(source)
        module.kernels = lambda kernels=kernels: kernels  # type: ignore[attr-defined]
        module.launch_options = lambda device: {"EARLY": True, "launch_pdl": True}  # type: ignore[attr-defined]
    layer_norm.launch_options = media.launch_options = norm.launch_options
    for dtype, num_tokens in ((torch.bfloat16, 1), (torch.float16, 64)):
        for size in (576,) if num_tokens == 1 else (4096,):
            hidden, weight = torch.zeros(num_tokens, size, dtype=dtype), torch.zeros(size, dtype=dtype)
            norm.fused_rms_norm(hidden, weight, 1e-5)
            norm.fused_add_rms_norm(hidden, hidden, weight, 1e-5)
            layer_norm.fused_add_layer_norm(hidden, hidden, weight, weight, 1e-5)
            ids, drawn = torch.zeros(num_tokens, dtype=torch.int32), torch.zeros(9, dtype=torch.int64)
            norm.fused_embed_rms_norm(ids, ids, drawn, hidden, weight, 1e-5)
            is_media = ids if num_tokens == 1 else ids.bool()
            media.embed_media(ids, hidden, hidden, is_media)
            media.fused_add_media_rms_norm(hidden, hidden, hidden, is_media, weight, 1e-5)
            activation.fused_silu_mul(torch.zeros(num_tokens, 2 * size, dtype=dtype))
            starts, table = torch.zeros(257, dtype=torch.int32), torch.zeros(512, 256, dtype=torch.int32)
            step_arrays.write_step_arrays(starts, starts[1:], table.view(-1), ids, ids, table.t(), 16)
        for num_heads, num_kv_heads, head_size in ((9, 3, 64), (16, 8, 128)):
            columns = (num_heads + 2 * num_kv_heads) * head_size
            qkv = torch.zeros(num_tokens, columns, dtype=dtype)
            rope = make_rope(head_size, num_positions=4, dtype=dtype)
            index = torch.zeros(num_tokens, dtype=torch.int32)
            weight = torch.zeros(num_heads + num_kv_heads, head_size, dtype=dtype)
            caches = poisoned_caches(2, 16, num_kv_heads, head_size, dtype=dtype)
            rope_cache.rotate_into_cache(qkv, weight, 1e-6, rope, index, index, *caches)
            many = (
                torch.zeros(rope_cache._MANY_TOKENS, columns, dtype=dtype),
                index.new_zeros(rope_cache._MANY_TOKENS),
            )
            rope_cache.rotate_into_cache(many[0], weight, 1e-6, rope, many[1], many[1], *caches)
            rope_cache.rotate_heads(qkv, None, 1e-6, rope, index, num_kv_heads)
            positions, frequencies = index.expand(3, -1).contiguous(), torch.rand(head_size // 2)
            mrope.axis_rows(positions, frequencies, index[:1].expand(head_size // 2), 1.0, dtype)
            rope_cache.rotate_heads(qkv, None, 1e-6, rope, None, num_kv_heads)
        table, values = torch.zeros(3, 256, dtype=dtype), torch.zeros(num_tokens, 1176, dtype=dtype)
        bytes_PB = torch.zeros(num_tokens, 588, dtype=torch.uint8)
        pixels.write_values(bytes_PB, table, 2, values, is_fused=True)
        raw = torch.zeros(num_tokens, 151936, dtype=dtype)
        tokens = torch.zeros(num_tokens, dtype=torch.int64)
        ones, index = torch.ones(num_tokens), torch.ones(num_tokens, dtype=torch.int32)
        head.finish_greedy(raw, raw.float(), tokens, index[:1], -1)
        params = (ones, tokens, index)
        sample.draw_tokens(raw.float(), tokens.clone(), -1, *params, None, None, None)
        sample.draw_tokens(raw.float(), tokens.clone(), -1, *params, index, ones, ones)
        counts = torch.zeros(9, 151936, dtype=torch.int32)
        values = {"repetition_P": ones, "presence_P": ones, "frequency_P": ones}
        penalty.penalise_rows(raw.float(), counts, index, index, **values)
        penalty.count_drawn(counts, tokens, index, index)


if __name__ == "__main__":
    main()

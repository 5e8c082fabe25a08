"""Compiles the kernel that sums over ranks for a Hopper GPU, without one; prints a line of JSON per launch
with the assembler's memory accesses and barriers in their order.

Run by ``test_compiled_rank_sum.py`` in a process of its own, where Triton is not interpreting.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from compile_fused_kernels import TYPE_NAMES
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gapless.kernels import rank_sum_jit
from gapless.parallel import one_shot
from gapless.parallel.one_shot import Mailbox, OneShotReducer
from gapless.parallel.rank_reducer import RankReducer

FORMS = (
    (torch.bfloat16, 4096, 2),
    (torch.float16, 8192, 8),
    (torch.bfloat16, 576, 4),
    (torch.float32, 2048, 2),
)
"""Dtype, elements of a row, ranks."""
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_TOLD = ("LDG", "STG", "LDL", "STL", "STS", "BAR", "ACQBULK", "PREEXIT", "MEMBAR", "ATOM")


def compile_and_tell(kernel: Any, grid: Any, args: Any, constants: dict[str, Any]) -> None:
    names = kernel.arg_names
    places = {name: index for index, name in enumerate(names)}
    fixed = {name: value for name, value in constants.items() if name in places}
    signature = dict.fromkeys(names, "constexpr")
    aligned = []
    for name, value in zip(names, args, strict=False):
        if isinstance(value, torch.Tensor):
            signature[name] = TYPE_NAMES[value.dtype]
            aligned.append(name)
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if type(value) is int and value % 16 == 0:
                aligned.append(name)
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(places[name],): value for name, value in fixed.items()},
        attrs={(places[name],): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {name: constants[name] for name in ("num_warps", "maxnreg") if name in constants}
    options["launch_pdl"] = True
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.nvdisasm.path, "-c", str(path)]
        sass = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        used = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)],
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout  # fmt: skip
    instructions = [found[1] for line in sass.splitlines() if (found := _INSTRUCTION.search(line))]
    described = {
        "dtype": str(args[0].dtype),
        "size": args[0].shape[1],
        "num_ranks": constants["NUM_RANKS"],
        "has_norm": constants["HAS_NORM"],
        "num_warps": constants["num_warps"],
        "registers": max(map(int, re.findall(r"REG:(\d+)", used))),
        "variants_by": [
            param.name
            for param, value in zip(kernel.params, args, strict=False)
            if type(value) is int and not param.do_not_specialize
        ],
        "instructions": [name for name in instructions if name.startswith(_TOLD)],
    }
    print(json.dumps(described))


def call_both(reducer: RankReducer, size: int, dtype: torch.dtype) -> None:
    values, weight = torch.zeros(3, size, dtype=dtype), torch.ones(size, dtype=dtype)
    reducer.all_reduce(values)
    reducer.sum_add_rms_norm(values, values, weight, 1e-5, values.clone(), values.clone())


def main() -> None:
    one_shot._kernels = lambda: rank_sum_jit  # type: ignore[assignment]
    one_shot.launch = compile_and_tell  # type: ignore[assignment]
    one_shot.launch_options = lambda device: {"EARLY": True, "launch_pdl": True}  # type: ignore[assignment]
    for dtype, size, num_ranks in FORMS:
        words = torch.zeros(2, dtype=torch.int64)
        reducer = OneShotReducer(Mailbox.of_words(words, [0] * num_ranks, rank=num_ranks - 1))
        call_both(reducer, size, dtype)


if __name__ == "__main__":
    main()

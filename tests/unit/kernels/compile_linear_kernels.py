"""Compiles the small matrix products for a Hopper GPU, without one; prints a line of JSON per launch.

Run by ``test_compiled_linear.py`` in a process of its own, where Triton is not interpreting.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from compile_fused_kernels import compile_launch

from gapless.kernels import linear, linear_jit
from gapless.kernels.linear_choice import default_tiles


class CompilingKernels:
    def __getattr__(self, name: str) -> Any:
        return Launcher(getattr(linear_jit, name))


class Launcher:
    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, num_warps: int, num_stages: int, launch_pdl: bool, **constants: Any) -> None:
            assert launch_pdl
            report = compile_launch(self.kernel, args, constants, num_warps)
            print(json.dumps({"kernel": self.kernel.__name__, "early": constants["NUM_EARLY"], **report}))

        return launch


def main() -> None:
    linear._kernels = CompilingKernels  # type: ignore[assignment]
    linear.choose = lambda product, device: default_tiles(product)
    linear.launch_options = lambda device: {"EARLY": True, "launch_pdl": True}
    for dtype, num_tokens in ((torch.bfloat16, 1), (torch.float16, 1), (torch.bfloat16, 8)):
        for num_in in (1024, 3072, 4096):
            x, weight = torch.zeros(num_tokens, num_in, dtype=dtype), torch.zeros(2048, num_in, dtype=dtype)
            linear.small_linear(x, weight, None)
            linear.gate_up_silu(x, weight, weight[:, 0].contiguous())


if __name__ == "__main__":
    main()

"""Compiles the small matrix products for a Hopper GPU, without one; prints a line of JSON per launch.

Run by ``test_compiled_linear.py`` in a process of its own, where Triton is not interpreting.
"""

from __future__ import annotations

import torch
from compile_fused_kernels import CompilingKernels

from gapless.kernels import linear, linear_jit
from gapless.kernels.linear_rules import default_tiles
from gapless.kernels.matrices import Matrices

CASES = (
    (torch.bfloat16, 1, False, ((2048, 1024), (2048, 4096), (2048, 14336))),
    (torch.float16, 1, True, ((2048, 3072),)),
    (torch.bfloat16, 8, True, ((2048, 1024), (2048, 3072), (8192, 1024), (8192, 4096), (131072, 4096))),
    (torch.float16, 16, False, ((2048, 3072), (131072, 1024))),
    (torch.bfloat16, 32, False, ((2048, 2048), (2048, 3072), (4096, 14336), (8192, 1024))),
    (torch.bfloat16, 64, True, ((8192, 1024),)),
    (torch.bfloat16, 128, False, ((4096, 1024),)),
)
"""Tokens, whether gate and up (then with a bias), and rows and columns of the weights."""


def main() -> None:
    kernels = CompilingKernels(linear_jit, lambda args, constants: {"early": constants["NUM_EARLY"]})
    linear._kernels = lambda: kernels  # type: ignore[assignment, return-value]
    linear.launch_options = lambda device: {"EARLY": True, "launch_pdl": True}
    for dtype, num_tokens, is_gated, shapes in CASES:
        for num_rows, num_in in shapes:
            x = torch.empty(num_tokens, num_in, dtype=dtype, device="meta")
            weight = torch.empty(num_rows, num_in, dtype=dtype, device="meta")
            bias = torch.empty(num_rows, dtype=dtype, device="meta") if is_gated else None
            matrices = Matrices(weights=(weight,), bias=bias, is_gated=is_gated)
            tiles = default_tiles(matrices.product(num_tokens))
            assert tiles is not None
            linear.launch_product(x, weight, bias, tiles, is_gated=is_gated)


if __name__ == "__main__":
    main()

"""Compiles products whose columns are shared between programs, and the norms that add the parts up, for a
Hopper GPU, without one; prints a line of JSON per launch.

Run by ``test_compiled_summed_products.py`` in a process of its own, where Triton is not interpreting.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from compile_fused_kernels import CompilingKernels

from gapless.kernels import jit, linear, linear_jit, norm
from gapless.kernels.linear_rules import default_tiles
from gapless.kernels.linear_tuner import candidates
from gapless.kernels.matrices import Matrices
from gapless.kernels.summed_product import launch_summed

SHAPES = ((1024, 2048), (1024, 3072))
"""Rows and columns of the weights: attention's output and the last product of Qwen3-0.6B."""


def main() -> None:
    products = CompilingKernels(
        linear_jit,
        lambda args, constants: {
            "tokens": args[-1], "early": constants["NUM_EARLY"], "parts": constants["PARTS"],
        },
    )  # fmt: skip
    norms = CompilingKernels(jit, lambda args, constants: {"parts": constants["NUM_PARTS"]})
    linear._kernels = lambda: products  # type: ignore[assignment, return-value]
    norm.kernels = lambda: norms  # type: ignore[assignment, return-value]
    linear.launch_options = norm.launch_options = lambda device: {"EARLY": True, "launch_pdl": True}
    for num_tokens in (8, 16, 32, 64, 128):
        for num_rows, num_in in SHAPES:
            dtype = torch.float16 if num_tokens == 16 else torch.bfloat16
            x = torch.empty(num_tokens, num_in, dtype=dtype, device="meta")
            weight = torch.empty(num_rows, num_in, dtype=dtype, device="meta")
            residual, norm_weight = x.new_empty(num_tokens, num_rows), x.new_empty(num_rows)
            group = Matrices(weights=(weight,), bias=None, is_gated=False, is_summed=True)
            tiles = default_tiles(group.product(num_tokens))
            assert tiles is not None
            launch_summed(x, weight, residual, norm_weight, 1e-6, tiles)
    product = group.product(128)
    largest = max(candidates(product), key=lambda tiles: tiles.parts)
    launch_summed(x[:128], weight, residual[:128], norm_weight, 1e-6, replace(largest, parts=16))


if __name__ == "__main__":
    main()

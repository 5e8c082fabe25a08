"""Compiles the kernels with roles for a Hopper GPU, which needs none, into ``TRITON_CACHE_DIR``."""

from __future__ import annotations

import sys
from pathlib import Path

import triton
from compile_kernels import compile_hopper_kernel
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

sys.path.append(str(Path(__file__).parents[2] / "gpu"))

import racecheck_kernels

if __name__ == "__main__":
    compile_hopper_kernel([(2, 128, 16, 4096)])
    for kernel, kind in (
        (racecheck_kernels.hand_over_kernel, "*i32"),
        (racecheck_kernels.racing_kernel, "*i64"),
    ):
        source = GluonASTSource(
            kernel, signature={"out_TR": kind}, constexprs={}, attrs={(0,): [["tt.divisibility", 16]]}
        )
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})

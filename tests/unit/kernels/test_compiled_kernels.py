"""What the interpreter cannot show: the kernels compile for a Hopper GPU, with full-width memory accesses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

KERNELS = {
    "rms_norm_kernel",
    "silu_mul_kernel",
    "rotate_heads_kernel",
    "best_of_chunk_kernel",
    "best_of_row_kernel",
}


def test_kernels_compile_and_move_16_bytes_at_a_time() -> None:
    folder = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, str(folder / "compile_fused_kernels.py")],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": str(folder.parents[1])},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert {report["kernel"] for report in reports} == KERNELS
    for report in reports:
        assert report["shared_bytes"] <= 48 * 1024, report
        if report["kernel"] != "best_of_row_kernel":  # one token per program
            assert (report["load_bits"], report["store_bits"]) == (128, 128), report

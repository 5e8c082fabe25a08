"""The gated product of many tokens without a GPU: played in Python, and what the compiler made of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_reports import reports_of
from gated_product_ir import Step, Stored, run_program

pytest.importorskip("triton")

from gated_product_on_cpu import run_kernel

from gapless.kernels.linear_tiles import GatedTiles

SMALL = {"block_t": 8, "block_o": 8, "block_i": 4, "num_stages": 3, "shared_by": 2}


@pytest.mark.parametrize("skew", [0, 1, 2])
@pytest.mark.parametrize(
    ("num_tokens", "num_out", "num_programs"),
    [(1, 8, 1), (8, 16, 2), (13, 20, 1), (40, 24, 4), (33, 40, 5), (40, 24, 15)],
)
def test_equals_two_steps(num_tokens: int, num_out: int, num_programs: int, skew: int) -> None:
    torch.manual_seed(0)
    for num_in in (12, 20, 14):
        x = torch.randn(num_tokens, num_in + 4, dtype=torch.bfloat16)[:, :num_in]
        weight = torch.randn(2 * num_out, num_in, dtype=torch.bfloat16)
        out = torch.full((num_tokens, num_out), torch.nan, dtype=torch.bfloat16)
        tiles = GatedTiles(**SMALL, skew=skew)
        run_kernel(x, weight, out, tiles, num_programs=num_programs, seed=num_in)
        gate, up = F.linear(x.float(), weight.float()).chunk(2, dim=-1)
        torch.testing.assert_close(out.float(), F.silu(gate) * up, atol=2e-2, rtol=2e-2)


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return reports_of("compile_gated_product.py")


def test_it_fits_a_processor_and_the_assembler_made_no_mistake(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["shared_bytes"] <= 227 * 1024
        assert not report["unwritten"]
        assert report["spills"] == 0
        # Where it runs out of registers the assembler waits for every single product.
        assert report["waits"][0] <= report["waits"][1]


@pytest.mark.parametrize(
    ("num_tokens", "num_out", "num_programs"), [(1, 512, 4), (333, 640, 3), (640, 512, 7), (128, 256, 1)]
)
def test_compiled_programs_end_and_multiply_every_column_of_every_tile(
    reports: list[dict[str, Any]], num_tokens: int, num_out: int, num_programs: int
) -> None:
    """Also those with several tiles: the compiler once left the first columns of all but the first out."""
    for report in reports:
        sizes, stored = report["sizes"], []
        for program in range(num_programs):
            case = {"num_tokens": num_tokens, "num_out": num_out, "num_programs": num_programs}
            stored += run_program(report["ttgir"], program=program, **case, seed=program)
        half, block_o = sizes["block_t"] // 2, sizes["block_o"]
        rows = range(0, -(-num_tokens // sizes["block_t"]) * sizes["block_t"], half)
        wanted = [
            Stored(
                ("out", row, first),
                tuple(
                    Step(("x", row, column), ("weight", first, column), ("weight", num_out + first, column))
                    for column in range(0, report["num_in"], sizes["block_i"])
                ),
            )
            for row in rows
            for first in range(0, num_out, block_o)
        ]
        assert sorted(stored, key=lambda store: store.target) == wanted

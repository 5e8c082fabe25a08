"""The gated product of many tokens on a Hopper GPU: against float32, under capture, in a chain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.kernels.gated_product import can_run_gated
from gapless.kernels.linear import gated_product
from gapless.kernels.linear_tiles import GatedTiles, Product
from gapless.kernels.linear_tuner import gated_candidates

pytestmark = pytest.mark.gpu

HALVES = (torch.bfloat16, torch.float16)
SHAPES = [(1024, 3072), (4096, 14336), (384, 200), (1000, 96)]
"""Input and output features."""


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Memory that was never written holds NaN: an element that a kernel leaves out is found."""
    if not can_run_gated(torch.device("cuda")):
        pytest.skip("the kernel is for Hopper GPUs")
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    with torch.no_grad():
        yield
    torch.use_deterministic_algorithms(False)


def make_operands(num_tokens: int, num_in: int, num_out: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight = torch.randn(2 * num_out, num_in, device="cuda") * num_in**-0.5
    return torch.randn(num_tokens, num_in, device="cuda").to(dtype), weight.to(dtype)


def tiles_for(num_in: int, num_out: int, dtype: torch.dtype) -> list[GatedTiles]:
    product = Product(num_tokens=128, num_in=num_in, num_out=num_out, is_gated=True, dtype=dtype)
    return list(gated_candidates(product))


@pytest.mark.timeout(60)  # a program that waits for ever ends with the process
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_equals_float32(num_in: int, num_out: int, dtype: torch.dtype) -> None:
    for tiles in tiles_for(num_in, num_out, dtype):
        for num_tokens in (1, 65, 333, 2048, 4000):
            x, weight = make_operands(num_tokens, num_in, num_out, dtype)
            gate, up = F.linear(x.float(), weight.float()).chunk(2, dim=-1)
            expected = F.silu(gate) * up
            case = (tiles, num_tokens)
            out = gated_product(x, weight, tiles)
            error = float((out.float() - expected).norm() / expected.norm())
            assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3), (case, error)
            assert all(torch.equal(out, gated_product(x, weight, tiles)) for _ in range(5)), (
                tiles,
                num_tokens,
            )


@pytest.mark.timeout(60)
def test_a_token_does_not_depend_on_the_others() -> None:
    for tiles in tiles_for(1024, 3072, torch.bfloat16):
        x, weight = make_operands(2048, 1024, 3072, torch.bfloat16)
        whole = gated_product(x, weight, tiles)
        for first, last in ((0, 100), (700, 1111), (2047, 2048)):
            assert torch.equal(gated_product(x[first:last].contiguous(), weight, tiles), whole[first:last])


@pytest.mark.timeout(60)
def test_in_a_captured_chain_each_reads_what_the_one_before_wrote() -> None:
    """Each starts before the one ahead has ended; weights alone may be read until then."""
    for tiles in tiles_for(1024, 1024, torch.bfloat16):
        x, _ = make_operands(512, 1024, 1024, torch.bfloat16)
        weights = [make_operands(1, 1024, 1024, torch.bfloat16)[1] * 1.5 for _ in range(12)]

        def chain(tiles: GatedTiles = tiles, x: Tensor = x, weights: list[Tensor] = weights) -> Tensor:
            hidden = x
            for first, second in zip(weights[::2], weights[1::2], strict=True):
                hidden = gated_product(gated_product(hidden, first, tiles), second, tiles)
                hidden = hidden / hidden.float().norm(dim=1, keepdim=True).to(hidden.dtype) * 32
            return hidden

        wanted = chain().clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain()
        for _ in range(3):
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, wanted)

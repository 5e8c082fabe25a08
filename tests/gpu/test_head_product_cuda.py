"""The compiled head that picks, with real tiles: against float64, odd values, in a captured chain."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from gapless.engine.graph_set import INVALID_TOKEN, greedy_or_invalid
from gapless.kernels.head_product import compile_head, head_greedy
from gapless.kernels.head_tiles import MAX_HEAD_ROWS, HeadTiles, default_head_tiles, head_tiles
from gapless.kernels.launch import compiling_ahead
from gapless.kernels.norm import fused_rms_norm
from head_cases import HALVES, assert_picks, make_head, run_head, tied_head

pytestmark = pytest.mark.gpu

ROWS = (2, 3, 8, 17, 33, 64, 130, 256)
OTHERS = (
    HeadTiles(block_r=8, block_o=32, block_i=64, split=4, num_early=1, num_warps=4, num_stages=3),
    HeadTiles(block_r=32, block_o=64, block_i=128, num_early=2, prefetch=256, num_warps=4, num_stages=3),
    HeadTiles(block_r=64, block_o=128, block_i=64, prefetch=64, num_warps=8, num_stages=4),
    HeadTiles(block_r=128, block_o=256, block_i=64, num_warps=8, num_stages=4),
    HeadTiles(block_r=256, block_o=64, block_i=64, num_warps=4, num_stages=4),
)
"""Beside those that are built in; with fewer rows than there are, several tiles of them."""


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Memory that was never written holds NaN: an element that a kernel leaves out is found."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    with torch.no_grad():
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("num_in", "size"), [(64, 65), (1024, 5003), (576, 2048), (4096, 1500)])
def test_equals_float64(num_in: int, size: int, dtype: torch.dtype) -> None:
    for num_rows in ROWS:
        tiles = default_head_tiles(1 << (num_rows - 1).bit_length())
        assert_picks(*make_head(num_rows, num_in, size, dtype=dtype, device="cuda"), tiles=tiles)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tiles", OTHERS)
def test_other_tiles_equal_float64(tiles: HeadTiles, dtype: torch.dtype) -> None:
    for num_rows in (2, 33, 130):
        assert_picks(*make_head(num_rows, 1024, 1537, dtype=dtype, device="cuda"), tiles=tiles)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_whole_vocabulary_by_the_rule(dtype: torch.dtype) -> None:
    for num_rows in (1, 2, 9, 32, 50, 128, 256):
        hidden, weight = make_head(num_rows, 1024, 151936, dtype=dtype, device="cuda")
        if torch.cuda.get_device_capability() == (9, 0) and 1 < num_rows <= MAX_HEAD_ROWS:
            assert head_tiles(num_rows, 1024, 151936, dtype, hidden.device) is not None
        assert_picks(hidden, weight, tiles=None)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tiles", [*OTHERS, *(default_head_tiles(rows) for rows in (8, 16, 32, 64, 128))])
def test_ties_and_values_that_are_no_numbers(tiles: HeadTiles, dtype: torch.dtype) -> None:
    hidden, weight, expected = tied_head(dtype, "cuda")
    for needed in (False, True):
        assert run_head(hidden, weight, tiles=tiles, needed=needed)[1].tolist() == expected
    for bad in (math.nan, -math.nan):
        hidden, weight = make_head(5, 64, 150, dtype=dtype, device="cuda")
        hidden[1, 7] = bad
        logits, tokens = assert_picks(hidden, weight, tiles=tiles)
        assert logits[1].isnan().all()
        assert (tokens == INVALID_TOKEN).tolist() == [False, True, False, False, False]
    weight[149] = math.nan
    assert (run_head(hidden, weight, tiles=tiles)[1] == INVALID_TOKEN).all()
    weight[:, 0], hidden[:] = -math.inf, 0.0
    weight[140, 0], weight[149] = 3.0, 0.0
    hidden[:, 0] = torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0])
    assert run_head(hidden, weight, tiles=tiles)[1].tolist() == [140, 0, 140, 140, 140]


@pytest.mark.parametrize("num_rows", [2, 24, 128, 200])
def test_a_captured_chain_equals_eager_with_fresh_data_and_reads_its_flag(num_rows: int) -> None:
    """Behind a kernel that lets it start early, again and again, over buffers that it must not read yet."""
    num_in, size = 1024, 70000
    states, weight = make_head(num_rows, num_in, size, dtype=torch.bfloat16, device="cuda")
    with compiling_ahead():
        compile_head(weight)
    norm_weight = torch.rand(num_in, device="cuda").bfloat16()
    logits = torch.full((num_rows, size), 7.0, device="cuda")
    tokens = torch.zeros(num_rows, dtype=torch.int64, device="cuda")
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")

    def step() -> None:
        hidden = fused_rms_norm(states, norm_weight, 1e-6)
        head_greedy(hidden, weight, logits, tokens, flag, INVALID_TOKEN)
        states.add_(hidden.roll(1, 0), alpha=0.5)

    start = states.clone()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            step()
    for needed in (0, 1, 0, 1):
        flag.fill_(needed)
        states.copy_(start.roll(needed, 1))
        logits.fill_(7.0)
        graph.replay()
        drawn, written = tokens.clone(), logits.clone()
        states.copy_(start.roll(needed, 1))
        for _ in range(3):
            step()
        assert torch.equal(tokens, drawn)
        assert torch.equal(logits, written)
        if needed:
            assert torch.equal(drawn.cpu(), greedy_or_invalid(written.cpu()))
        else:
            assert (written == 7.0).all()

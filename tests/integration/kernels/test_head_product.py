"""The head and its greedy choice in one kernel, under Triton's interpreter, against float64; and when it is
taken."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tiny_engines import generate, open_engine_of
from torch import Tensor

from gapless.engine.graph_set import INVALID_TOKEN
from gapless.kernels import head_product
from gapless.kernels.head_product import head_greedy, launch_head
from gapless.kernels.head_tiles import HeadTiles
from gapless.models import decoder, layers
from head_cases import HALVES, TILES, assert_picks, make_head, run_head, tied_head

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"),
]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (3, 203), (17, 65), (33, 130), (130, 97)])
def test_equals_float64(num_rows: int, size: int, dtype: torch.dtype) -> None:
    for num_in, tiles in zip((64, 192, 128), TILES, strict=True):
        assert_picks(*make_head(num_rows, num_in, size, dtype=dtype), tiles=tiles)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tiles", TILES)
def test_the_lowest_of_equal_logits_wins_and_zeros_of_either_sign_are_equal(
    tiles: HeadTiles, dtype: torch.dtype
) -> None:
    hidden, weight, expected = tied_head(dtype)
    for needed in (False, True):
        assert run_head(hidden, weight, tiles=tiles, needed=needed)[1].tolist() == expected


@pytest.mark.parametrize("dtype", HALVES)
def test_a_nan_of_either_sign_makes_its_row_invalid_and_no_other(dtype: torch.dtype) -> None:
    for row, bad in ((1, math.nan), (2, -math.nan)):
        hidden, weight = make_head(5, 64, 150, dtype=dtype)
        hidden[row, 7] = torch.tensor(math.copysign(1.0, bad)) * math.nan
        logits, tokens = assert_picks(hidden, weight, tiles=TILES[0])
        assert logits[row].isnan().all()
        assert (tokens == INVALID_TOKEN).tolist() == [r == row for r in range(5)]
    weight[149] = math.nan  # a token of the last chunk: every row's
    assert (run_head(hidden, weight, tiles=TILES[1])[1] == INVALID_TOKEN).all()


@pytest.mark.filterwarnings("ignore:invalid value")  # of infinity times zero, in rows that are padding
@pytest.mark.parametrize("dtype", HALVES)
def test_infinite_logits_are_compared_as_numbers(dtype: torch.dtype) -> None:
    hidden, weight = torch.zeros(3, 64, dtype=dtype), torch.zeros(70, 64, dtype=dtype)
    hidden[:, 0] = torch.tensor([1.0, -1.0, 1.0])
    weight[:, 0] = -math.inf
    assert run_head(hidden, weight, tiles=TILES[0])[1].tolist() == [0, 0, 0], "as of equals"
    weight[66, 0] = 3.0
    assert run_head(hidden, weight, tiles=TILES[0])[1].tolist() == [66, 0, 66]


def test_rows_of_the_weights_beyond_the_vocabulary_are_not_read() -> None:
    hidden, weight = make_head(3, 64, 100, dtype=torch.bfloat16)
    longer = torch.cat((weight, torch.full((28, 64), math.nan, dtype=torch.bfloat16)))
    for tiles in (TILES[0], None):
        logits, tokens = run_head(hidden, longer, size=100, tiles=tiles)
        expected = run_head(hidden, weight, tiles=tiles)
        assert torch.equal(logits, expected[0])
        assert torch.equal(tokens, expected[1])


def test_rows_of_wider_tensors_and_larger_buffers() -> None:
    hidden, weight = make_head(5, 64, 100, dtype=torch.float16)
    wide = torch.full((5, 80), math.nan, dtype=torch.float16)
    wide[:, :64] = hidden
    logits, tokens = torch.full((7, 120), 7.0), torch.full((7,), 99)
    needed = torch.ones(1, dtype=torch.int32)
    launch_head(wide[:, :64], weight, logits[:5, :100], tokens[:5], needed, INVALID_TOKEN, TILES[1])
    expected = run_head(hidden, weight, tiles=TILES[1])
    assert torch.equal(logits[:5, :100], expected[0])
    assert torch.equal(tokens[:5], expected[1])
    assert (logits[5:] == 7.0).all()
    assert (logits[:, 100:] == 7.0).all()
    assert tokens[5:].tolist() == [99, 99]


def test_without_tiles_it_is_the_product_and_then_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_product, "launch_head", None)
    for num_rows in (0, 1, 3):
        hidden, weight = make_head(num_rows, 64, 100, dtype=torch.bfloat16)
        raw = hidden @ weight.T
        logits, tokens = torch.full((num_rows, 100), 7.0), torch.full((num_rows,), 99)
        head_greedy(hidden, weight, logits, tokens, torch.ones(1, dtype=torch.int32), INVALID_TOKEN)
        assert torch.equal(logits, raw.float())
        assert torch.equal(tokens, raw.argmax(-1))


@pytest.mark.parametrize("strategy", ["full", "breakable"])
def test_graphs_equal_padded_eager_and_draw_what_two_steps_draw(
    strategy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    halves = {"dtype": "bfloat16"}
    monkeypatch.setattr(layers, "can_pack", lambda weight: False)  # as on a GPU
    monkeypatch.setattr(decoder, "has_fused_kernels", lambda device: True)
    expected = generate(open_engine_of(tmp_path / "apart", "full", "full", options=halves))
    launched: list[int] = []

    def launch(hidden_RE: Tensor, *args: object) -> None:
        launched.append(hidden_RE.shape[0])
        launch_head(hidden_RE, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(head_product, "launch_head", launch)
    monkeypatch.setattr(
        head_product, "head_tiles", lambda num_rows, *rest: TILES[0] if num_rows > 1 else None
    )
    opened = open_engine_of(tmp_path / "at_once", strategy, strategy, options=halves)
    opened.runner.graphs.keeps_logits = True
    assert generate(opened) == expected
    assert launched
    assert not opened.runner.report()["eager"], "every step ran as a graph"
    logits = opened.runner._graphs.logits.clone()
    with opened.runner.padded_eager():
        assert generate(opened) == expected
    assert torch.equal(opened.runner._graphs.logits, logits), "the last step's logits are bit-equal"

"""The engine on attention that norms and rotates heads itself (interpreted), in graphs and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engines import generate, open_engine_of

from gapless.attention import triton_paged
from gapless.attention.triton_launch import launch_decode
from gapless.attention.triton_paged import TritonPagedBackend
from gapless.engine import build
from gapless.models import decoder

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU the engine's own tests cover the compiled kernels"
)
LENGTHS = (3, 4)
"""Both prompts are one step, and the step behind it is of two single tokens."""


@pytest.fixture(scope="module")
def unfused_tokens(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return generate(open_engine_of(tmp_path_factory.mktemp("unfused"), "full", "full"), lengths=LENGTHS)


@pytest.mark.parametrize(
    ("strategy", "rotated_sizes"),
    [
        ("full", {1, 2}),
        ("breakable", {1}),  # its graphs are of any two tokens, which may be one request's
        ("tc_piecewise", set()),
    ],
)
def test_graphs_equal_padded_eager_and_draw_what_unfused_ones_draw(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    unfused_tokens: list[list[int]],
    strategy: str,
    rotated_sizes: set[int],
) -> None:
    rotated: set[int] = set()

    def launch(*args: Any) -> None:
        if len(args) > 6:
            rotated.add(len(args[2][0]))
        launch_decode(*args)

    monkeypatch.setattr(triton_paged, "launch_decode", launch)
    monkeypatch.setattr(decoder, "has_fused_kernels", lambda device: True)
    monkeypatch.setattr(build, "create_backend", lambda name, device_type: TritonPagedBackend())
    opened = open_engine_of(tmp_path / "fused", strategy, strategy)
    opened.runner.graphs.keeps_logits = True
    for runs_graphs in (True, False):
        rotated.clear()
        if runs_graphs:
            assert generate(opened, lengths=LENGTHS) == unfused_tokens
            assert not opened.runner.report()["eager"], "every step ran as a graph"
            logits = opened.runner._graphs.logits.clone()
        else:
            with opened.runner.padded_eager():
                assert generate(opened, lengths=LENGTHS) == unfused_tokens
        assert rotated == rotated_sizes, "eager and graph take the same kernel"
    assert torch.equal(opened.runner._graphs.logits, logits), "the last step's logits are bit-equal"

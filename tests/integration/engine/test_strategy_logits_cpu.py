"""Logits under every strategy equal those of plain torch operations without padding, in float32 on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from strategy_logits import STRATEGIES, logits_of, torch_logits, write_model

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "num_hidden_layers": 2,
}


@pytest.fixture(scope="module", params=["qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    source = write_model(tmp_path_factory.mktemp("model"), request.param, **SIZES)
    with pytest.MonkeyPatch.context() as patch:
        return source, torch_logits(source, device="cpu", dtype="float32", monkeypatch=patch)


TRIED = ("full+full", "breakable+full", "tc_piecewise+full", "full+breakable", "tc_piecewise+tc_piecewise")
"""Every strategy in both phases; tests/gpu/test_strategy_logits.py has all pairs."""


@pytest.mark.parametrize("strategy", TRIED)
def test_logits_equal_torch(model: tuple[str, tuple[Tensor, Tensor]], strategy: str) -> None:
    source, expected = model
    found = logits_of(source, device="cpu", dtype="float32", **STRATEGIES[strategy])
    for ours, torchs in zip(found, expected, strict=True):
        assert ours.shape == torchs.shape
        assert (ours - torchs).abs().max() < 1e-4

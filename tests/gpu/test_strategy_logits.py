"""Logits under every strategy are those of plain torch operations, up to the noise of bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from strategy_logits import CONFIGS, STRATEGIES, logits_of, noise, torch_logits, write_model

pytestmark = pytest.mark.gpu

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 8192,
}
MAX_RMS = 0.03
"""Of four layers in bfloat16 (relative precision 0.4 %), in standard deviations of the logits."""


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    source = write_model(tmp_path_factory.mktemp("model"), request.param, **SIZES)
    with pytest.MonkeyPatch.context() as patch:
        return source, torch_logits(source, device="cuda", dtype="bfloat16", monkeypatch=patch)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if "disabled" not in name])
def test_logits_are_within_bfloat16_noise_of_torch(
    model: tuple[str, tuple[Tensor, Tensor]], strategy: str
) -> None:
    source, expected = model
    found = logits_of(source, device="cuda", dtype="bfloat16", **STRATEGIES[strategy])
    for phase, ours, torchs in zip(("prefill", "decode"), found, expected, strict=True):
        rms, largest = noise(ours, torchs)
        agree = int((ours.argmax(-1) == torchs.argmax(-1)).sum())
        print(f"{strategy} {phase}: rms {rms:.4f}, max {largest:.4f}, {agree} of {len(ours)}")
        assert rms < MAX_RMS

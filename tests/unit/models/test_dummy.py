"""Dummy weights: the same for the same seed, finite logits, nothing left unset."""

from __future__ import annotations

import pytest
import torch
from checkpoints import TINY, empty_model

from gapless.models.dummy import fill_dummy_weights

WIDE = {**TINY, "intermediate_size": 16, "vocab_size": 20}  # other memory layouts than TINY


@pytest.mark.parametrize("raw", [TINY, WIDE], ids=["tiny", "wide"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_seed_gives_the_same_model(raw: dict, dtype: torch.dtype) -> None:
    first, second = empty_model(raw, dtype=dtype), empty_model(raw, dtype=dtype)
    fill_dummy_weights(first, seed=3)
    torch.manual_seed(0)
    torch.rand(5)
    fill_dummy_weights(second, seed=3)
    for (name, one), (_, two) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(one, two), name


def test_another_seed_gives_another_model() -> None:
    first, second = empty_model(), empty_model()
    fill_dummy_weights(first, seed=0)
    fill_dummy_weights(second, seed=1)
    assert not torch.equal(first.embedding, second.embedding)


def test_global_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fill_dummy_weights(empty_model(), seed=1)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "raw", [TINY, {**TINY, "attention_bias": True}, {**TINY, "tie_word_embeddings": True}]
)
def test_every_value_is_set_and_small(raw: dict) -> None:
    model = empty_model(raw)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    fill_dummy_weights(model, seed=0)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        is_norm = "norm" in name
        assert torch.equal(parameter, torch.ones_like(parameter)) == is_norm, name
        if not is_norm:
            assert parameter.abs().max() < 0.2, name
            assert parameter.std() > 0.005, name


def test_progress_counts_every_tensor() -> None:
    seen: list[tuple[str, int, int]] = []
    model = empty_model()
    fill_dummy_weights(model, seed=0, progress=lambda *step: seen.append(step))
    total = len(model.weight_targets())
    assert seen == [("weights", i + 1, total) for i in range(total)]


def test_deep_model_keeps_logits_finite_in_half_precision() -> None:
    model = empty_model({**TINY, "num_hidden_layers": 64}, dtype=torch.float16)
    fill_dummy_weights(model, seed=0)
    hidden = model.embed(torch.arange(50))
    for block in model.blocks:  # without attention: its output is an average of values and never larger
        hidden = hidden + block.mlp(block.mlp_norm(hidden))
    logits = model.head(model.final_norm(hidden))
    assert logits.isfinite().all()
    assert logits.std() > 0

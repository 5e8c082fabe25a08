"""Our mixtures of experts against Transformers: the same random checkpoint, saved in either form of experts,
gives the same logits through a paged cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paged_forward import PagedForward
from random_models import random_model, random_tokens, reference_logits
from safetensors import safe_open
from transformers import PreTrainedModel

from gapless.models.decoder import Decoder
from gapless.models.registry import load_model

CPU = torch.device("cpu")
TOLERANCE = 1e-4
LENGTHS = (7, 1, 12)

EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_hidden_layers": 2,
}  # fmt: skip
CASES: dict[str, tuple[str, dict]] = {
    "qwen3": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "head_dim": 16}),
    "qwen3-plain-weights": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": False, "num_experts_per_tok": 3}),
    "qwen3-window": (
        "qwen3_moe",
        {**EXPERTS, "head_dim": 16, "sliding_window": 4, "use_sliding_window": True},
    ),
    "qwen3-every-second-layer": (
        "qwen3_moe",
        {**EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen2": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen2-window": (
        "qwen2_moe",
        {
            **EXPERTS, "shared_expert_intermediate_size": 40, "norm_topk_prob": True, "sliding_window": 4,
            "use_sliding_window": True, "max_window_layers": 1,
        },
    ),
    "qwen2-no-bias": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 8, "qkv_bias": False}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_hidden_layers": 2}),
    "mixtral-window": ("mixtral", {"num_local_experts": 4, "num_hidden_layers": 2, "sliding_window": 4}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["one tensor per expert", "stacked"])
def test_logits_equal_transformers_over_prefill_and_decode(case: str, form: str, tmp_path: Path) -> None:
    reference, model = saved_and_loaded(case, tmp_path, form=form)
    sequences = random_tokens(*LENGTHS)
    forward = PagedForward(model, num_seqs=len(sequences), max_len=32)
    collected: list[list[torch.Tensor]] = [[] for _ in sequences]
    starts = [0] * len(sequences)
    for counts in [(5, 0, 11), (1, 1, 0), (1, 0, 1)]:
        chunks = [s[a : a + n] for s, a, n in zip(sequences, starts, counts, strict=True)]
        for index, logits in enumerate(forward.step(chunks)):
            collected[index].append(logits)
            starts[index] += counts[index]
    for tokens, parts in zip(sequences, collected, strict=True):
        expected = reference_logits(reference, tokens)
        assert expected.std() > 0.1
        assert (torch.cat(parts) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("case", ["qwen3", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_to_float32_as_transformers(
    case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    reference, _ = saved_and_loaded(case, tmp_path)
    model = load_model(str(tmp_path), device=CPU, dtype=str(dtype).removeprefix("torch.")).model
    (tokens,) = random_tokens(24)
    exact = reference_logits(reference, tokens)
    theirs = reference_logits(reference.to(dtype), tokens).float()
    (ours,) = PagedForward(model, num_seqs=1, max_len=32).step([tokens])
    # The median row: a row whose router stands on the edge between two experts may fall to either side.
    ours_R, theirs_R = ((found - exact).abs().mean(1) for found in (ours, theirs))
    assert ours_R.median() <= 1.5 * theirs_R.median()


def saved_and_loaded(
    case: str, folder: Path, *, form: str = "one tensor per expert"
) -> tuple[PreTrainedModel, Decoder]:
    model_type, overrides = CASES[case]
    reference = random_model(model_type, **overrides)
    reference.save_pretrained(folder, save_original_format=form != "stacked")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert any(name.endswith("experts.gate_up_proj") for name in names) == (form == "stacked")
    return reference, load_model(str(folder), device=CPU).model

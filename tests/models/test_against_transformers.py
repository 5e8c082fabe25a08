"""Our decoder against Transformers: the same random checkpoint must give the same logits, through a paged
cache."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from paged_forward import PagedForward
from random_models import random_model, random_tokens, reference_logits
from torch import Tensor
from transformers import PreTrainedModel

from gapless.models.decoder import Decoder
from gapless.models.registry import load_model

CPU = torch.device("cpu")
TOLERANCE = 1e-4
LENGTHS = (13, 1, 7, 18)
WINDOW = 5

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1000.0,
}

CASES: dict[str, tuple[str, dict]] = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama-grouped-heads": ("llama", {}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}},
    ),
    "yarn-rope": ("llama", {"rope_parameters": YARN_ROPE}),
    "yarn-rope-scales": ("llama", {"rope_parameters": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.5}}),
    "yarn-rope-untruncated": (
        "llama",
        {"rope_parameters": {**YARN_ROPE, "truncate": False, "beta_fast": 16.0}},
    ),
    "smollm2": (
        "llama",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "tie_word_embeddings": True},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "mistral-head-dim": ("mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window-unused": ("qwen2", {"sliding_window": WINDOW, "use_sliding_window": False}),
    "qwen2-window-last-layers": (
        "qwen2",
        {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen2-window-by-layer": (
        "qwen2",
        {
            "sliding_window": WINDOW,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN_ROPE}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-head-dim": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-attention-bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-window": (
        "qwen3",
        {"head_dim": 16, "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    ),
}
WINDOW_CASES = [
    "mistral-window",
    "qwen2-window-last-layers",
    "qwen2-window-by-layer",
    "qwen3-window",
]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_over_prefill_and_decode(case: str, tmp_path: Path) -> None:
    reference, model = _saved_and_loaded(case, tmp_path)
    sequences = random_tokens(*LENGTHS)

    prefill = PagedForward(model, num_seqs=len(sequences), max_len=32)
    logits = _run_in_steps(
        prefill,
        sequences,
        # Ragged prefill, then a chunk beside decodes, then decode only.
        [(6, 1, 4, 11), (4, 0, 1, 4), (1, 0, 1, 1), (1, 0, 1, 1), (1, 0, 0, 1)],
    )

    for tokens, ours in zip(sequences, logits, strict=True):
        expected = reference_logits(reference, tokens)
        assert expected.std() > 0.1
        assert _difference(ours, expected) <= TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_one_sequence_alone_equals_it_within_a_batch(case: str, tmp_path: Path) -> None:
    _, model = _saved_and_loaded(case, tmp_path)
    sequences = random_tokens(*LENGTHS, seed=1)
    together = PagedForward(model, num_seqs=len(sequences), max_len=32).step(sequences)
    for tokens, batched in zip(sequences, together, strict=True):
        (alone,) = PagedForward(model, num_seqs=1, max_len=32).step([tokens])
        assert _difference(alone, batched) <= TOLERANCE


@pytest.mark.parametrize("case", WINDOW_CASES)
def test_sliding_window_changes_logits_exactly_past_the_window(case: str, tmp_path: Path) -> None:
    _, model = _saved_and_loaded(case, tmp_path)
    (tokens,) = random_tokens(18)
    (windowed,) = PagedForward(model, num_seqs=1, max_len=32).step([tokens])
    for layer in model.attention_layers():
        layer.window = None
    (full,) = PagedForward(model, num_seqs=1, max_len=32).step([tokens])
    assert _difference(windowed[:WINDOW], full[:WINDOW]) <= TOLERANCE
    assert _difference(windowed[WINDOW:], full[WINDOW:]) > 0.01


@pytest.mark.parametrize(
    ("case", "old_style"),
    [
        ("llama3-rope", {"rope_theta": 500.0, "rope_scaling": {**LLAMA3_ROPE, "rope_theta": None}}),
        (
            "yarn-rope",
            {
                "rope_theta": 1000.0,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            },
        ),
        ("linear-rope", {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.5}}),
        ("llama-theta", {"rope_theta": 123.0, "rope_scaling": None}),
    ],
)
def test_configs_written_by_transformers_4_mean_the_same(case: str, old_style: dict, tmp_path: Path) -> None:
    reference, _ = _saved_and_loaded(case, tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    del raw["rope_parameters"]
    raw["torch_dtype"] = raw.pop("dtype")
    path.write_text(json.dumps(raw | old_style))
    model = load_model(str(tmp_path), device=CPU).model
    (tokens,) = random_tokens(18)
    (ours,) = PagedForward(model, num_seqs=1, max_len=32).step([tokens])
    assert _difference(ours, reference_logits(reference, tokens)) <= TOLERANCE


@pytest.mark.parametrize("case", ["llama-grouped-heads", "qwen2", "qwen3", "llama3-rope"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_to_float32_as_transformers(
    case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    reference, _ = _saved_and_loaded(case, tmp_path)
    model = load_model(str(tmp_path), device=CPU, dtype=str(dtype).removeprefix("torch.")).model
    (tokens,) = random_tokens(24)
    exact = reference_logits(reference, tokens)
    theirs = reference_logits(reference.to(dtype), tokens).float()
    (ours,) = PagedForward(model, num_seqs=1, max_len=32).step([tokens])
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().mean() <= 1.5 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("case", ["llama-tied", "qwen3", "qwen2"])
def test_sharded_checkpoint_equals_single_file(case: str, tmp_path: Path) -> None:
    reference, model = _saved_and_loaded(case, tmp_path / "single")
    reference.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    sharded = load_model(str(tmp_path / "sharded"), device=CPU).model
    (tokens,) = random_tokens(18)
    logits = [PagedForward(m, num_seqs=1, max_len=32).step([tokens])[0] for m in (model, sharded)]
    assert torch.equal(*logits)


def test_rope_table_shorter_than_the_model_gives_the_same_logits(tmp_path: Path) -> None:
    reference, _ = _saved_and_loaded("qwen3", tmp_path)
    loaded = load_model(str(tmp_path), device=CPU, max_model_len=18)
    assert (loaded.max_model_len, loaded.info.max_model_len) == (18, 64)
    (tokens,) = random_tokens(18)
    (ours,) = PagedForward(loaded.model, num_seqs=1, max_len=32).step([tokens])
    assert _difference(ours, reference_logits(reference, tokens)) <= TOLERANCE


@pytest.mark.parametrize(
    "case",
    [
        "llama2",
        "llama-head-dim",
        "llama-mlp-bias",
        "mistral-window",
        "qwen2-window-by-layer",
        "qwen3-head-dim",
    ],
)
def test_model_info_follows_the_config(case: str, tmp_path: Path) -> None:
    reference, model = _saved_and_loaded(case, tmp_path)
    config = reference.config
    info = dataclasses.asdict(model.info)
    assert info == {
        "architecture": type(reference).__name__,
        "num_layers": 3,
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": config.num_key_value_heads,
        "head_size": getattr(config, "head_dim", None) or 16,
        "vocab_size": 96,
        "max_model_len": 64,
        "dtype": torch.float32,
        "eos_token_ids": (config.eos_token_id,) if config.eos_token_id is not None else (),
        "num_experts": 0,
        "rope_axes": 1,
        "num_deepstack": 0,
        "is_pooling": False,
        "is_multimodal": False,
        "image_token_id": None,
        "video_token_id": None,
    }


def _saved_and_loaded(case: str, folder: Path) -> tuple[PreTrainedModel, Decoder]:
    model_type, overrides = CASES[case]
    reference = random_model(model_type, **overrides)
    reference.save_pretrained(folder)
    return reference, load_model(str(folder), device=CPU).model


def _run_in_steps(
    forward: PagedForward, sequences: list[list[int]], steps: list[tuple[int, ...]]
) -> list[Tensor]:
    """All logits of each sequence, fed ``steps[i][j]`` tokens of sequence ``j`` in step ``i``."""
    starts = [0] * len(sequences)
    collected: list[list[Tensor]] = [[] for _ in sequences]
    for counts in steps:
        chunks = [s[a : a + n] for s, a, n in zip(sequences, starts, counts, strict=True)]
        for seq, logits in enumerate(forward.step(chunks)):
            collected[seq].append(logits)
            starts[seq] += counts[seq]
    assert starts == [len(s) for s in sequences]
    return [torch.cat(parts) for parts in collected]


def _difference(ours: Tensor, expected: Tensor) -> float:
    assert ours.shape == expected.shape
    return (ours - expected).abs().max().item()

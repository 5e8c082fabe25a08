"""GGUF files against Transformers: what the converter of llama.cpp does to a model is undone exactly."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_files import gguf_name, write_gguf
from paged_forward import PagedForward
from random_models import random_model, random_tokens, reference_logits
from transformers import PreTrainedModel

from gapless.errors import ModelError
from gapless.models.registry import load_model
from gapless.models.rope import inverse_frequencies

CPU = torch.device("cpu")

CASES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_model_that_was_converted(case: str, tmp_path: Path) -> None:
    model_type, overrides = CASES[case]
    reference = random_model(model_type, **overrides)
    write_gguf(tmp_path / "model.gguf", reference)
    _check_logits(reference, tmp_path / "model.gguf")


@pytest.mark.parametrize(
    "quantization",
    [
        GGMLQuantizationType.F16,
        GGMLQuantizationType.BF16,
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.Q5_1,
        GGMLQuantizationType.Q5_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q4_0,
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_quantised_weights_mean_what_the_gguf_package_says(
    model_type: str, quantization: GGMLQuantizationType, tmp_path: Path
) -> None:
    reference = random_model(model_type, intermediate_size=96)
    write_gguf(tmp_path / "model.gguf", reference, quantization=quantization)
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() == 2:
                stored = gguf.quants.quantize(parameter.numpy(), quantization)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(stored, quantization)))
    _check_logits(reference, tmp_path / "model.gguf")


def test_rope_divisors_equal_the_llama3_formula(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    reference = random_model("llama", rope_parameters=rope)
    scaled = reference.model.rotary_emb.inv_freq
    plain = 1.0 / 500.0 ** (torch.arange(0, 16, 2) / 16)
    divisors = {"rope_freqs.weight": (plain / scaled).numpy()}
    write_gguf(tmp_path / "model.gguf", reference, extra_tensors=divisors)
    loaded = load_model(str(tmp_path / "model.gguf"), device=CPU)
    torch.testing.assert_close(inverse_frequencies(loaded.model.config.rope), scaled)
    _check_logits(reference, tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("rope", "metadata"),
    [
        (
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
        ),
        (
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 100.0,
                "original_max_position_embeddings": 16,
            },
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16,
                "rope.scaling.finetuned": True,
            },
        ),
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_rope_scaling_is_read_from_metadata(
    model_type: str, rope: dict, metadata: dict, tmp_path: Path
) -> None:
    overrides = {"head_dim": 16} if model_type == "qwen3" else {}
    reference = random_model(model_type, rope_parameters=rope, **overrides)
    write_gguf(tmp_path / "model.gguf", reference, metadata=metadata)
    _check_logits(reference, tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("metadata", "names"),
    [
        ({"expert_count": 8}, "expert_count"),
        ({"attention.sliding_window": 4096}, "attention.sliding_window"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"rope.dimension_count": 8}, "part of each head"),
        ({"attention.value_length": 8}, "value heads"),
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"rope.scaling.type": "linear"}, "factor"),
        ({"block_count": None}, "num_hidden_layers"),
        ({"embedding_length": 0}, "hidden_size"),
        ({"attention.head_count": [4, 4, 2]}, "num_attention_heads"),
        ({"feed_forward_length": 64}, "ffn_gate.weight' has shape"),
        ({"block_count": 2}, "blk.2.*has no place"),
        ({"block_count": 4}, "9 tensors are missing: model.layers.3"),
        ({"embedding_length": 32, "attention.key_length": 16}, "shape"),
    ],
)
def test_unusable_metadata_is_refused_by_name(metadata: dict, names: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", random_model("llama"), metadata=metadata)
    with pytest.raises(ModelError, match=names):
        load_model(str(tmp_path / "model.gguf"), device=CPU)


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "output_norm.weight", "blk.1.attn_k.weight", "blk.0.ffn_norm.weight"]
)
def test_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", random_model("llama"), without=(name,))
    with pytest.raises(ModelError, match=r"missing") as error:
        load_model(str(tmp_path / "model.gguf"), device=CPU)
    known = {gguf_name(n): n for n in random_model("llama").state_dict()}
    assert name in str(error.value) or known[name] in str(error.value)


@pytest.mark.parametrize("name", ["blk.0.attn_rot_embd.weight", "blk.9.attn_q.weight", "cls.weight", "what"])
def test_surplus_tensor_is_named(name: str, tmp_path: Path) -> None:
    extra = {name: np.ones(4, dtype=np.float32)}
    write_gguf(tmp_path / "model.gguf", random_model("llama"), extra_tensors=extra)
    with pytest.raises(ModelError, match=f"'{name}' has no place"):
        load_model(str(tmp_path / "model.gguf"), device=CPU)


@pytest.mark.parametrize("architecture", ["phi3", "gemma2", "qwen2moe", "qwen3moe"])
def test_unknown_gguf_architecture_is_refused(architecture: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.add_tensor("x", np.ones(1, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=f"{architecture}.*llama, qwen2 and qwen3"):
        load_model(str(tmp_path / "model.gguf"), device=CPU)


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    reference = random_model("qwen2")
    write_gguf(tmp_path / "model.gguf", reference)
    seen: list[tuple[str, int, int]] = []
    load_model(str(tmp_path / "model.gguf"), device=CPU, progress=lambda *step: seen.append(step))
    total = len(reference.state_dict())
    assert seen == [("weights", i + 1, total) for i in range(total)]


def _check_logits(reference: PreTrainedModel, path: Path) -> None:
    loaded = load_model(str(path), device=CPU)
    assert loaded.info.eos_token_ids == (3,)
    (tokens,) = random_tokens(20)
    (ours,) = PagedForward(loaded.model, num_seqs=1, max_len=32).step([tokens])
    assert (ours - reference_logits(reference, tokens)).abs().max() <= 1e-4

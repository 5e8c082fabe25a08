"""Helper: tiny Hugging Face folders written without Transformers, and the tensors they hold."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from gapless.models.config import parse_config
from gapless.models.decoder import Decoder

CPU = torch.device("cpu")

TINY: dict = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def empty_model(raw: dict | None = None, *, dtype: torch.dtype = torch.float32) -> Decoder:
    config = parse_config(TINY if raw is None else raw, source="test")
    return Decoder(config, max_positions=config.max_model_len, dtype=dtype, device=CPU)


def random_tensors(raw: dict | None = None, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every tensor a checkpoint of ``raw`` must have, with random values."""
    generator = torch.Generator().manual_seed(7)
    targets = empty_model(raw).weight_targets()
    return {name: torch.randn(t.shape, generator=generator).to(dtype) for name, t in targets.items()}


def write_config(folder: Path, raw: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY if raw is None else raw))
    return folder


def write_shards(folder: Path, tensors: dict[str, Tensor], *, num_shards: int = 3) -> dict[str, str]:
    """Shards and index; returns tensor name → file name."""
    files = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    weight_map = {name: files[i % num_shards] for i, name in enumerate(tensors)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

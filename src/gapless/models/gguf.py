"""Models from GGUF files (llama, qwen2, qwen3): config from metadata, tensor names, dequantised weights.

A GGUF file holds config, weights and tokenizer. Its metadata is translated to the keys of a ``config.json``
and goes through the same checks as a folder, so there is one place that refuses. Quantised blocks are
expanded to float32 by the ``gguf`` package's numpy routines, one tensor at a time, straight into the merged
parameters. llama.cpp stores the query and key rows of ``llama`` models with rotary pairs interleaved; they
are put back here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gapless.errors import ModelError
from gapless.models.config import DecoderConfig, parse_config
from gapless.models.decoder import Decoder
from gapless.models.gguf_file import GGUFFile, GGUFTensor
from gapless.models.weights import Progress

_TOP_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP = re.compile(r"(\w+)\.(weight|bias)")
_DIVISORS = "rope_freqs.weight"

_CONFIG_KEYS: Mapping[str, str] = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
_READ_KEYS = frozenset(
    {
        *_CONFIG_KEYS,
        "attention.value_length",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "vocab_size",
    }
)
_HARMLESS_KEYS = frozenset({"rope.scaling.finetuned"})


def gguf_decoder_config(file: GGUFFile) -> DecoderConfig:
    """The decoder's numbers from metadata and tensor list. Raises ``ModelError`` naming file and key."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ("llama", "qwen2", "qwen3"):
        raise ModelError(
            f"{file.path}: GGUF architecture {architecture!r} is not implemented; llama, qwen2 and qwen3 are"
        )
    keys = {
        key.removeprefix(f"{architecture}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{architecture}.")
    }
    for key, value in keys.items():
        if key not in _READ_KEYS | _HARMLESS_KEYS and value not in (0, False, ""):
            raise ModelError(
                f"{file.path}: metadata key '{architecture}.{key}'={value!r} is refused because it may "
                f"change the result: not implemented"
            )
    config = parse_config(_raw_config(file, str(architecture), keys), source=str(file.path))
    if keys.get("attention.value_length", config.head_size) != config.head_size:
        raise ModelError(f"{file.path}: value heads of another size than key heads are not implemented")
    if keys.get("rope.dimension_count", config.head_size) != config.head_size:
        raise ModelError(f"{file.path}: rotary embedding of a part of each head is not implemented")
    if _DIVISORS in file.tensors:
        divisors = read_tensor(file, file.tensors[_DIVISORS]).flatten().tolist()
        config = replace(config, rope=replace(config.rope, divisors=tuple(divisors)))
    return config


def load_gguf(model: Decoder, file: GGUFFile, *, progress: Progress | None = None) -> None:
    """Fill ``model`` from ``file``. Raises ``ModelError`` naming a missing, surplus or damaged tensor."""
    missing = model.weight_targets()
    is_interleaved = file.metadata.get("general.architecture") == "llama"
    for done, tensor in enumerate(file.tensors.values(), start=1):
        if tensor.name == _DIVISORS:
            continue
        name = _checkpoint_name(tensor.name)
        target = missing.pop(name, None) if name else None
        if name is None or target is None:
            raise ModelError(
                f"{file.path}: tensor '{tensor.name}' has no place in a {model.info.architecture}"
            )
        value = read_tensor(file, tensor)
        if is_interleaved and ".self_attn.q_proj." in name:
            value = _deinterleaved(value, model.info.num_heads)
        elif is_interleaved and ".self_attn.k_proj." in name:
            value = _deinterleaved(value, model.info.num_kv_heads)
        target.load(tensor.name, value, source=str(file.path))
        if progress is not None:
            progress("weights", done, len(file.tensors))
    if missing:
        names_text = ", ".join(list(missing)[:3]) + (" …" if len(missing) > 3 else "")
        raise ModelError(f"{file.path}: {len(missing)} tensors are missing: {names_text}")


def read_tensor(file: GGUFFile, tensor: GGUFTensor) -> Tensor:
    """The values of one tensor: float32, or as stored where torch knows the type. Raises ``ModelError``."""
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise ModelError(f"{file.path}: reading GGUF files needs a package: pip install gguf") from error
    where = f"{file.path}: tensor '{tensor.name}'"
    try:
        kind = GGMLQuantizationType(tensor.quantization)
    except ValueError as error:
        raise ModelError(f"{where} has the unknown quantisation {tensor.quantization}") from error
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    row, num_rows = tensor.shape[-1], math.prod(tensor.shape[:-1])
    if row % block_size:
        raise ModelError(f"{where}: rows of {row} do not divide into {kind.name} blocks of {block_size}")
    raw = file.data(tensor, num_rows * (row // block_size) * block_bytes)
    stored = {
        GGMLQuantizationType.F32: torch.float32,
        GGMLQuantizationType.F16: torch.float16,
        GGMLQuantizationType.BF16: torch.bfloat16,
    }.get(kind)
    if stored is not None:
        return torch.from_numpy(raw).view(stored).reshape(tensor.shape)
    try:
        # The package works on 16 rows at a time; with 16 of ours in each of its rows it takes half the time.
        per_row = math.gcd(num_rows, 16)
        return torch.from_numpy(dequantize(raw.reshape(num_rows // per_row, -1), kind)).reshape(tensor.shape)
    except NotImplementedError as error:
        raise ModelError(
            f"{where}: quantisation {kind.name} cannot be expanded by the gguf package"
        ) from error


def _raw_config(file: GGUFFile, architecture: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: tensor 'token_embd.weight' is missing")
    raw: dict[str, Any] = {"model_type": architecture, "vocab_size": embedding.shape[0]}
    raw |= {name: keys[key] for key, name in _CONFIG_KEYS.items() if key in keys}
    raw["tie_word_embeddings"] = "output.weight" not in file.tensors
    if architecture == "qwen3" and "head_dim" not in raw:
        raise ModelError(f"{file.path}: metadata key 'qwen3.attention.key_length' is missing")
    if architecture != "qwen2":
        raw["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    scaling = keys.get("rope.scaling.type", "none")
    if scaling != "none":
        raw["rope_scaling"] = {
            "rope_type": scaling,
            "factor": keys.get("rope.scaling.factor"),
            "original_max_position_embeddings": keys.get("rope.scaling.original_context_length"),
        }
    token_keys = ("eos_token_id", "eot_token_id")
    ids = [file.metadata.get(f"tokenizer.ggml.{key}") for key in token_keys]
    raw["eos_token_id"] = list(dict.fromkeys(i for i in ids if i is not None))
    return raw


def _checkpoint_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None."""
    block = _BLOCK.fullmatch(name)
    if block is not None:
        index, part, kind = block.groups()
        return f"model.layers.{index}.{_BLOCK_NAMES[part]}.{kind}" if part in _BLOCK_NAMES else None
    top = _TOP.fullmatch(name)
    return f"{_TOP_NAMES[top[1]]}.{top[2]}" if top is not None and top[1] in _TOP_NAMES else None


def _deinterleaved(value: Tensor, num_heads: int) -> Tensor:
    """Rows (2i, 2i+1) of each head back to (i, i + D/2): the pairing of Hugging Face checkpoints."""
    pairs = value.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).reshape(value.shape)

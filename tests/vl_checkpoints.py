"""Helper of the vision-language tests: tiny random Qwen2.5-VL and Qwen3-VL folders, and their model.

Every parameter is random, so a tensor that a loader drops shows. A patch is 4 by 4 pixels and a token 8 by 8,
so images of a few dozen pixels have a few dozen tokens. Qwen2.5-VL has windowed and full vision layers,
Qwen3-VL two deepstack layers. The tokenizer is bytes plus the families' special tokens.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
"""``qwen3_vl_moe`` exists too: Qwen3-VL with experts in the text model."""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
SPECIAL_IDS = {token: 256 + index for index, token in enumerate(SPECIAL_TOKENS)}
IMAGE_ID, VIDEO_ID = SPECIAL_IDS["<|image_pad|>"], SPECIAL_IDS["<|video_pad|>"]
VISION_START, VISION_END = SPECIAL_IDS["<|vision_start|>"], SPECIAL_IDS["<|vision_end|>"]
VOCAB_SIZE = 272

IMAGE_PROMPT = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO_PROMPT = "<|vision_start|><|video_pad|><|vision_end|>"

_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "eos_token_id": SPECIAL_IDS["<|im_end|>"],
    "bos_token_id": SPECIAL_IDS["<|endoftext|>"],
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "depth": 4,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
_WINDOWS = {"window_size": 16, "fullatt_block_indexes": [1, 3]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_TOKEN_IDS = {
    "image_token_id": IMAGE_ID,
    "video_token_id": VIDEO_ID,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_ROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [4, 2, 2]}

PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 8 * 8, "longest_edge": 64 * 64},
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
}
_VIDEO_SIZES = {
    "qwen2_5_vl": {"shortest_edge": 8 * 8, "longest_edge": 32 * 32},
    "qwen3_vl": {"shortest_edge": 2 * 8 * 8, "longest_edge": 4 * 32 * 32},
    "qwen3_vl_moe": {"shortest_edge": 2 * 8 * 8, "longest_edge": 4 * 32 * 32},
}


def vl_config(family: str, **text_overrides: object) -> Qwen2_5_VLConfig | Qwen3VLConfig | Qwen3VLMoeConfig:
    """The config of a tiny model of ``family``; ``text_overrides`` replace keys of its text config."""
    if family == "qwen2_5_vl":
        return Qwen2_5_VLConfig(
            text_config={**_TEXT, "rope_parameters": _ROPE, "use_sliding_window": False, **text_overrides},
            vision_config={
                **_VISION,
                "window_size": 16,
                "fullatt_block_indexes": [1, 3],
                "tokens_per_second": 2,
            },
            tie_word_embeddings=False,
            architectures=["Qwen2_5_VLForConditionalGeneration"],
            **_TOKEN_IDS,
        )
    text = {**_TEXT, "head_dim": 16, "rope_parameters": {**_ROPE, "mrope_interleaved": True}}
    config_class: type[Qwen3VLConfig | Qwen3VLMoeConfig] = Qwen3VLConfig
    if family == "qwen3_vl_moe":
        config_class, text = Qwen3VLMoeConfig, {**text, **_EXPERTS}
    name = config_class.__name__.removesuffix("Config")
    return config_class(
        text_config={**text, **text_overrides},
        vision_config={**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]},
        tie_word_embeddings=False,
        architectures=[f"{name}ForConditionalGeneration"],
        **_TOKEN_IDS,
    )


@functools.cache
def vl_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A float32 model in evaluation mode; made once, so do not change it."""
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(vl_config(family), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5)
            elif name.endswith(".bias"):
                parameter.normal_(0.0, 0.3)
            else:
                parameter.uniform_(0.5, 1.5)
    return model


def write_vl_folder(
    folder: Path, family: str, *, seed: int = 0, has_weights: bool = True, has_tokenizer: bool = True
) -> Path:
    """A Hugging Face folder of ``vl_model(family, seed)``, as Transformers saves it, with processor configs
    and no chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    if has_weights:
        vl_model(family, seed).save_pretrained(folder)
        if family == "qwen3_vl_moe":
            _publish_experts(folder / "model.safetensors")
    else:
        vl_config(family).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    video = {**PREPROCESSOR, "size": _VIDEO_SIZES[family]}
    del video["image_processor_type"]
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    if has_tokenizer:
        write_vl_tokenizer(folder)
    return folder


def _publish_experts(path: Path) -> None:
    """Published folders hold stacked experts with input features first."""
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def write_vl_tokenizer(folder: Path) -> None:
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(characters)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def random_image(width: int, height: int, *, seed: int = 0) -> Image.Image:
    return Image.fromarray(random_frames(1, width, height, seed=seed)[0])


def random_frames(num_frames: int, width: int, height: int, *, seed: int = 0) -> np.ndarray:
    """``[frames, height, width, 3]`` uint8."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)

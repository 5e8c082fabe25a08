"""Configs of vision-language folders: published and saved layouts are read, the rest is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from gapless.errors import ModelError
from gapless.models.config import DecoderConfig, parse_config
from gapless.models.vl_config import read_vl_config
from vl_checkpoints import FAMILIES, vl_config

QWEN2_5_VL_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}
QWEN3_VL_8B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "use_cache": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 151656,
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4304,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}


def parse(raw: dict[str, Any], *changes: tuple[str, Any]) -> DecoderConfig:
    """``raw`` with some keys set; a dot leads into a nested object, None deletes."""
    changed = copy.deepcopy(raw)
    for path, value in changes:
        *outer, key = path.split(".")
        place = changed
        for name in outer:
            place = place[name]
        place[key] = value
        if value is None:
            del place[key]
    return parse_config(changed, source="test")


def test_the_published_flat_config_is_read() -> None:
    config = parse(QWEN2_5_VL_7B)
    assert (config.architecture, config.model_type) == ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl")
    assert (config.num_layers, config.hidden_size, config.num_kv_heads) == (28, 3584, 4)
    assert config.qkv_bias
    assert not config.qk_norm
    assert (config.rope.rope_type, config.rope.theta) == ("default", 1e6)
    assert (config.rope.axis_sections, config.rope.axis_layout) == ((16, 24, 24), "chunked")
    assert (config.image_token_id, config.video_token_id, config.num_deepstack) == (151655, 151656, 0)
    assert (config.dtype_name, config.eos_token_ids) == ("bfloat16", (151645,))
    assert set(config.windows) == {None}


def test_the_published_nested_config_is_read() -> None:
    config = parse(QWEN3_VL_8B)
    assert config.qk_norm
    assert (config.rope.theta, config.max_model_len) == (5e6, 262144)
    assert (config.rope.axis_sections, config.rope.axis_layout) == ((24, 20, 20), "interleaved")
    assert (config.num_deepstack, config.dtype_name) == (3, "bfloat16")
    assert not config.tie_word_embeddings


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_vl_moe"])
def test_what_transformers_saves_is_read(family: str, tmp_path: Path) -> None:
    vl_config(family).save_pretrained(tmp_path)
    config = parse_config(json.loads((tmp_path / "config.json").read_text()), source="test")
    assert (config.model_type, config.num_layers, config.head_size) == (family, 2, 16)
    assert config.rope.axis_sections == (4, 2, 2)
    assert config.rope.theta == 1000.0
    assert (config.experts is not None) == (family == "qwen3_vl_moe")


def test_nested_and_flat_layouts_mean_the_same() -> None:
    own = (
        "vision_config",
        "vision_start_token_id",
        "vision_end_token_id",
        "image_token_id",
        "video_token_id",
    )
    outer = ("architectures", "model_type", "transformers_version", "vision_token_id", *own)
    text = {key: value for key, value in QWEN2_5_VL_7B.items() if key not in outer}
    nested = {key: QWEN2_5_VL_7B[key] for key in outer}
    assert parse({**nested, "text_config": {**text, "model_type": "qwen2_5_vl_text"}}) == parse(QWEN2_5_VL_7B)
    # Transformers 4.5x left the text keys outside, too, and copies of the tokens inside.
    both = {**QWEN2_5_VL_7B, "text_config": {**text, "image_token_id": None, "vision_token_id": 151654}}
    assert parse(both) == parse(QWEN2_5_VL_7B)


@pytest.mark.parametrize(
    ("raw", "changes", "is_tied"),
    [
        (QWEN2_5_VL_7B, [("tie_word_embeddings", True)], True),
        (QWEN2_5_VL_7B, [("tie_word_embeddings", None)], False),
        (QWEN3_VL_8B, [("tie_word_embeddings", True)], True),
        (QWEN3_VL_8B, [("text_config.tie_word_embeddings", True)], False),
        (QWEN3_VL_8B, [("tie_word_embeddings", None)], False),
    ],
)
def test_the_outer_config_says_whether_the_head_is_tied(raw: dict, changes: list, is_tied: bool) -> None:
    assert parse(raw, *changes).tie_word_embeddings == is_tied


def test_defaults_of_transformers_fill_in_what_is_missing() -> None:
    missing = [(f"text_config.{key}", None) for key in ("rope_scaling", "rope_theta", "rms_norm_eps")]
    config = parse(QWEN3_VL_8B, *missing, ("video_token_id", None))
    assert (config.rope.theta, config.rope.axis_sections) == (500000.0, (24, 20, 20))
    assert config.video_token_id == 151656
    flat = parse(
        QWEN2_5_VL_7B,
        ("rms_norm_eps", None),
        ("num_key_value_heads", None),
        ("rope_theta", None),
        ("num_attention_heads", 32),
        ("hidden_size", 4096),
        ("vision_config.out_hidden_size", 4096),
    )
    assert (flat.rms_norm_eps, flat.rope.theta, flat.num_kv_heads) == (1e-5, 1e6, 8)


def test_extended_rotation_keeps_its_axes() -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32768}
    scaling = {**yarn, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    config = parse(QWEN3_VL_8B, ("text_config.rope_scaling", scaling))
    assert (config.rope.rope_type, config.rope.factor) == ("yarn", 2.0)
    assert config.rope.axis_sections == (24, 20, 20)


@pytest.mark.parametrize(
    ("raw", "change", "said"),
    [
        (QWEN2_5_VL_7B, ("vision_config", None), "'vision_config' is missing"),
        (QWEN2_5_VL_7B, ("vision_config", 3), "'vision_config'=3"),
        (QWEN2_5_VL_7B, ("architectures", ["Qwen2VLForConditionalGeneration"]), "Qwen2VLFor"),
        (QWEN2_5_VL_7B, ("rope_scaling.mrope_section", [16, 24]), "mrope_section"),
        (QWEN2_5_VL_7B, ("rope_scaling.mrope_section", [16, 24, 23]), "64 frequencies"),
        (QWEN2_5_VL_7B, ("rope_scaling.mrope_section", [64, 0, 0]), "mrope_section"),
        (QWEN2_5_VL_7B, ("rope_scaling.mrope_interleaved", True), "mrope_interleaved"),
        (QWEN2_5_VL_7B, ("rope_scaling.beta", 2), "beta"),
        (QWEN2_5_VL_7B, ("image_token_id", -1), "image_token_id"),
        (QWEN2_5_VL_7B, ("image_token_id", 151656), "different tokens"),
        (QWEN2_5_VL_7B, ("image_token_id", 152064), "outside vocab_size"),
        (QWEN2_5_VL_7B, ("new_key", 1), "'new_key'"),
        (QWEN2_5_VL_7B, ("quantization_config", {"bits": 4}), "quantised"),
        (QWEN2_5_VL_7B, ("vision_config.in_chans", 4), "in_chans"),
        (QWEN2_5_VL_7B, ("vision_config.in_channels", 1), "in_channels"),
        (QWEN2_5_VL_7B, ("vision_config.spatial_patch_size", 16), "spatial_patch_size"),
        (QWEN2_5_VL_7B, ("vision_config.out_hidden_size", 2048), "out_hidden_size=2048"),
        (QWEN2_5_VL_7B, ("vision_config.new_key", 1), "vision_config: config key 'new_key'"),
        (QWEN2_5_VL_7B, ("vision_config.deepstack_visual_indexes", [1]), "deepstack"),
        (QWEN2_5_VL_7B, ("vision_config.patch_size", 0), "patch_size"),
        (QWEN3_VL_8B, ("text_config", None), "'text_config' is missing"),
        (QWEN3_VL_8B, ("text_config.rope_scaling.mrope_interleaved", False), "mrope_interleaved"),
        (QWEN3_VL_8B, ("text_config.rope_scaling.mrope_section", [4, 30, 30]), "64 frequencies"),
        (QWEN3_VL_8B, ("text_config.new_key", 1), "'new_key'"),
        (QWEN3_VL_8B, ("text_config.num_experts", 8), "num_experts"),
        (QWEN3_VL_8B, ("new_key", 1), "'new_key'"),
        (QWEN3_VL_8B, ("quantization_config", {"bits": 4}), "quantised"),
        (QWEN3_VL_8B, ("text_config.num_hidden_layers", 2), "3 entries, the text"),
        (QWEN3_VL_8B, ("vision_config.deepstack_visual_indexes", 3), "=3 must be a list of different layers"),
        (QWEN3_VL_8B, ("vision_config.deepstack_visual_indexes", [8, 8]), "different layers"),
        (QWEN3_VL_8B, ("vision_config.deepstack_visual_indexes", [8, 27]), "from 0 to 26"),
        (QWEN3_VL_8B, ("vision_config.deepstack_visual_indexes", [-1]), "from 0 to 26"),
        (QWEN3_VL_8B, ("vision_config.window_size", 112), "window_size"),
    ],
)
def test_what_would_change_the_result_is_refused(raw: dict, change: tuple, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        parse(raw, change)


def test_a_plain_model_has_one_axis_and_no_media() -> None:
    text = {**QWEN3_VL_8B["text_config"], "model_type": "qwen3"}
    plain = parse_config({**text, "rope_scaling": None}, source="test")
    assert plain.rope.axis_sections is None
    assert plain.image_token_id is None
    with pytest.raises(ModelError, match="mrope_"):
        parse_config(text, source="test")


def test_the_processor_sees_sizes_and_marks() -> None:
    flat, nested = (read_vl_config(raw, source="test") for raw in (QWEN2_5_VL_7B, QWEN3_VL_8B))
    assert (flat.patch_size, flat.merge_size, flat.temporal_patch_size, flat.tokens_per_second) == (
        14,
        2,
        2,
        2,
    )
    assert (nested.patch_size, nested.vision_start_token_id, nested.vision_end_token_id) == (
        16,
        151652,
        151653,
    )
    assert (flat.has_timestamps, nested.has_timestamps) == (False, True)

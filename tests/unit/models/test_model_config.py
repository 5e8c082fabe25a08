"""What a ``config.json`` may hold: real ones are accepted with the right numbers, the rest is refused by
name."""

from __future__ import annotations

import pytest

from gapless.errors import ModelError
from gapless.models.config import parse_config, token_ids

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL_7B_V01 = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
VICUNA_7B = {
    "_name_or_path": "vicuna-7b-v1.5",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 0,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "temperature": 0.9,
    "tie_word_embeddings": False,
    "top_p": 0.6,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0",
    "use_cache": True,
    "vocab_size": 32000,
}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(
            LLAMA_31_8B,
            {"head_size": 128, "eos_token_ids": (128001, 128008, 128009), "max_model_len": 131072},
            id="llama-3.1",
        ),
        pytest.param(SMOLLM2_135M, {"head_size": 64, "num_kv_heads": 3, "qkv_bias": False}, id="smollm2"),
        pytest.param(
            QWEN25_05B,
            {"head_size": 64, "qkv_bias": True, "o_bias": False, "windows": (None,) * 24},
            id="qwen2.5",
        ),
        pytest.param(QWEN3_06B, {"head_size": 128, "qk_norm": True, "qkv_bias": False}, id="qwen3"),
        pytest.param(MISTRAL_7B_V01, {"windows": (4096,) * 32, "eos_token_ids": (2,)}, id="mistral"),
        pytest.param(VICUNA_7B, {"dtype_name": "float16", "max_model_len": 4096}, id="llama-2"),
    ],
)
def test_published_configs_are_accepted(raw: dict, expected: dict) -> None:
    config = parse_config(raw, source="test")
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.hidden_size == raw["hidden_size"]
    assert config.rope.theta == raw.get("rope_theta", 10000.0)
    assert config.tie_word_embeddings == raw["tie_word_embeddings"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "fp8"}),
        ("compression_config", {"format": "int-quantized"}),
        ("auto_map", {"AutoModelForCausalLM": "modeling.Model"}),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("num_local_experts", 8),
        ("num_experts", 64),
        ("num_experts_per_tok", 2),
        ("attention_sinks", True),
        ("logit_scale", 0.5),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.2),
        ("attention_multiplier", 0.1),
        ("logits_scaling", 8.0),
        ("no_rope_layers", [1, 0, 1, 0]),
        ("query_pre_attn_scalar", 256),
        ("use_qk_norm", True),
        ("kv_lora_rank", 512),
        ("vision_config", {"depth": 4}),
        ("chunk_size_feed_forward", 1),
        ("is_encoder_decoder", True),
        ("never_heard_of", 0),
        ("original_max_position_embeddings", 4096),
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_keys_that_would_change_the_result_are_refused_by_name(
    model_type: str, key: str, value: object
) -> None:
    with pytest.raises(ModelError, match=rf"test: config key '{key}'="):
        parse_config(_config(model_type, **{key: value}), source="test")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("never_heard_of", None),
        ("never_heard_of", False),
        ("never_heard_of", {}),
        ("quantization_config", None),
        ("use_mrope", False),
        ("partial_rotary_factor", 1.0),
        ("attention_dropout", 0.1),
        ("pretraining_tp", 4),
        ("temperature", 0.6),
        ("pad_token_id", -1),
        ("max_window_layers", 28),
        ("_name_or_path", "anything"),
    ],
)
def test_keys_that_cannot_change_the_result_are_accepted(key: str, value: object) -> None:
    assert parse_config({**BASE, key: value}, source="test") == parse_config(BASE, source="test")


@pytest.mark.parametrize(
    ("model_type", "key"),
    [
        ("mistral", "attention_bias"),
        ("mistral", "mlp_bias"),
        ("qwen2", "attention_bias"),
        ("qwen2", "mlp_bias"),
        ("qwen3", "mlp_bias"),
        ("mistral", "use_sliding_window"),
        ("mistral", "layer_types"),
        ("llama", "layer_types"),
        ("llama", "sliding_window"),
    ],
)
def test_a_key_of_another_family_is_refused(model_type: str, key: str) -> None:
    value: object = ["sliding_attention"] * 4 if key == "layer_types" else True
    with pytest.raises(ModelError, match=key):
        parse_config(_config(model_type, **{key: value}), source="test")


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        {"model_type": "dbrx", "architectures": ["DbrxForCausalLM"]},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"model_type": "qwen2"},
        {"model_type": None, "architectures": None},
        {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"]},
    ],
)
def test_unknown_architectures_are_refused_with_the_known_ones(changes: dict) -> None:
    with pytest.raises(ModelError, match="LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3For"):
        parse_config({**BASE, **changes}, source="test")


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_a_base_model_makes_embeddings_only_and_has_no_head_of_its_own(model_type: str) -> None:
    architecture = ARCHITECTURES[model_type]
    base = _config(model_type, architectures=[architecture.replace("ForCausalLM", "Model")])
    config = parse_config({**base, "tie_word_embeddings": False}, source="test")
    assert (config.is_pooling, config.tie_word_embeddings) == (True, True)
    assert config.architecture == architecture
    for named in ([architecture], None):
        assert not parse_config({**base, "architectures": named}, source="test").is_pooling


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", -64),
        ("hidden_size", 64.0),
        ("hidden_size", True),
        ("hidden_size", 60),
        ("num_hidden_layers", "4"),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 16),
        ("head_dim", 7),
        ("head_dim", 0),
        ("vocab_size", 0),
        ("intermediate_size", None),
        ("max_position_embeddings", 0),
        ("hidden_act", "gelu"),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", "small"),
        ("attention_bias", 1),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", -1),
        ("eos_token_id", [2, "3"]),
        ("eos_token_id", 2.0),
    ],
)
def test_impossible_values_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=key):
        parse_config({**BASE, key: value}, source="test")


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"],
)
def test_missing_sizes_are_refused_by_name(key: str) -> None:
    raw = {name: value for name, value in BASE.items() if name != key}
    with pytest.raises(ModelError, match=f"'{key}' is missing"):
        parse_config(raw, source="test")


@pytest.mark.parametrize(
    ("model_type", "missing", "expected"),
    [
        ("llama", "num_key_value_heads", {"num_kv_heads": 8}),
        ("llama", "max_position_embeddings", {"max_model_len": 2048}),
        ("llama", "rms_norm_eps", {"rms_norm_eps": 1e-6}),
        ("llama", "torch_dtype", {"dtype_name": None}),
        ("llama", "architectures", {"architecture": "LlamaForCausalLM"}),
        ("mistral", "num_key_value_heads", {"num_kv_heads": 8}),
        ("mistral", "sliding_window", {"windows": (4096,) * 4}),
        ("qwen3", "head_dim", {"head_size": 128}),
        ("qwen2", "head_dim", {"head_size": 8}),
    ],
)
def test_missing_keys_take_transformers_defaults(model_type: str, missing: str, expected: dict) -> None:
    raw = _config(model_type)
    raw.pop(missing, None)
    config = parse_config(raw, source="test")
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": True, "max_window_layers": 2}, (None, None, 9, 9)),
        ({"use_sliding_window": True, "max_window_layers": 0}, (9, 9, 9, 9)),
        ({"use_sliding_window": True, "max_window_layers": 28}, (None,) * 4),
        ({"use_sliding_window": False, "max_window_layers": 0}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None,) * 4),
        (
            {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2},
            (None, 9, None, 9),
        ),
        ({"use_sliding_window": False, "layer_types": ["full_attention"] * 4}, (None,) * 4),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_windows_per_layer_follow_transformers(model_type: str, changes: dict, windows: tuple) -> None:
    config = parse_config(_config(model_type, **{"sliding_window": 9, **changes}), source="test")
    assert config.windows == windows


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 4, "use_sliding_window": True}, "chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 4, "use_sliding_window": False}, "use_sliding_window"),
        ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
        ({"use_sliding_window": "true"}, "use_sliding_window"),
    ],
)
def test_impossible_windows_are_refused_by_name(changes: dict, names: str) -> None:
    with pytest.raises(ModelError, match=names):
        parse_config(_config("qwen2", **{"sliding_window": 9, **changes}), source="test")


def test_yarn_stretches_the_model_length() -> None:
    raw = {
        **QWEN3_06B,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    }
    assert parse_config(raw, source="test").max_model_len == 131072


@pytest.mark.parametrize(
    ("value", "ids"), [(None, ()), (0, (0,)), (7, (7,)), ([], ()), ([3, 1], (3, 1)), ((5,), (5,))]
)
def test_eos_entries_become_a_tuple(value: object, ids: tuple[int, ...]) -> None:
    assert token_ids(value, source="test") == ids


def _config(model_type: str, **changes: object) -> dict:
    return {
        **BASE,
        "model_type": model_type,
        "architectures": [ARCHITECTURES[model_type]],
        **changes,
    }

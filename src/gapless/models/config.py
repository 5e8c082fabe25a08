"""From a raw ``config.json`` to the numbers the decoder is built from, or a refusal that names the key.

Every key of the raw config is either *read*, known to be *harmless* (training, bookkeeping, generation
defaults), known to be harmless at one value only, or refused: a key that would change the logits must never
be ignored. Defaults for missing keys are those of Transformers' config classes. Read ``rope.py`` for the
rotary part and ``decoder.py`` for use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gapless.errors import ModelError
from gapless.models.moe_config import MOE_DEFAULTS, MOE_HARMLESS, MOE_READS, ExpertConfig, parse_experts
from gapless.models.rope import RopeConfig, parse_rope
from gapless.models.vl_config import (
    VISION_LANGUAGE_ARCHITECTURES,
    VisionLanguageConfig,
    is_vision_language,
    read_vl_config,
)

RawConfig = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """All that decides the function a decoder computes. ``windows``: a sliding window or None per layer."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    num_deepstack: int = 0
    """Layers behind which features of a vision tower are added (Qwen3-VL)."""
    image_token_id: int | None = None
    video_token_id: int | None = None
    experts: ExpertConfig | None = None
    """None: every layer is dense."""
    is_pooling: bool = False
    """The checkpoint is a base model: it ends in hidden states, and text cannot be drawn from them."""
    dtype_name: str | None = None
    """What the config says the weights are stored in, for example ``bfloat16``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """What a model type reads beyond the common keys, and Transformers' defaults for missing ones."""

    architecture: str
    defaults: Mapping[str, Any]
    reads: frozenset[str]
    fixed_qkv_bias: bool | None = None
    """The q/k/v bias where the family fixes it; None: ``attention_bias`` decides for q, k, v and o."""
    qk_norm: bool = False

    @property
    def base_architecture(self) -> str:
        """The same layers without a head, as Transformers names them."""
        return self.architecture.replace("ForCausalLM", "Model")


_WINDOW_KEYS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
_QWEN_DEFAULTS = {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(
        architecture="LlamaForCausalLM",
        defaults={"max_position_embeddings": 2048},
        reads=frozenset({"attention_bias", "mlp_bias"}),
    ),
    "mistral": _Family(
        architecture="MistralForCausalLM",
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        reads=frozenset({"sliding_window"}),
        fixed_qkv_bias=False,
    ),
    "qwen2": _Family(
        architecture="Qwen2ForCausalLM",
        defaults={**_QWEN_DEFAULTS, "num_key_value_heads": 32},
        reads=_WINDOW_KEYS,
        fixed_qkv_bias=True,
    ),
    "qwen3": _Family(
        architecture="Qwen3ForCausalLM",
        defaults={**_QWEN_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
        reads=_WINDOW_KEYS | {"attention_bias"},
        qk_norm=True,
    ),
    "mixtral": _Family(
        architecture="MixtralForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            **MOE_DEFAULTS["mixtral"],
        },
        reads=frozenset({"sliding_window"}) | MOE_READS["mixtral"] | MOE_HARMLESS,
        fixed_qkv_bias=False,
    ),
    "qwen2_moe": _Family(
        architecture="Qwen2MoeForCausalLM",
        defaults={**_QWEN_DEFAULTS, "num_key_value_heads": 16, "qkv_bias": True, **MOE_DEFAULTS["qwen2_moe"]},
        reads=_WINDOW_KEYS | {"qkv_bias"} | MOE_READS["qwen2_moe"] | MOE_HARMLESS,
    ),
    "qwen3_moe": _Family(
        architecture="Qwen3MoeForCausalLM",
        defaults={**_QWEN_DEFAULTS, "num_key_value_heads": 4, **MOE_DEFAULTS["qwen3_moe"]},
        reads=_WINDOW_KEYS - {"layer_types"} | {"attention_bias"} | MOE_READS["qwen3_moe"] | MOE_HARMLESS,
        qk_norm=True,
    ),
    # The text part of a Qwen3-VL-MoE; no folder has this type on the outer level.
    "qwen3_vl_moe_text": _Family(
        architecture="Qwen3VLMoeForConditionalGeneration",
        defaults={**_QWEN_DEFAULTS, **MOE_DEFAULTS["qwen3_vl_moe_text"]},
        reads=frozenset({"attention_bias"}) | MOE_READS["qwen3_vl_moe_text"] | MOE_HARMLESS,
        qk_norm=True,
    ),
}

SUPPORTED_ARCHITECTURES = tuple(
    dict.fromkeys((*(family.architecture for family in _FAMILIES.values()), *VISION_LANGUAGE_ARCHITECTURES))
)


def _keys(*lines: str) -> frozenset[str]:
    return frozenset(key for line in lines for key in line.split())


_COMMON_READS = _keys(
    "architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers",
    "num_attention_heads num_key_value_heads head_dim rms_norm_eps tie_word_embeddings",
    "max_position_embeddings hidden_act eos_token_id torch_dtype dtype",
    "rope_theta rope_scaling rope_parameters",
)

_HARMLESS = _keys(
    # Bookkeeping and training.
    "_name_or_path name_or_path transformers_version _commit_hash transformers.js_config tokenizer_class",
    "bos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id is_llama_config",
    "unsloth_fixed unsloth_version finetuning_task task_specific_params problem_type prefix",
    "initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop gradient_checkpointing",
    "id2label label2id num_labels use_bfloat16 tf_legacy_loss torchscript",
    # How another runtime should run or answer.
    "use_cache return_dict return_dict_in_generate output_attentions output_hidden_states output_scores",
    "attn_implementation _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled",
    # Slices the same matrix products; Transformers 5 no longer looks at it.
    "pretraining_tp",
    # Generation defaults some old configs carry; the request's own parameters decide.
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty",
    "temperature top_k top_p typical_p repetition_penalty length_penalty num_return_sequences",
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids remove_invalid_values",
    "forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty suppress_tokens",
    "begin_suppress_tokens",
    # Means something only together with a sliding window, or to nobody.
    "max_window_layers max_sequence_length seq_length",
)

_HARMLESS_AT: Mapping[str, tuple[Any, ...]] = {
    "rope_interleaved": (False,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "partial_rotary_factor": (1, 1.0),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_encoder_decoder": (False,),
}

_REASONS: Mapping[str, str] = {
    "quantization_config": "quantised checkpoints are not implemented; use an unquantised one",
    "compression_config": "quantised checkpoints are not implemented; use an unquantised one",
    "auto_map": "it names code inside the model folder, which is never run",
    "partial_rotary_factor": "rotary embedding of a part of each head is not implemented",
    "attn_logit_softcapping": "soft-capping of attention scores is not implemented",
    "final_logit_softcapping": "soft-capping of logits is not implemented",
    "num_experts": "mixture-of-experts layers are not implemented for this architecture",
    "num_local_experts": "mixture-of-experts layers are not implemented for this architecture",
}


def parse_config(raw: RawConfig, *, source: str) -> DecoderConfig:
    """Check ``raw`` and return the decoder's numbers. Raises ``ModelError`` naming ``source`` and the key."""
    if is_vision_language(raw):
        media = read_vl_config(raw, source=source)
        text_family = _FAMILIES[media.text["model_type"]]
        _refuse_unknown_keys(media.outer, text_family, source)
        _refuse_unknown_keys(
            media.vision, replace(text_family, reads=media.vision_keys), f"{source}: vision_config"
        )
        return _with_media(parse_config(media.text, source=source), media, source)
    model_type = str(raw.get("model_type", ""))
    family = _family(raw, model_type, source)
    reader = _Reader(raw, family.defaults, source)
    hidden_size = reader.size("hidden_size")
    num_layers = reader.size("num_hidden_layers")
    num_heads = reader.size("num_attention_heads")
    num_kv_heads = reader.size("num_key_value_heads", default=num_heads)
    max_positions = reader.size("max_position_embeddings")
    if reader.get("head_dim") is None and hidden_size % num_heads:
        raise reader.error("hidden_size", f"must be a multiple of num_attention_heads={num_heads}")
    head_size = reader.size("head_dim", default=hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"must divide num_attention_heads={num_heads}")
    if head_size % 2:
        raise reader.error("head_dim", f"rotary embedding needs an even head size, this is {head_size}")
    if reader.get("hidden_act", "silu") not in ("silu", "swish"):
        raise reader.error("hidden_act", "only silu is implemented")
    rope = parse_rope(
        _with_theta(raw, family), head_size=head_size, max_position_embeddings=max_positions, source=source
    )
    windows = _windows(reader, model_type, num_layers)
    _refuse_unknown_keys(raw, family, source)
    attention_bias = reader.flag("attention_bias")
    is_pooling = family.architecture not in (raw.get("architectures") or [family.architecture])
    return DecoderConfig(
        architecture=family.architecture,
        model_type=model_type,
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rms_norm_eps=reader.positive("rms_norm_eps", default=1e-6),
        rope=rope,
        windows=windows,
        qkv_bias=_qkv_bias(reader, family, attention_bias=attention_bias),
        o_bias=attention_bias,
        mlp_bias=reader.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        tie_word_embeddings=is_pooling or reader.flag("tie_word_embeddings"),
        max_model_len=max(max_positions, rope.trained_positions),
        eos_token_ids=token_ids(raw.get("eos_token_id"), source=source),
        experts=parse_experts(reader, model_type, num_layers=num_layers),
        is_pooling=is_pooling,
        dtype_name=_dtype_name(raw),
    )


def _with_media(text: DecoderConfig, media: VisionLanguageConfig, source: str) -> DecoderConfig:
    """The decoder of a vision-language model: its text model, which takes rows and positions of media."""
    sections, num_frequencies = media.axis_sections, text.head_size // 2
    ends = [axis + 3 * (sections[axis] - 1) for axis in (1, 2)]
    if sum(sections) != num_frequencies or (
        media.axis_layout == "interleaved" and max(ends) >= num_frequencies
    ):
        raise ModelError(
            f"{source}: mrope_section={list(sections)} does not fit head_dim={text.head_size}, which has "
            f"{num_frequencies} frequencies"
        )
    if media.num_deepstack > text.num_layers:
        raise ModelError(
            f"{source}: vision_config.deepstack_visual_indexes has {media.num_deepstack} entries, the text "
            f"model only {text.num_layers} layers"
        )
    if media.vision.get("out_hidden_size") not in (None, text.hidden_size):
        raise ModelError(
            f"{source}: vision_config.out_hidden_size={media.vision['out_hidden_size']!r} must be the text "
            f"model's hidden_size={text.hidden_size}"
        )
    last_id = max(media.image_token_id, media.video_token_id)
    if last_id >= text.vocab_size:
        raise ModelError(f"{source}: placeholder token {last_id} is outside vocab_size={text.vocab_size}")
    return replace(
        text,
        architecture=media.architecture,
        model_type=media.model_type,
        rope=replace(text.rope, axis_sections=sections, axis_layout=media.axis_layout),
        num_deepstack=media.num_deepstack,
        image_token_id=media.image_token_id,
        video_token_id=media.video_token_id,
    )


def token_ids(value: object, *, source: str) -> tuple[int, ...]:
    """An ``eos_token_id`` entry (missing, one id, or a list) as a tuple."""
    if value is None:
        return ()
    ids = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelError(f"{source}: eos_token_id={value!r} must be a token id or a list of token ids")
    return tuple(ids)


class _Reader:
    """Typed access to a raw config; a null counts as missing."""

    def __init__(self, raw: RawConfig, defaults: Mapping[str, Any], source: str) -> None:
        self._raw, self._defaults, self._source = raw, defaults, source

    def get(self, key: str, default: Any = None) -> Any:
        value = self._raw.get(key)
        if value is None and key not in self._raw:
            value = self._defaults.get(key)
        return default if value is None else value

    def written(self, key: str) -> Any:
        """What the config itself says; None: nothing, or null."""
        return self._raw.get(key)

    def size(self, key: str, *, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"{self._source}: config key '{key}' is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.error(key, "must be a positive integer")
        return value

    def positive(self, key: str, *, default: float) -> float:
        value = self.get(key, default)
        if (
            not isinstance(value, (int, float))
            or isinstance(value, bool)
            or not math.isfinite(value)
            or value <= 0
        ):
            raise self.error(key, "must be a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def error(self, key: str, why: str) -> ModelError:
        return ModelError(f"{self._source}: config key '{key}'={self.get(key)!r}: {why}")


def _family(raw: RawConfig, model_type: str, source: str) -> _Family:
    architectures = raw.get("architectures") or []
    named = architectures[0] if architectures else f"model_type={model_type!r}"
    family = _FAMILIES.get(model_type)
    known = () if family is None else (family.architecture, family.base_architecture)
    if family is None or (architectures and not set(known) & set(architectures)):
        raise ModelError(
            f"{source}: architecture {named} is not implemented; implemented are "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return family


def _with_theta(raw: RawConfig, family: _Family) -> RawConfig:
    """``raw`` with the family's own base frequency where it has one and the config names none."""
    default = family.defaults.get("rope_theta")
    return raw if default is None or raw.get("rope_theta") is not None else {**raw, "rope_theta": default}


def _qkv_bias(reader: _Reader, family: _Family, *, attention_bias: bool) -> bool:
    if "qkv_bias" in family.reads:
        return reader.flag("qkv_bias")
    return attention_bias if family.fixed_qkv_bias is None else family.fixed_qkv_bias


def _windows(reader: _Reader, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    if model_type == "llama":
        return (None,) * num_layers
    window = reader.get("sliding_window")
    if window == 0 and model_type == "qwen2_moe" and not reader.flag("use_sliding_window"):
        window = None  # how Transformers 5 writes "unused"
    if window is not None:
        window = reader.size("sliding_window")
    if model_type in ("mistral", "mixtral"):
        return (window,) * num_layers
    if not reader.flag("use_sliding_window"):
        window = None
    if model_type == "qwen3_moe":
        return (window,) * num_layers
    kinds = reader.get("layer_types")
    if kinds is None:
        first = reader.get("max_window_layers")
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise reader.error("max_window_layers", "must be an integer of at least 0")
        if model_type == "qwen2_moe":  # the other way round, and every second layer
            return tuple(window if i < first and i % 2 == 0 else None for i in range(num_layers))
        return tuple(window if index >= first else None for index in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise reader.error("layer_types", f"must be a list with one entry for each of {num_layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise reader.error("layer_types", f"layer type {kind!r} is not implemented")
    if "sliding_attention" in kinds and window is None:
        raise reader.error("layer_types", "sliding layers need use_sliding_window=true and a sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _refuse_unknown_keys(raw: RawConfig, family: _Family, source: str) -> None:
    known = _COMMON_READS | family.reads | _HARMLESS
    for key, value in raw.items():
        if key in known or value is None or value is False or value in ({}, [], ""):
            continue
        allowed = _HARMLESS_AT.get(key)
        if allowed is not None and value in allowed:
            continue
        why = _REASONS.get(key, f"not implemented for {family.architecture}")
        raise ModelError(
            f"{source}: config key '{key}'={_short(value)} is refused because it may change the result: {why}"
        )


def _dtype_name(raw: RawConfig) -> str | None:
    name = raw.get("dtype") or raw.get("torch_dtype")
    return None if name is None else str(name).removeprefix("torch.")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

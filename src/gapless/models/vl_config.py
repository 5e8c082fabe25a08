"""The parts of a vision-language config: its text model as a plain decoder's config, its tower, its tokens.

Such a config nests one config in another, and where the text keys lie depends on who saved it: older
Qwen2.5-VL folders have them at the top, beside ``vision_config``; newer ones in ``text_config``. Here both
become a raw config of a plain family (``qwen2``, ``qwen3`` …), which ``config.py`` checks key by key like any
other, plus what only media need. Imports no torch: the process that answers HTTP reads configs too. Read
``config.py`` for the text part and ``multimodal/processor.py`` for the use of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gapless.errors import ModelError

RawConfig = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionLanguageConfig:
    """What a folder says about text, tower and placeholders."""

    model_type: str
    architecture: str
    text: RawConfig
    """In the form of a plain decoder's ``config.json``, without m-rope keys."""
    outer: RawConfig
    """What lies beside a nested text config and is not about media."""
    vision: RawConfig
    """``vision_config`` as it is, for the tower."""
    vision_keys: frozenset[str]
    """Those that the tower reads."""
    tower_type: str
    """What the tower is a tower of; several models may have one."""
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    axis_sections: tuple[int, int, int]
    axis_layout: Literal["chunked", "interleaved"]
    patch_size: int
    merge_size: int
    """Patches along each side of a token."""
    temporal_patch_size: int
    tokens_per_second: int
    """Qwen2.5-VL: temporal positions in a second of video."""
    num_deepstack: int

    @property
    def has_timestamps(self) -> bool:
        """Qwen3-VL: frames of a video are separate and each is announced by its time, in text."""
        return self.tower_type == "qwen3_vl"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """How one model type differs; defaults are those of Transformers' config classes."""

    architecture: str
    text_type: str
    tower_type: str
    text_defaults: Mapping[str, Any]
    sections: tuple[int, int, int]
    layout: Literal["chunked", "interleaved"]
    patch_size: int
    tower_keys: frozenset[str]


_QWEN3_TEXT = {"rope_theta": 500000.0, "max_position_embeddings": 128000}
_QWEN3: dict[str, Any] = {
    "tower_type": "qwen3_vl",
    "sections": (24, 20, 20),
    "layout": "interleaved",
    "patch_size": 16,
    "tower_keys": frozenset({"num_position_embeddings", "deepstack_visual_indexes"}),
}
_TOWER_KEYS = frozenset(
    {
        *(
            "depth",
            "hidden_size",
            "hidden_act",
            "intermediate_size",
            "num_heads",
            "in_channels",
            "patch_size",
        ),
        *("spatial_merge_size", "temporal_patch_size", "out_hidden_size", "rope_parameters"),
        *("in_chans", "spatial_patch_size"),
    }
)
_FAMILIES: Mapping[str, _Family] = {
    "qwen2_5_vl": _Family(
        architecture="Qwen2_5_VLForConditionalGeneration",
        text_type="qwen2",
        tower_type="qwen2_5_vl",
        text_defaults={
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "max_window_layers": 80,
        },
        sections=(16, 24, 24),
        layout="chunked",
        patch_size=14,
        tower_keys=frozenset({"window_size", "fullatt_block_indexes", "tokens_per_second"}),
    ),
    "qwen3_vl": _Family(
        architecture="Qwen3VLForConditionalGeneration",
        text_type="qwen3",
        text_defaults={**_QWEN3_TEXT, "num_key_value_heads": 32},
        **_QWEN3,
    ),
    "qwen3_vl_moe": _Family(
        architecture="Qwen3VLMoeForConditionalGeneration",
        text_type="qwen3_vl_moe_text",
        text_defaults={**_QWEN3_TEXT, "num_key_value_heads": 16},
        **_QWEN3,
    ),
}

VISION_LANGUAGE_ARCHITECTURES = tuple(family.architecture for family in _FAMILIES.values())

_TOKEN_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
_OWN_KEYS = frozenset(
    {"text_config", "vision_config", "vision_token_id", "model_type", "architectures", *_TOKEN_IDS}
)
"""Keys of the outer config that are not about text. ``vision_token_id`` names a token nothing uses."""


def is_vision_language(raw: RawConfig) -> bool:
    return raw.get("model_type") in _FAMILIES


def read_vl_config(raw: RawConfig, *, source: str) -> VisionLanguageConfig:
    """Raises ``ModelError`` naming ``source`` and the key."""
    model_type = str(raw.get("model_type"))
    family = _FAMILIES[model_type]
    architectures = raw.get("architectures") or [family.architecture]
    if family.architecture not in architectures:
        raise ModelError(
            f"{source}: architecture {architectures[0]} is not implemented for model_type={model_type!r}; "
            f"it goes with {family.architecture}"
        )
    vision = _object(raw, "vision_config", source)
    if vision is None:
        raise ModelError(f"{source}: config key 'vision_config' is missing")
    outer = {key: value for key, value in raw.items() if key not in _OWN_KEYS}
    nested = _object(raw, "text_config", source)
    text, sections = _without_mrope(_text_config(outer, nested, family, source), family, source)
    sizes = _Sizes(vision, f"{source}: vision_config")
    patch_size, channels = sizes.get("patch_size", family.patch_size), sizes.get("in_channels", 3)
    # Second names of two keys, which nothing reads: they may not say something else.
    for key, value in (("in_channels", 3), ("in_chans", channels), ("spatial_patch_size", patch_size)):
        if vision.get(key) not in (None, value):
            raise ModelError(f"{source}: vision_config.{key}={vision[key]!r} must be {value}")
    tokens = {key: _token_id(raw, key, default, source) for key, default in _TOKEN_IDS.items()}
    if len(set(tokens.values())) != len(tokens):
        raise ModelError(f"{source}: {tokens}: placeholders and marks of media must be different tokens")
    return VisionLanguageConfig(
        model_type=model_type,
        architecture=family.architecture,
        text=text,
        outer={} if nested is None else outer,
        vision=vision,
        vision_keys=_TOWER_KEYS | family.tower_keys,
        tower_type=family.tower_type,
        **tokens,
        axis_sections=sections,
        axis_layout=family.layout,
        patch_size=patch_size,
        merge_size=sizes.get("spatial_merge_size", 2),
        temporal_patch_size=sizes.get("temporal_patch_size", 2),
        tokens_per_second=sizes.get("tokens_per_second", 4),
        num_deepstack=_num_deepstack(vision, depth=sizes.get("depth", 27), source=source)
        if "deepstack_visual_indexes" in family.tower_keys
        else 0,
    )


def _text_config(outer: RawConfig, nested: RawConfig | None, family: _Family, source: str) -> dict[str, Any]:
    """The text model's keys, in the form of its plain family."""
    if nested is not None:
        # Beside a text_config the outer keys of the text model mean nothing, to Transformers neither.
        text = {key: value for key, value in nested.items() if key not in _OWN_KEYS}
        for key in ("dtype", "torch_dtype", "eos_token_id"):
            if text.get(key) is None and outer.get(key) is not None:
                text[key] = outer[key]
        # Qwen2.5-VL folders say it on either level, others on the outer one.
        if outer.get("tie_word_embeddings") or family.text_type != "qwen2":
            text["tie_word_embeddings"] = outer.get("tie_word_embeddings")
    elif family.text_type == "qwen2":
        text = dict(outer)
    else:
        raise ModelError(f"{source}: config key 'text_config' is missing")
    missing = {key: value for key, value in family.text_defaults.items() if text.get(key) is None}
    return {**text, **missing, "model_type": family.text_type}


def _without_mrope(
    text: dict[str, Any], family: _Family, source: str
) -> tuple[dict[str, Any], tuple[int, int, int]]:
    """The text config with ordinary rotary parameters, and the sections that were among them."""
    sections: Any = family.sections
    for key in ("rope_parameters", "rope_scaling"):
        params = _object(text, key, source)
        if params is None:
            continue
        params = dict(params)
        sections = params.pop("mrope_section", sections)
        is_interleaved = params.pop("mrope_interleaved", None)
        if is_interleaved is not None and is_interleaved is not (family.layout == "interleaved"):
            raise ModelError(
                f"{source}: {key}.mrope_interleaved={is_interleaved!r} is not implemented for "
                f"{family.architecture}"
            )
        for name in ("rope_type", "type"):
            if params.get(name) == "mrope":
                params[name] = "default"
        text = {**text, key: params}
    return text, _sections(sections, source)


def _sections(value: Any, source: str) -> tuple[int, int, int]:
    if isinstance(value, (list, tuple)) and len(value) == 3:
        temporal, vertical, horizontal = value
        if all(isinstance(size, int) and size > 0 for size in value):
            return temporal, vertical, horizontal
    raise ModelError(f"{source}: mrope_section={value!r} must be three positive integers")


def _num_deepstack(vision: RawConfig, *, depth: int, source: str) -> int:
    layers = vision.get("deepstack_visual_indexes", [8, 16, 24])
    is_list = isinstance(layers, (list, tuple)) and all(type(layer) is int for layer in layers)
    if not is_list or len(set(layers)) < len(layers) or not set(layers) <= set(range(depth)):
        raise ModelError(
            f"{source}: vision_config.deepstack_visual_indexes={layers!r} must be a list of different layers "
            f"from 0 to {depth - 1}"
        )
    return len(layers)


def _object(raw: RawConfig, key: str, source: str) -> Mapping[str, Any] | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ModelError(f"{source}: config key '{key}'={value!r} must be an object")
    return value


def _token_id(raw: RawConfig, key: str, default: int, source: str) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ModelError(f"{source}: config key '{key}'={value!r} must be a token id")
    return value


class _Sizes:
    def __init__(self, raw: RawConfig, source: str) -> None:
        self._raw, self._source = raw, source

    def get(self, key: str, default: int) -> int:
        value = self._raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(f"{self._source}.{key}={value!r} must be a positive integer")
        return value

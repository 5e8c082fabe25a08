"""What the engine knows of language models that the graph planner must be told: rules, caps and features.

``RULES`` is the table of features that switch piecewise or breakable graphs off by themselves: *hard* rules
always hold, *soft* ones yield when the user names a backend or a mode. Features this engine lacks stand in it
too, so that the plan of a configuration can be asked for (``gapless inspect --feature``) before the feature
exists; the engine has no option that asks for one. ``capabilities_for`` puts the facts of model, attention
and device together. Read ``graphs/plan.py`` next.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gapless.attention.registry import get_backend_support
from gapless.errors import ConfigError
from gapless.graphs.capabilities import (
    AVAILABLE_STRATEGIES,
    HARDWARE_RULE,
    AutoDisableRule,
    BackendSupport,
    Capabilities,
)
from gapless.graphs.modes import Phase, Strategy
from gapless.models.moe_config import expert_ops

if TYPE_CHECKING:
    from gapless.config import EngineConfig
    from gapless.models.base import ModelInfo


class Feature(enum.StrEnum):
    """What a configuration may use that graphs have to know about."""

    HARDWARE_WITHOUT_GRAPHS = HARDWARE_RULE.feature
    PIPELINE_PARALLEL = "pipeline_parallel"
    MOE_ALL_TO_ALL = "moe_all_to_all"
    DENIED_ARCHITECTURE = "denied_architecture"
    SPECULATIVE_DECODING = "speculative_decoding"
    DATA_PARALLEL_ATTENTION = "data_parallel_attention"
    LORA = "lora"
    MULTIMODAL = "multimodal"
    DIFFUSION_LM = "diffusion_lm"
    DETERMINISTIC_INFERENCE = "deterministic_inference"
    DISAGGREGATION = "disaggregation"
    EXPERT_RECORDER = "expert_recorder"
    EXPERT_LOAD_BALANCING = "expert_load_balancing"


DENIED_ARCHITECTURES = frozenset({"DeepseekV32ForCausalLM"})
"""Architectures whose forward piecewise graphs are known to get wrong."""

MULTIMODAL_ALLOWED = frozenset(
    {
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    }
)
"""Multimodal architectures whose decoder is tested with prefill graphs."""

MLA_PREFILL_CAP = 2048
LLAMA_2_PREFILL_CAP = 4096

_PIECEWISE = frozenset({Strategy.TC_PIECEWISE, Strategy.BREAKABLE})
_PREFILL = frozenset({Phase.PREFILL})
_BOTH = frozenset({Phase.PREFILL, Phase.DECODE})


def _soft(feature: Feature, reason: str) -> AutoDisableRule:
    return AutoDisableRule(
        feature=feature, strategies=_PIECEWISE, phases=_PREFILL, is_hard=False, reason=reason
    )


def _hard(feature: Feature, reason: str) -> AutoDisableRule:
    return AutoDisableRule(feature=feature, strategies=_PIECEWISE, phases=_BOTH, is_hard=True, reason=reason)


RULES: tuple[AutoDisableRule, ...] = (
    HARDWARE_RULE,
    _hard(Feature.PIPELINE_PARALLEL, "tensors pass between pipeline stages in the middle of a step"),
    _hard(Feature.MOE_ALL_TO_ALL, "the exchange between experts sizes its buffers on the host, per step"),
    _soft(Feature.DENIED_ARCHITECTURE, "the architecture is on the deny list"),
    _soft(Feature.SPECULATIVE_DECODING, "draft and target steps have not been tested with prefill graphs"),
    _soft(Feature.DATA_PARALLEL_ATTENTION, "ranks would have to agree on a size before every step"),
    _soft(Feature.LORA, "adapters change which kernels a prefill step runs"),
    _soft(Feature.MULTIMODAL, "the model takes images and is not on the list of tested ones"),
    _soft(Feature.DIFFUSION_LM, "a diffusion step rewrites tokens that prefill graphs treat as final"),
    _soft(
        Feature.DETERMINISTIC_INFERENCE, "padding to a bucket may choose another kernel than the exact size"
    ),
    _soft(Feature.DISAGGREGATION, "a prefill worker sends its cache away between layers"),
    _soft(Feature.EXPERT_RECORDER, "the recorder reads the routing of every layer on the host"),
    _soft(Feature.EXPERT_LOAD_BALANCING, "experts move between ranks while the server runs"),
)


def parse_features(names: Iterable[str]) -> frozenset[Feature]:
    """Names as ``--feature`` takes them. Raises ``ConfigError`` listing what exists."""
    features = set()
    for name in names:
        try:
            features.add(Feature(name))
        except ValueError:
            raise ConfigError(f"unknown feature {name!r}; known: {', '.join(Feature)}") from None
    return frozenset(features)


def refuse_missing_encoder(config: EngineConfig, info: ModelInfo) -> None:
    """Raise ``ConfigError`` for what is asked of the vision encoder of a model that has none."""
    if info.is_multimodal:
        return
    asked = None
    if config.enable_vit_cuda_graph:
        asked = "--enable-vit-cuda-graph (or GAPLESS_VIT_ENABLE_CUDA_GRAPH=1) asks for graphs of"
    elif config.mm_embedding_cache_tokens is not None:
        asked = f"--mm-embedding-cache-tokens={config.mm_embedding_cache_tokens} bounds what is kept of"
    elif config.mm_processor_kwargs:
        asked = "--mm-processor-kwargs changes what is prepared for"
    if asked is not None:
        raise ConfigError(
            f"{asked} a vision encoder, and {info.architecture} takes text only; leave it out for this model"
        )


def refuse_divided_encoder(config: EngineConfig, info: ModelInfo) -> None:
    """Raise ``ConfigError`` for several ranks and a model with a vision encoder."""
    size = config.tensor_parallel_size
    if size > 1 and info.is_multimodal:
        raise ConfigError(
            f"--tensor-parallel-size={size}: models that take images run on one GPU only; give 1"
        )


def model_features(architecture: str, *, is_multimodal: bool = False) -> frozenset[Feature]:
    """Features that follow from the model alone."""
    features = set()
    if architecture in DENIED_ARCHITECTURES:
        features.add(Feature.DENIED_ARCHITECTURE)
    if is_multimodal and architecture not in MULTIMODAL_ALLOWED:
        features.add(Feature.MULTIMODAL)
    return frozenset(features)


def is_llama_2(info: ModelInfo) -> bool:
    """Llama 2 and its fine-tunes, by what sets them apart: 4096 positions and 32000 tokens (padded or plus a
    few).
    """
    return (
        info.architecture == "LlamaForCausalLM"
        and info.max_model_len == 4096
        and 32000 <= info.vocab_size <= 32064
    )


def prefill_max_cap(info: ModelInfo, *, is_mla: bool = False) -> int | None:
    """The cap on the default prefill maximum of this model; None where there is none."""
    if is_mla:
        return MLA_PREFILL_CAP
    return LLAMA_2_PREFILL_CAP if is_llama_2(info) else None


def capabilities_for(
    info: ModelInfo,
    *,
    attention: Iterable[str | BackendSupport],
    supports_graphs: bool,
    max_running_requests: int,
    chunked_prefill_size: int,
    max_total_tokens: int | None = None,
    has_layer_split: bool = True,
    is_mla: bool = False,
    is_pooling: bool = False,
    uses_cascade: bool = False,
    uniform_query_len: int = 1,
    features: Iterable[Feature] = (),
    whole_graph_passes: tuple[str, ...] = (),
    available_strategies: frozenset[Strategy] = AVAILABLE_STRATEGIES,
) -> Capabilities:
    """Everything ``resolve()`` has to know. ``attention``: names (looked up in the registry) or support as
    data.
    """
    backends = (get_backend_support(item) if isinstance(item, str) else item for item in attention)
    active = frozenset(features) | model_features(info.architecture, is_multimodal=info.is_multimodal)
    return Capabilities(
        attention=tuple(backends),
        max_reqs=max_running_requests,
        chunked_prefill_size=chunked_prefill_size,
        supports_graphs=supports_graphs,
        has_layer_split=has_layer_split,
        available_strategies=available_strategies,
        uniform_query_len=uniform_query_len,
        is_pooling=is_pooling,
        uses_cascade=uses_cascade,
        features=active,
        rules=RULES,
        max_total_tokens=max_total_tokens,
        prefill_max_cap=prefill_max_cap(info, is_mla=is_mla),
        whole_graph_passes=whole_graph_passes,
        break_ops=expert_ops(info.num_experts),
    )

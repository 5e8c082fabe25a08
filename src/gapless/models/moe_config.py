"""What a raw config says about experts: which layers have them, how many, and how tokens choose.

Three families write it differently. Mixtral: every layer, weights always renormalised, tensors called
``block_sparse_moe.experts.N.w1``. Qwen3-MoE (and the text part of Qwen3-VL-MoE): every
``decoder_sparse_step`` layers but not those of ``mlp_only_layers``. Qwen2-MoE: the same, and a shared expert
that every token goes through. ``config.py`` calls ``parse_experts`` with its own reader; ``moe.py`` is built
from the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gapless.errors import ModelError

MOE_OP = "gapless::moe_layer"
"""A layer's whole mixture of experts, router included, as one opaque operator (in ``moe.py``; its name is
here for those that must not wait for torch)."""


def expert_ops(num_experts: int) -> tuple[str, ...]:
    """Where ``tc_piecewise`` cuts a model besides attention if nobody says otherwise, and what breakable
    graphs break at if ``splitting_ops`` names it."""
    return (MOE_OP,) if num_experts else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """How checkpoints call the tensors of a layer's experts."""

    block: str
    """Below the layer: ``mlp`` or ``block_sparse_moe``. Files with stacked experts always say ``mlp``."""
    gate: str
    up: str
    down: str
    is_transposed: bool = False
    """Stacked experts are stored with input features before output features (Qwen3-VL-MoE)."""


QWEN_NAMES = ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")
MIXTRAL_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertConfig:
    """All that decides what the expert layers of a model compute."""

    num_experts: int
    top_k: int
    """Experts of each token."""
    intermediate_size: int
    """Of one expert."""
    renormalizes: bool
    """Whether the weights of a token's experts add up to 1."""
    shared_intermediate_size: int | None
    """Of the expert that every token goes through; None: there is none."""
    sparse_layers: tuple[bool, ...]
    """Per layer: whether experts take the place of the dense feed-forward."""
    names: ExpertNames


MOE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    "qwen3_moe": {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    "qwen3_vl_moe_text": {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
}
"""Transformers' values for missing keys, by model type."""

MOE_READS: Mapping[str, frozenset[str]] = {
    model_type: frozenset(defaults)
    | (set() if model_type == "mixtral" else {"mlp_only_layers", "num_local_experts"})
    for model_type, defaults in MOE_DEFAULTS.items()
}
"""Keys that ``parse_experts`` reads, by model type."""

MOE_HARMLESS = frozenset({"router_aux_loss_coef", "router_jitter_noise", "output_router_logits"})
"""Keys about training, or about what else a forward returns."""


class Reader(Protocol):
    """``config.py``'s reader of one raw config."""

    def get(self, key: str, default: Any = None) -> Any: ...
    def size(self, key: str, *, default: int | None = None) -> int: ...
    def flag(self, key: str) -> bool: ...
    def written(self, key: str) -> Any: ...
    def error(self, key: str, why: str) -> ModelError: ...


def parse_experts(reader: Reader, model_type: str, *, num_layers: int) -> ExpertConfig | None:
    """The experts of a ``model_type`` that has them (a key of ``MOE_DEFAULTS``), else None. Raises
    ``ModelError`` naming the key. A model that has experts in no layer is a dense one: None."""
    if model_type not in MOE_DEFAULTS:
        return None
    is_mixtral = model_type == "mixtral"
    count_key = _count_key(reader, is_mixtral=is_mixtral)
    num_experts = 0 if reader.get(count_key) == 0 and not is_mixtral else reader.size(count_key)
    if is_mixtral:
        sparse_layers = (True,) * num_layers
    else:
        sparse_layers = tuple(_sparse_layers(reader, num_layers, has_experts=num_experts > 0))
    if not any(sparse_layers):
        return None
    top_k = reader.size("num_experts_per_tok")
    if top_k > num_experts:
        raise reader.error("num_experts_per_tok", f"there are only {count_key}={num_experts}")
    renormalizes = True if is_mixtral else reader.flag("norm_topk_prob")
    if model_type == "qwen3_vl_moe_text" and not renormalizes:
        raise reader.error("norm_topk_prob", "this architecture always renormalises")
    is_shared = model_type == "qwen2_moe"
    return ExpertConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=reader.size("intermediate_size" if is_mixtral else "moe_intermediate_size"),
        renormalizes=renormalizes,
        shared_intermediate_size=reader.size("shared_expert_intermediate_size") if is_shared else None,
        sparse_layers=sparse_layers,
        names=_names(model_type),
    )


def _count_key(reader: Reader, *, is_mixtral: bool) -> str:
    """Transformers 5 writes ``num_local_experts`` for Qwen3-MoE too."""
    if is_mixtral:
        return "num_local_experts"
    written, other = reader.written("num_experts"), reader.written("num_local_experts")
    if other is None:
        return "num_experts"
    if written is not None and written != other:
        raise reader.error("num_local_experts", f"num_experts={written} says otherwise")
    return "num_local_experts"


def _names(model_type: str) -> ExpertNames:
    if model_type == "mixtral":
        return MIXTRAL_NAMES
    if model_type == "qwen3_vl_moe_text":
        return ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj", is_transposed=True)
    return QWEN_NAMES


def _sparse_layers(reader: Reader, num_layers: int, *, has_experts: bool) -> list[bool]:
    step = reader.size("decoder_sparse_step")
    dense = reader.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(i) is int and 0 <= i < num_layers for i in dense):
        raise reader.error("mlp_only_layers", f"must be a list of layers between 0 and {num_layers - 1}")
    return [has_experts and i not in dense and (i + 1) % step == 0 for i in range(num_layers)]

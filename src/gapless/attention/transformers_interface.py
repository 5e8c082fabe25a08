"""Paged attention inside unmodified Transformers decoders, through their ``AttentionInterface``.

``attach_attention`` registers one attention function under the name ``gapless`` and gives each attention
module of a model an ``Attention`` layer, which a cache is then bound to. The model runs all requests of a
step as one row of tokens, ``input_ids`` and ``position_ids`` of shape ``[1, T]`` with ``use_cache=False``;
who belongs to whom is in the forward context, as for our own decoder. Experts must run without a loop on the
host (``config._experts_implementation`` "grouped_mm" or "batched_mm") to be traced or captured. Invariant:
what a module asks for at a call (scale, window) is what its layer was made with, and anything else that would
change the result is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gapless.attention.base import Attention
from gapless.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INTERFACE_NAME = "gapless"
_LAYER = "gapless_attention"
"""Attribute of a Transformers attention module that holds its layer."""


def attach_attention(model: PreTrainedModel) -> list[Attention]:
    """Let ``model`` attend through us; returns its layers in order, to be bound to a backend and a cache.

    Raises ``ModelError`` for a model without attention modules that follow the interface, or with attention
    that is not causal.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(INTERFACE_NAME, _attend)
    layers = []
    for name, module in model.named_modules():
        if not _is_attention(module):
            continue
        if not getattr(module, "is_causal", True):
            raise ModelError(f"{name} of {type(model).__name__} is not causal; paged attention is")
        layer = _layer_of(module)
        setattr(module, _LAYER, layer)
        layers.append(layer)
    if not layers:
        raise ModelError(f"{type(model).__name__} has no attention modules that take an AttentionInterface")
    model.set_attn_implementation(INTERFACE_NAME)
    return sorted(layers, key=lambda layer: layer.layer_index)


def _is_attention(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("layer_idx", "head_dim", "num_key_value_groups", "scaling"))


def _layer_of(module: Any) -> Attention:
    num_heads = module.config.num_attention_heads
    window = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None))
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_heads // module.num_key_value_groups,
        head_size=module.head_dim,
        scale=module.scaling,
        window=window,
        layer_index=module.layer_idx,
    )


def _attend(
    module: Any,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **unsupported: Any,
) -> tuple[Tensor, None]:
    """What Transformers calls: ``[1, H, T, D]`` in, ``[1, T, H, D]`` and no weights out."""
    layer: Attention = getattr(module, _LAYER)
    changes = [name for name in ("softcap", "s_aux", "position_bias") if unsupported.get(name) is not None]
    if attention_mask is not None or dropout or changes or query_1HTD.shape[0] != 1:
        raise ModelError(
            "paged attention takes one row of tokens without a mask, dropout, soft cap, sinks or bias; got "
            f"{query_1HTD.shape[0]} rows, mask {attention_mask is not None}, dropout {dropout}, {changes}"
        )
    if scaling not in (None, layer.scale) or sliding_window not in (None, layer.window):
        raise ModelError(
            f"layer {layer.layer_index} was attached with scale {layer.scale} and window {layer.window}, and "
            f"is called with {scaling} and {sliding_window}; attach again after changing the model's config"
        )
    rows = (tensor[0].transpose(0, 1) for tensor in (query_1HTD, key_1KTD, value_1KTD))
    return layer(*rows).unsqueeze(0), None

"""Encoder attention inside unmodified Transformers towers, through their ``AttentionInterface``.

A tower takes its path for packed rows only when the name of its attention contains "flash"; otherwise it
splits rows by lengths that it reads on the host, which no graph can do. ``attach_varlen`` therefore registers
one function under such a name and sets that name on the built module (before, Transformers would look for a
package of this name). What a call gives beside query, key and value are ``cu_seq_lens_q`` and
``max_length_q``; our own towers also pass ``segments`` and a workspace for the result. Invariant: whatever
would change the result and is not done here is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gapless.attention.varlen import Segments, VarlenBackend
from gapless.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VARLEN_INTERFACE_NAME = "gapless_flash_varlen"
_BACKEND = "gapless_varlen_backend"
"""Attribute of a Transformers attention module that holds its backend."""


def attach_varlen(tower: PreTrainedModel, backend: VarlenBackend) -> int:
    """Let the attention modules of ``tower`` run on ``backend``; returns how many there are.

    Raises ``ModelError`` for a model without attention modules that follow the interface, or with causal
    ones.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN_INTERFACE_NAME, _attend)
    count = 0
    for name, module in tower.named_modules():
        if not (hasattr(module, "scaling") and hasattr(module, "is_causal")):
            continue
        if module.is_causal:
            raise ModelError(f"{name} of {type(tower).__name__} is causal; attention of an encoder is not")
        setattr(module, _BACKEND, backend)
        module.config._attn_implementation = VARLEN_INTERFACE_NAME
        count += 1
    if not count:
        raise ModelError(f"{type(tower).__name__} has no attention modules that take an AttentionInterface")
    tower.config._attn_implementation = VARLEN_INTERFACE_NAME
    return count


def _attend(
    module: Any,
    query_1HSD: Tensor,
    key_1HSD: Tensor,
    value_1HSD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    segments: Segments | None = None,
    workspace_SHD: Tensor | None = None,
    **unsupported: Any,
) -> tuple[Tensor, None]:
    """What Transformers calls: ``[1, H, S, D]`` in, ``[1, S, H, D]`` and no weights out."""
    changes = [name for name in ("softcap", "s_aux", "position_bias") if unsupported.get(name) is not None]
    if attention_mask is not None or dropout or changes or query_1HSD.shape != key_1HSD.shape:
        raise ModelError(
            "attention of encoders takes one row of packed patches, as many keys as queries, no mask, "
            f"dropout, soft cap, sinks or bias; got query {tuple(query_1HSD.shape)}, key "
            f"{tuple(key_1HSD.shape)}, mask {attention_mask is not None}, dropout {dropout}, {changes}"
        )
    if segments is None:
        if cu_seq_lens_q is None or max_length_q is None:
            raise ModelError("attention of encoders needs cu_seqlens and max_seqlen; give them precomputed")
        cu_seqlens = cu_seq_lens_q.to(torch.int32)
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        segments = Segments(cu_seqlens=cu_seqlens, cu_seqlens_kk=lengths, max_len=max_length_q)
    backend: VarlenBackend = getattr(module, _BACKEND)
    query_SHD, key_SHD, value_SHD = (t[0].transpose(0, 1) for t in (query_1HSD, key_1HSD, value_1HSD))
    out_SHD = torch.empty_like(query_SHD) if workspace_SHD is None else workspace_SHD
    backend.attend(query_SHD, key_SHD, value_SHD, out_SHD, backend.arguments(segments), scale=scaling)
    return out_SHD.unsqueeze(0), None

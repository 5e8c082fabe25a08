"""What the engine needs from a model: numbers about it, and the embed / layers / head split.

The split is part of the interface because a breakable graph holds only the layer stack: embedding and head
run on the real batch, outside. No attribute name is guessed anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """Facts the engine plans with. ``max_model_len`` is the config's own limit (positions)."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_model_len: int
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...] = ()
    num_experts: int = 0
    """Of each layer that is a mixture of experts; 0: the model is dense."""
    rope_axes: int = 1
    """Positions of a token: 1, or 3 (temporal, vertical, horizontal) for m-rope."""
    num_deepstack: int = 0
    """Decoder layers behind which features of media are added."""
    is_pooling: bool = False
    """It makes embeddings only: there is no head to draw text with."""
    is_multimodal: bool = False
    image_token_id: int | None = None
    """Its placeholder in a prompt, one for each row of an encoder's output; likewise for videos."""
    video_token_id: int | None = None


class CausalModel(Protocol):
    """``T`` tokens of all requests in a row (no batch dimension), ``R`` sampled rows, ``E`` hidden, ``V``
    vocabulary."""

    info: ModelInfo
    has_fused_kernels: bool
    """Whether it runs on the kernels of ``gapless.kernels``; the caller's own last steps then do too."""

    @property
    def has_tail(self) -> bool:
        """Whether ``layers`` can stop behind the last attention, and ``tail`` do the rest for few rows."""

    def embed(self, input_ids_T: Tensor) -> Tensor:
        """``[T] int32/int64 -> [T, E]``."""

    def embed_with_media(self, input_ids_T: Tensor, media_TE: Tensor, is_media_T: Tensor) -> Tensor:
        """``merge_media(embed(ids), media, is_media)``."""

    def layers(
        self,
        hidden_TE: Tensor,
        positions: Tensor,
        deepstack_LTE: Tensor | None = None,
        is_media_T: Tensor | None = None,
    ) -> Tensor:
        """The layer stack and the final norm: ``[T, E], [T] int32/int64 -> [T, E]``.

        With ``info.rope_axes`` of 3 positions are ``[3, T]``, or ``[T]`` where all axes agree (text).
        ``deepstack_LTE``: added behind each of the first ``L`` layers to rows with ``is_media``, or to all
        where that is None.
        """

    def merge_media(self, hidden_TE: Tensor, media_TE: Tensor, is_media_T: Tensor) -> Tensor:
        """Rows of ``media`` where ``is_media`` (bool or 0/1) is set, else of ``hidden``; a new tensor."""

    def hidden_states_of_drawn(
        self, input_ids_T: Tensor, positions: Tensor, *, drawn_rows_T: Tensor, drawn_R: Tensor
    ) -> Tensor:
        """``layers(embed(ids), positions)``, where an id is the larger of ``input_ids[t]`` and
        ``drawn[drawn_rows[t]]``."""

    def layers_to_tail(
        self,
        hidden_TE: Tensor,
        positions: Tensor,
        deepstack_LTE: Tensor | None = None,
        is_media_T: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``layers`` up to the last layer's attention: ``(its heads [T, H * D], residual stream [T, E])``."""

    def drawn_to_tail(
        self, input_ids_T: Tensor, positions: Tensor, *, drawn_rows_T: Tensor, drawn_R: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``hidden_states_of_drawn``, as far as ``layers_to_tail``."""

    def tail(self, attended_RC: Tensor, residual_RE: Tensor) -> Tensor:
        """The rest of ``layers`` for any rows: ``[R, H * D], [R, E] -> [R, E]``."""

    def head(self, hidden_RE: Tensor) -> Tensor:
        """``[R, E] -> [R, V]`` float32 logits."""

    def raw_logits(self, hidden_RE: Tensor) -> Tensor:
        """``[R, E] -> [R, V]`` logits in the model's dtype."""

    @property
    def head_rows(self) -> Tensor | None:
        """``[V, E]``, or more rows, where ``raw_logits`` is the product with them alone, made here and on
        fused kernels; else None."""

    def attention_layers(self) -> list:
        """The ``Attention`` modules in layer order."""

"""Static device memory in which a prefill step finds the rows that an encoder has made.

Row ``t`` belongs to token ``t`` of the step; only rows of placeholders are written, before the step that
needs them, and ``is_media`` (an input of the step) says which those are. Invariant: every other row is masked
inside the graph, so whatever an earlier step or an allocator left there, NaN included, reaches nothing.
Allocated once at its largest size, never rebound. ``T`` tokens, ``E`` hidden size, ``L`` layers that take
deepstack features. Read ``media.py`` for who writes, ``graph_set.py`` for who reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gapless.models.base import CausalModel, ModelInfo
from gapless.models.vision.base import EncodedMedia


class MediaBuffers:
    """Embeddings and deepstack features for steps of at most ``max_num_tokens`` tokens."""

    def __init__(self, info: ModelInfo, *, max_num_tokens: int, torch_device: torch.device) -> None:
        # Static: written in place, never rebound. Features of a token lie together, so that the first rows
        # are one piece of memory for every size.
        self.embeds_TE = torch.zeros(
            (max_num_tokens, info.hidden_size), dtype=info.dtype, device=torch_device
        )
        self.deepstack_TLE: Tensor | None = None
        if info.num_deepstack:
            shape = (max_num_tokens, info.num_deepstack, info.hidden_size)
            self.deepstack_TLE = torch.zeros(shape, dtype=info.dtype, device=torch_device)

    def write(self, row: int, media: EncodedMedia, first: int, count: int) -> None:
        """Rows ``first : first + count`` of ``media`` become rows ``row : row + count`` of the step."""
        self.embeds_TE[row : row + count].copy_(media.embeds_NE[first : first + count])
        if self.deepstack_TLE is not None:
            assert media.deepstack_LNE is not None, "the encoder made no deepstack features"
            rows_LNE = media.deepstack_LNE[:, first : first + count]
            self.deepstack_TLE[row : row + count].copy_(rows_LNE.transpose(0, 1))

    def rows(self, num_tokens: int) -> tuple[Tensor, Tensor | None]:
        """The first ``num_tokens`` rows of each buffer, and None for features that a model has not: views."""
        features_TLE = self.deepstack_TLE
        return self.embeds_TE[:num_tokens], None if features_TLE is None else features_TLE[:num_tokens]


def embeds_with_media(
    model: CausalModel, input_ids_T: Tensor, is_media_T: Tensor, embeds_TE: Tensor
) -> Tensor:
    """``model.embed(ids)``, and an encoder's row wherever ``is_media`` is set."""
    return model.embed_with_media(input_ids_T, embeds_TE, is_media_T)


def layers_with_media(
    model: CausalModel,
    hidden_TE: Tensor,
    positions: Tensor,
    is_media_T: Tensor,
    deepstack_TLE: Tensor | None,
) -> Tensor:
    """``model.layers`` on what ``embeds_with_media`` has made; rows that are no media have no features."""
    return model.layers(hidden_TE, positions, *_features(is_media_T, deepstack_TLE))


def media_to_tail(
    model: CausalModel,
    hidden_TE: Tensor,
    positions: Tensor,
    is_media_T: Tensor,
    deepstack_TLE: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``model.layers_to_tail`` on the same; what it gives: ``models/base.py``."""
    return model.layers_to_tail(hidden_TE, positions, *_features(is_media_T, deepstack_TLE))


def _features(is_media_T: Tensor, deepstack_TLE: Tensor | None) -> tuple[Tensor, Tensor] | tuple[()]:
    return () if deepstack_TLE is None else (deepstack_TLE.transpose(0, 1), is_media_T)

"""Random weights for ``load_format="dummy"``: to measure and test a model's shapes without its checkpoint.

Values are drawn on the target device from one seeded generator in the order of the checkpoint's names, so the
same seed, shape, dtype and kind of device give the same model. Matrices are small enough that logits of deep
models stay finite; norms are 1, so activations keep their scale. A rank that holds a part of the model draws
each tensor whole and keeps its slice, so all ranks together are the model that one rank would have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from gapless.models.decoder import Decoder
from gapless.models.layers import WeightTarget

_STD = 0.02
_NORMS = ("norm.weight", "norm1.weight", "norm2.weight", "ln_q.weight")


def fill_dummy_weights(
    model: Decoder,
    *,
    seed: int,
    tower: Mapping[str, WeightTarget] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Overwrite every weight of ``model``, and of the ``tower`` beside it: norms with 1, the rest with normal
    values of deviation 0.02."""
    targets = {**model.weight_targets(), **(tower or {})}
    device = model.embedding.device
    generator = torch.Generator(device=device).manual_seed(seed)
    for done, (name, target) in enumerate(targets.items(), start=1):
        if name.endswith(_NORMS):
            target.tensor.fill_(1.0)
        else:
            _fill(target, generator)
        if progress is not None:
            progress("weights", done, len(targets))


def _fill(target: WeightTarget, generator: torch.Generator) -> None:
    if target.part is None and target.tensor.is_contiguous():
        target.tensor.normal_(0.0, _STD, generator=generator)  # experts are large: no second copy of them
    else:
        target.tensor.copy_(target.part_of(_normal(target.shape, target.tensor, generator)))


def _normal(shape: tuple[int, ...], like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    # A fresh contiguous tensor: filling a strided view in place would make values depend on the memory
    # layout.
    values = torch.empty(shape, dtype=like.dtype, device=like.device)
    return values.normal_(0.0, _STD, generator=generator)

"""A product whose result goes into the residual stream and the next norm, as one operator.

Attention's output and the feed-forward's last product have few rows, so programs that each own whole rows
leave half of a GPU idle. But a norm always follows, and it reads each row of the result anyway: so programs
may share the columns, each writing its part of the sum in float32, and the norm adds the parts up. That needs
no atomics, no counters and no kernel of its own, and parts are added in order: results are deterministic.

The operator hides the choice of ``linear_choice.py``, because traced code must not see scratch whose shape
depends on it. Without parts in the choice it is the product and ``fused_add_rms_norm``, one after the other.
``T`` tokens, ``I`` input features, ``E`` hidden size (the rows of the weights), ``P`` parts.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gapless.graphs.ops import register_custom_op
from gapless.kernels.linear import choose_tiles, launch_parts, launch_product
from gapless.kernels.linear_tiles import Tiles
from gapless.kernels.norm import add_parts_rms_norm_into, add_rms_norm_into


def _fake(
    x_TI: Tensor, weight_EI: Tensor, residual_TE: Tensor, norm_weight_E: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    shape = residual_TE.shape
    return residual_TE.new_empty(shape), residual_TE.new_empty(shape)


@register_custom_op(fake=_fake, is_fresh=True)
def linear_add_rms_norm(
    x_TI: Tensor, weight_EI: Tensor, residual_TE: Tensor, norm_weight_E: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``[T, I], [E, I], [T, E], [E] -> [T, E], [T, E]``: ``residual + x @ weight.T`` and the norm of that.

    The product is rounded before it is added, and the sum before it is normed: as in separate steps.
    """
    tiles = choose_tiles(x_TI, weight_EI, is_summed=True)
    if isinstance(tiles, Tiles):
        return launch_summed(x_TI, weight_EI, residual_TE, norm_weight_E, eps, tiles)
    sum_TE, normed_TE = _fake(x_TI, weight_EI, residual_TE, norm_weight_E, eps)
    product_TE = F.linear(x_TI, weight_EI)
    add_rms_norm_into(product_TE, residual_TE, norm_weight_E, eps, sum_TE, normed_TE)
    return sum_TE, normed_TE


def launch_summed(
    x_TI: Tensor, weight_EI: Tensor, residual_TE: Tensor, norm_weight_E: Tensor, eps: float, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """The same with given tiles: for the operator, and for timing and compiling it."""
    sum_TE, normed_TE = _fake(x_TI, weight_EI, residual_TE, norm_weight_E, eps)
    launch_summed_into(x_TI, weight_EI, residual_TE, norm_weight_E, eps, tiles, sum_TE, normed_TE)
    return sum_TE, normed_TE


def launch_summed_into(
    x_TI: Tensor,
    weight_EI: Tensor,
    residual_TE: Tensor,
    norm_weight_E: Tensor,
    eps: float,
    tiles: Tiles,
    sum_TE: Tensor,
    normed_TE: Tensor,
) -> None:
    """``launch_summed`` with its results in ``sum`` and ``normed``, which are contiguous."""
    assert residual_TE.shape == (x_TI.shape[0], weight_EI.shape[0])
    if residual_TE.numel() == 0:
        return
    if tiles.parts == 1:
        product_TE = launch_product(x_TI, weight_EI, None, tiles, is_gated=False)
        add_rms_norm_into(product_TE, residual_TE, norm_weight_E, eps, sum_TE, normed_TE)
    else:
        parts_PTE = launch_parts(x_TI, weight_EI, tiles)
        add_parts_rms_norm_into(parts_PTE, residual_TE, norm_weight_E, eps, sum_TE, normed_TE)

"""The gated activation over a merged gate/up product. ``T`` tokens, ``I`` features of gate and of up."""

from __future__ import annotations

from torch import Tensor

from gapless.graphs.ops import register_custom_op
from gapless.kernels.launch import launch
from gapless.kernels.select import kernels, launch_options, next_power_of_2

_TILE = 1024


def _fake(gate_up_TI: Tensor) -> Tensor:
    return gate_up_TI.new_empty((gate_up_TI.shape[0], gate_up_TI.shape[1] // 2))


@register_custom_op(fake=_fake, is_fresh=True)
def fused_silu_mul(gate_up_TI: Tensor) -> Tensor:
    """``[T, 2I] -> [T, I]``: ``silu(gate) * up``; silu is rounded before the product, as in two steps."""
    out_TI = _fake(gate_up_TI)
    num_tokens, size = out_TI.shape
    if num_tokens == 0:
        return out_TI
    tile = min(_TILE, next_power_of_2(size))
    constants = {
        "SIZE": size,
        "TILE": tile,
        "num_warps": min(max(tile * gate_up_TI.element_size() // (16 * 32), 1), 8),
        **launch_options(gate_up_TI.device),
    }
    args = (gate_up_TI, out_TI, gate_up_TI.stride(0))
    launch(kernels().silu_mul_kernel, (num_tokens, -(-size // tile)), args, constants)
    return out_TI

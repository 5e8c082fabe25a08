"""A model's matrices by product: which shapes are asked for, and their kernels compiled at start-up.

A product has the same shape in every layer, so the matrices of all layers are one group. ``linear_tuner.py``
times a group on its own weights; ``compile_products`` compiles what ``linear_choice.py`` says of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from gapless.kernels.gated_product import can_run_gated, is_aligned
from gapless.kernels.head_product import compile_head
from gapless.kernels.launch import compiling_ahead
from gapless.kernels.linear import gated_product, launch_product, product_of
from gapless.kernels.linear_choice import choose
from gapless.kernels.linear_tiles import Product, Tiles, max_tokens
from gapless.kernels.summed_product import launch_summed


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrices:
    """The weights of one product in every layer, all of one shape, and the bias of the first."""

    weights: tuple[Tensor, ...]
    bias: Tensor | None
    is_gated: bool
    is_summed: bool = False
    """Whether it is ``linear_add_rms_norm`` that multiplies; then there is no bias."""

    def product(self, num_tokens: int) -> Product:
        """Its shape with a bucket of tokens."""
        return product_of(num_tokens, self.weights[0], is_gated=self.is_gated, is_summed=self.is_summed)

    def products(self) -> Iterator[Product]:
        """Every bucket for which there may be a kernel of ours."""
        num_tokens = 1
        while num_tokens <= max_tokens(is_gated=self.is_gated, is_summed=self.is_summed):
            yield self.product(num_tokens)
            num_tokens *= 2


def compile_products(matrices: Iterable[Matrices], head_VE: Tensor | None = None) -> None:
    """Compile every kernel that these products will ask for, and ``head_greedy`` with ``head_VE``, side by
    side: one after another, at their first launches, they would take seconds of every start that does not
    find them in Triton's own store."""
    with compiling_ahead():
        for group in matrices:
            for product in group.products():
                _launch(group, product)
        if head_VE is not None:
            compile_head(head_VE)


def _launch(group: Matrices, product: Product) -> None:
    weight_OI = group.weights[0]
    tiles = choose(product, weight_OI.device)
    if isinstance(tiles, Tiles):
        x_TI = weight_OI.new_empty((product.num_tokens, product.num_in))
        if tiles.parts > 1:
            norm_weight_E = weight_OI.new_empty(product.num_out)
            residual_TE = weight_OI.new_empty((product.num_tokens, product.num_out))
            launch_summed(x_TI, weight_OI, residual_TE, norm_weight_E, 1e-6, tiles)
        else:
            launch_product(x_TI, weight_OI, group.bias, tiles, is_gated=group.is_gated)
    elif tiles is not None and group.bias is None and can_run_gated(weight_OI.device):
        x_TI = weight_OI.new_empty((1, product.num_in))  # compiled alike for any number of tokens
        if is_aligned(x_TI, weight_OI):
            gated_product(x_TI, weight_OI, tiles)

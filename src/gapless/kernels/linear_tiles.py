"""What is chosen among: a product by its shape, and how our kernels cut one up.

Read ``linear_choice.py`` for who chooses, ``linear_rules.py`` for what is built in, ``linear_jit.py`` and
``gated_product_jit.py`` for the kernels.
"""

from __future__ import annotations

import dataclasses

import torch

from gapless.kernels.select import next_power_of_2

MAX_TOKENS = 128
"""With more tokens the tensor cores are busy enough for cuBLAS to be the better choice everywhere, but for
what a gated product spares."""
MAX_GATED_IN_ROWS = 64
"""Above, a gated product is cut up by ``GatedTiles``, and up to ``MAX_GATED_TOKENS`` it may be worth it: gate
and up do not go through memory (``gated_product_jit.py``)."""
MAX_GATED_TOKENS = 4096
MAX_SUMMED_TOKENS = 256
"""Where an addition and a norm follow, they may add up what several programs have of a sum, which spares the
kernel that cuBLAS does that with (``summed_product.py``)."""
MAX_PARTS = 16
"""That a sum is cut into. Each is written and read once more, so many of them cost what they spare."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """The shape of a product; ``num_tokens`` is a bucket (see ``token_bucket``)."""

    num_tokens: int
    num_in: int
    num_out: int
    """Output features; with ``is_gated`` the weights have twice as many rows."""
    is_gated: bool
    is_summed: bool = False
    """Whether the residual addition and a norm follow in the same operator; never with ``is_gated``."""
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        return 2 * self.num_out if self.is_gated else self.num_out


def max_tokens(*, is_gated: bool, is_summed: bool) -> int:
    """With more tokens such a product is always cuBLAS's."""
    if is_gated:
        return MAX_GATED_TOKENS
    return MAX_SUMMED_TOKENS if is_summed else MAX_TOKENS


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """How a kernel of ``linear_jit.py`` cuts the weights up; its arguments are explained there."""

    on_tensor_cores: bool
    block_o: int
    block_i: int
    split: int = 1
    num_early: int
    prefetch: int = 0
    num_warps: int
    num_stages: int = 3
    parts: int = 1
    """Programs that share the columns of a row."""

    def fits(self, product: Product) -> bool:
        """Whether ``product`` may be cut into so many parts: something must add them up, and each begins on
        32 bytes of a row, so that it is read as fast as a whole one."""
        if self.parts == 1:
            return True
        return self.on_tensor_cores and product.is_summed and product.num_in % (16 * self.parts) == 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GatedTiles:
    """How the kernel of ``gated_product_jit.py`` cuts a product up; its arguments are explained there."""

    block_t: int
    block_o: int
    block_i: int
    num_stages: int
    shared_by: int
    skew: int

    def fits(self, product: Product) -> bool:
        """Whether the kernel can take these tiles: a tile fills the ring at least once, and rows of results
        are multiples of 16 bytes, as those of operands are (``gated_product.is_aligned``)."""
        return (
            product.num_in % 8 == product.num_out % 8 == 0
            and product.num_in > (self.num_stages - 1) * self.block_i
        )


def takes_gated_tiles(product: Product) -> bool:
    """Whether a choice for ``product`` is one of ``GatedTiles``, not of ``Tiles``."""
    return product.is_gated and MAX_GATED_IN_ROWS < product.num_tokens <= MAX_GATED_TOKENS


def token_bucket(num_tokens: int) -> int:
    """Calls with up to this many tokens share a choice."""
    return next_power_of_2(max(num_tokens, 1))

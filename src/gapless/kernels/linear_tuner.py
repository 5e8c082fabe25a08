"""Times the kernels of small matrix products against cuBLAS, on the model's own weights, on this GPU.

Runs when ``GAPLESS_TUNE_LINEAR=1`` asks for it, once after loading and before the first capture; every later
start on the same GPU and software finds the result in the store of ``linear_choice.py``. It takes a minute or
two, most of it compilation, and so is never part of an ordinary start. A candidate multiplies the matrices of
many layers one after another in a CUDA graph, because that is how a step will run it: with weights that no
cache holds, and with a kernel ahead under which it may start. A product with a norm behind it is timed with
that norm. A candidate that cannot be compiled or launched is no candidate.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from itertools import product as cross
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.kernels.activation import fused_silu_mul
from gapless.kernels.gated_product import can_run_gated, is_aligned
from gapless.kernels.linear import gated_product, launch_product
from gapless.kernels.linear_choice import store_choices
from gapless.kernels.linear_rules import default_tiles
from gapless.kernels.linear_tiles import MAX_PARTS, GatedTiles, Product, Tiles, takes_gated_tiles
from gapless.kernels.matrices import Matrices
from gapless.kernels.norm import fused_add_rms_norm
from gapless.kernels.select import launch_errors, next_power_of_2
from gapless.kernels.summed_product import launch_summed

logger = logging.getLogger(__name__)

_REPEATS = 7
_MIN_BYTES = 200 << 20
"""Weights read by one timed run: several times the second-level cache."""
_SHARED_BYTES = 200_000
"""Of one program, at most; a Hopper processor has 227 KiB."""
_REGISTERS = 160
"""Of one thread for sums and for weights in flight, at most; a kernel needs some more, and has up to 255."""
_GAIN = 0.98
"""A kernel of ours must be faster than cuBLAS by this factor: the compiled kernel costs start-up time."""


Timer = Callable[[Callable[[], None]], float]


def tune_products(
    groups: Iterable[Matrices], *, timer: Timer | None = None
) -> dict[Product, Tiles | GatedTiles | None]:
    """Time every bucket of tokens for every group, store the choices and return them. With many tokens only
    what the kernel of gated products takes."""
    choices: dict[Product, Tiles | GatedTiles | None] = {}
    for group in groups:
        for product in group.products():
            if not takes_gated_tiles(product) or _may_be_gated(group):
                choices[product] = best_tiles(product, _enough(group.weights), timer or time_in_graph)
        store_choices(choices, group.weights[0].device)
    return choices


def best_tiles(product: Product, weights: tuple[Tensor, ...], timer: Timer) -> Tiles | GatedTiles | None:
    """The fastest tiles for ``product``, or None where cuBLAS is as fast."""
    library, launch_with = _operators(product, weights[0].device)
    best: Tiles | GatedTiles | None = None
    limit = timer(lambda: _for_each(weights, library)) * _GAIN
    for tiles in gated_candidates(product) if takes_gated_tiles(product) else candidates(product):

        def ours(tiles: Tiles | GatedTiles = tiles) -> None:
            _for_each(weights, lambda weight: launch_with(weight, tiles))

        try:
            took = timer(ours)
        except launch_errors() as error:
            logger.debug("%s with %s: %s", product, tiles, error)
            continue
        if took < limit:
            best, limit = tiles, took
    return best


def _operators(
    product: Product, device: torch.device
) -> tuple[Callable[[Tensor], object], Callable[[Tensor, Tiles | GatedTiles], object]]:
    """What is timed, with one matrix: by cuBLAS, and with given tiles."""
    like: dict[str, Any] = {"dtype": product.dtype, "device": device}
    x_TI = torch.randn(product.num_tokens, product.num_in, **like)
    if product.is_summed:
        residual_TE = torch.randn(product.num_tokens, product.num_out, **like)
        end = residual_TE, torch.ones(product.num_out, **like), 1e-6
        return (
            lambda weight: fused_add_rms_norm(F.linear(x_TI, weight), *end),
            lambda weight, tiles: launch_summed(x_TI, weight, *end, tiles),
        )

    def library(weight: Tensor) -> None:
        out = F.linear(x_TI, weight)
        if product.is_gated:
            fused_silu_mul(out)

    def launch_with(weight: Tensor, tiles: Tiles | GatedTiles) -> None:
        if isinstance(tiles, Tiles):
            launch_product(x_TI, weight, None, tiles, is_gated=product.is_gated)
        else:
            gated_product(x_TI, weight, tiles)

    return library, launch_with


def _for_each(weights: tuple[Tensor, ...], run: Callable[[Tensor], object]) -> None:
    for weight in weights:
        run(weight)


def candidates(product: Product) -> Iterator[Tiles]:
    """Tiles worth timing, the built-in choice first; all of them fit a program's registers and memory."""
    seen: set[Tiles] = set()
    for tiles in _summed_candidates(product) if product.is_summed else _all_candidates(product):
        if tiles not in seen:
            seen.add(tiles)
            yield tiles


def gated_candidates(product: Product) -> Iterator[GatedTiles]:
    """Tiles of gated products with many tokens that are worth timing, of 128 tokens by 64 input features."""
    for block_o, num_stages, shared_by, skew in (
        (128, 4, 16, 0),
        (128, 4, 16, 3),
        (128, 4, 8, 3),
        (64, 6, 16, 4),
        (32, 6, 16, 0),
    ):
        tiles = GatedTiles(
            block_t=128, block_o=block_o, block_i=64, num_stages=num_stages, shared_by=shared_by, skew=skew
        )
        if tiles.fits(product):
            yield tiles


def time_in_graph(run: Callable[[], None]) -> float:
    """Median milliseconds of ``run`` in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(_REPEATS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def _all_candidates(product: Product) -> Iterator[Tiles]:
    default = default_tiles(product)
    if default is not None:
        yield default
    if product.num_tokens <= 2:
        for block_o, block_i, num_warps in cross((4, 8, 16), (512, 1024, 2048), (4, 8)):
            num_early = min(-(-product.num_in // block_i), 4)
            if block_o * block_i // (32 * num_warps) >= 16 and num_early * block_o * block_i <= 1 << 15:
                yield Tiles(
                    on_tensor_cores=False,
                    block_o=block_o,
                    block_i=block_i,
                    num_early=num_early,
                    num_warps=num_warps,
                )
    tokens_pad = max(product.num_tokens, 8)
    for split, block_o, block_i in cross((4, 8), (16, 32), (64, 128, 256)):
        num_steps = math.ceil(product.num_in / (split * block_i))
        for num_early in {min(num_steps, 2), 0}:
            num_stages = num_early + (3 if num_early < num_steps else 0)
            if (block_o + tokens_pad) * split * block_i * 2 * num_stages <= _SHARED_BYTES:
                yield Tiles(
                    on_tensor_cores=True,
                    block_o=block_o,
                    block_i=block_i,
                    split=split,
                    num_early=num_early,
                    num_warps=split,
                )
    for block_o, block_i, num_stages in ((32, 256, 5), (64, 128, 4), (64, 256, 4), (128, 128, 4)):
        if (block_o + tokens_pad) * block_i * 2 * num_stages <= _SHARED_BYTES:
            yield Tiles(
                on_tensor_cores=True,
                block_o=block_o,
                block_i=block_i,
                num_early=0,
                num_warps=4,
                num_stages=num_stages,
            )


def _summed_candidates(product: Product) -> Iterator[Tiles]:
    """Whole rows and rows in parts. Of the latter those that keep a good part of the processors busy, or
    all of them twice."""
    default, whole = default_tiles(product), dataclasses.replace(product, is_summed=False)
    if default is not None:
        yield default
    if product.num_tokens <= 8:
        yield from _all_candidates(whole)
    elif (of_whole_rows := default_tiles(whole)) is not None:
        yield of_whole_rows
    fewest_parts = 2 if product.num_tokens <= 8 else 1
    for block_o, block_i, split in _forms(product.num_tokens):
        num_blocks, parts = -(-product.num_rows // block_o), fewest_parts
        while parts <= MAX_PARTS:
            if 36 <= num_blocks * parts <= 320:
                yield from _in_parts(product, parts, block_o, block_i, split)
            parts *= 2


def _forms(num_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Rows and columns of a step, and groups of warps, for so many tokens."""
    if num_tokens <= 64:
        yield from cross((16, 32), (64, 128, 256), (4,))
    if num_tokens > 8:
        # Products of 64 rows are the tensor cores' fastest, but with a few tokens weights are what counts.
        yield from cross((32, 64) if num_tokens <= 64 else (64, 128), (64, 128), (1,))


def _in_parts(product: Product, parts: int, block_o: int, block_i: int, split: int) -> Iterator[Tiles]:
    """With as much in flight before the wait as can be, and for one group of warps also with nothing."""
    columns, tokens_pad = product.num_in // parts, max(product.num_tokens, 8)
    step, num_stages = split * block_i, 3 if split > 1 else 4
    num_steps = -(-columns // step)
    early = (0, min(num_steps, 2)) if split == 1 else (min(num_steps, 2),)
    for num_early, num_warps in cross(early, (4, 8) if block_o * tokens_pad > 1 << 12 else (4,)):
        rest = columns - num_early * step
        tiles = Tiles(
            on_tensor_cores=True,
            block_o=block_o,
            block_i=block_i,
            split=split,
            num_early=num_early,
            prefetch=max(next_power_of_2(rest), 64) if num_early and rest > 0 else 0,
            num_warps=num_warps,
            num_stages=num_stages,
            parts=parts,
        )
        in_flight = num_early + (num_stages if rest > 0 else 0)
        registers = (block_o * tokens_pad * split + num_early * block_o * step // 2) // (32 * num_warps)
        is_too_large = (block_o + tokens_pad) * step * 2 * in_flight > _SHARED_BYTES or registers > _REGISTERS
        if tiles.fits(product) and step <= columns and not is_too_large:
            yield tiles


def _may_be_gated(group: Matrices) -> bool:
    return (
        group.bias is None and can_run_gated(group.weights[0].device) and is_aligned(*group.weights[:1] * 2)
    )


def _enough(weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """As many as no cache holds."""
    return weights[: max(2, math.ceil(_MIN_BYTES / weights[0].nbytes))]

"""Which kernel multiplies: tiles of ours, or cuBLAS, for every shape of a product with few tokens, and of a
gated one with many.

A choice depends on the shape alone and never changes once asked for: a graph captured at start-up and the
eager run it must equal bit for bit have to agree. It comes from timings of this very GPU if
``linear_tuner.py`` has stored some, else from ``default_tiles``, a rule made from timings on an H200. The
store is a file of JSON; its name holds the GPU, the versions of torch and Triton and the text of the kernels,
so timings of anything else are never read. ``None`` in place of tiles means cuBLAS.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gapless.env import read_env
from gapless.kernels.select import is_hopper, next_power_of_2

logger = logging.getLogger(__name__)

MAX_TOKENS = 64
"""With more tokens the tensor cores are busy enough for cuBLAS to be the better choice everywhere, but for
what a gated product spares: the way of gate and up through memory (``gated_product_jit.py``)."""
MAX_GATED_TOKENS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """The shape of a product; ``num_tokens`` is a bucket (see ``token_bucket``)."""

    num_tokens: int
    num_in: int
    num_out: int
    """Output features; with ``is_gated`` the weights have twice as many rows."""
    is_gated: bool
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        return 2 * self.num_out if self.is_gated else self.num_out


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
    return product.is_gated and MAX_TOKENS < product.num_tokens <= MAX_GATED_TOKENS


def token_bucket(num_tokens: int) -> int:
    """Calls with up to this many tokens share a choice."""
    return next_power_of_2(max(num_tokens, 1))


def choose(product: Product, device: torch.device) -> Tiles | GatedTiles | None:
    """The tiles for ``product`` on ``device``, or None for cuBLAS."""
    made = _choices_made(device)
    if product not in made:
        stored = _stored_choices(device)
        made[product] = stored[product] if product in stored else built_in_choice(product, device)
    return made[product]


def built_in_choice(product: Product, device: torch.device) -> Tiles | GatedTiles | None:
    """What is chosen without timings. The rules were made on a Hopper GPU and speak for those alone."""
    if not is_hopper(device):
        return None
    return default_gated_tiles(product) if takes_gated_tiles(product) else default_tiles(product)


@functools.cache
def default_tiles(product: Product) -> Tiles | None:
    """The rule, from ``benchmarks/results/h200_linear.json``: every matrix of Qwen3-0.6B and Llama-3.1-8B."""
    if product.num_tokens > MAX_TOKENS:
        return None
    if product.dtype not in (torch.bfloat16, torch.float16) or product.num_in % 16 != 0:
        return None  # rows that are not aligned would be read two bytes at a time
    if product.num_tokens == 1:
        return _gemv_tiles(product.num_in)
    if product.num_tokens <= 8:
        return _tiles_for_a_few(product)
    if product.num_tokens <= 32:
        return _tiles_for_some(product)
    if product.num_in <= 1024 and product.is_gated and product.num_rows <= 16384:
        return _streaming_tiles()
    return None


_WIDE = GatedTiles(block_t=128, block_o=128, block_i=64, num_stages=4, shared_by=16, skew=0)
_NARROW = GatedTiles(block_t=128, block_o=64, block_i=64, num_stages=6, shared_by=16, skew=4)
_GATED = {
    (1024, 3072): {256: _NARROW, 512: _NARROW, 1024: _NARROW, 2048: _WIDE, 4096: _WIDE},
    (4096, 14336): {256: _WIDE, 1024: _WIDE, 2048: _WIDE, 4096: _WIDE},
}
"""By input and output features, then by tokens."""


def default_gated_tiles(product: Product) -> GatedTiles | None:
    """Where our kernel took at most 0.98 of cuBLAS and the activation's kernel, in
    ``benchmarks/results/h200_gate_up_products.json``: gate and up of Qwen3-0.6B and Llama-3.1-8B in bfloat16.
    A table and no rule: with 512 tokens of the latter cuBLAS wins, and of other shapes nothing is known, so
    those take our kernel after timings of their own alone."""
    if product.dtype is not torch.bfloat16:
        return None
    return _GATED.get((product.num_in, product.num_out), {}).get(product.num_tokens)


def _gemv_tiles(num_in: int) -> Tiles:
    is_long = num_in > 4096  # such rows stream; of shorter ones all is in flight before the wait
    block_i = 2048 if is_long else min(1024, next_power_of_2(num_in))
    num_early = 2 if is_long else -(-num_in // block_i)
    return Tiles(on_tensor_cores=False, block_o=4, block_i=block_i, num_early=num_early, num_warps=4)


def _tiles_for_a_few(product: Product) -> Tiles:
    """Little arithmetic: warps share the columns of a few rows, all in flight before the wait if they fit."""
    num_in, num_rows = product.num_in, product.num_rows
    if num_in <= 1024 and 6144 <= num_rows <= 16384:
        return _split_tiles(block_o=32, block_i=128, split=4, num_early=2)
    if num_in <= 2048 and num_rows <= 16384:
        return _split_tiles(block_o=16, block_i=256, split=4, num_early=-(-num_in // 1024))
    if num_in <= 4096 and num_rows <= 2048:
        return _split_tiles(block_o=16, block_i=256, split=8, num_early=2)
    if num_in > 2048 and num_rows > 65536:
        return _split_tiles(block_o=32, block_i=64, split=4, num_early=2)
    num_stages = 3 if num_in <= 2048 else 5
    return _split_tiles(block_o=16, block_i=128, split=4, num_early=0, num_stages=num_stages)


def _tiles_for_some(product: Product) -> Tiles:
    """Every program reads all activations, so it should own many rows, where there are enough of them."""
    num_in, num_rows = product.num_in, product.num_rows
    if num_rows <= 2048:
        if num_in <= 2048:
            return _split_tiles(block_o=16, block_i=256, split=4, num_early=-(-num_in // 1024))
        block_i = 256 if product.num_tokens <= 16 else 128  # shared memory has no room for more
        return _split_tiles(block_o=16, block_i=block_i, split=4, num_early=0, prefetch=2048, num_stages=4)
    if num_rows <= 4096 and num_in >= 4096:
        return _split_tiles(block_o=32, block_i=64, split=4, num_early=0, num_stages=5)
    if num_in <= 1024 and num_rows <= 16384 and product.num_tokens > 16:
        return _streaming_tiles(num_early=2)
    if num_in <= 1024 and num_rows > 65536 and product.num_tokens <= 16:
        return _streaming_tiles(block_i=64, num_stages=6)
    return _streaming_tiles()


def _split_tiles(
    *, block_o: int, block_i: int, split: int, num_early: int, prefetch: int = 0, num_stages: int = 3
) -> Tiles:
    return Tiles(
        on_tensor_cores=True,
        block_o=block_o,
        block_i=block_i,
        split=split,
        num_early=num_early,
        prefetch=prefetch,
        num_warps=split,
        num_stages=num_stages,
    )


def _streaming_tiles(*, block_i: int = 128, num_early: int = 0, num_stages: int = 4) -> Tiles:
    return Tiles(
        on_tensor_cores=True,
        block_o=64,
        block_i=block_i,
        num_early=num_early,
        num_warps=4,
        num_stages=num_stages,
    )


def store_choices(choices: Mapping[Product, Tiles | GatedTiles | None], device: torch.device) -> None:
    """Keep ``choices``, here and on disk, beside those stored before. Products that have been asked for keep
    their choice in this process. A folder that cannot be written costs a warning."""
    stored = _stored_choices(device)
    stored.update(choices)
    path = store_path(device)
    entries = [{"product": _to_json(p), "tiles": t and _to_json(t)} for p, t in stored.items()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(entries, indent=1))
        partial.replace(path)  # at once, for whoever else starts now
    except OSError as error:
        logger.warning("Timings of matrix products cannot be stored in %s (%s)", path, error)


def store_path(device: torch.device) -> Path:
    """Where timings of ``device`` are kept."""
    folder = read_env().cache_dir or Path.home() / ".cache" / "gapless"
    versions = (torch.__version__, importlib.metadata.version("triton"))
    described = "\n".join((_device_name(device), *versions, _kernel_source()))
    return folder / f"linear-{hashlib.sha256(described.encode()).hexdigest()[:16]}.json"


def forget_stored_choices() -> None:
    """Read the store again at the next choice."""
    _stored_choices.cache_clear()
    _choices_made.cache_clear()


@functools.cache
def _choices_made(device: torch.device) -> dict[Product, Tiles | GatedTiles | None]:
    """What this process has been told: graphs may hold it."""
    return {}


@functools.cache
def _stored_choices(device: torch.device) -> dict[Product, Tiles | GatedTiles | None]:
    """Read once per process and device: a choice must not change under captured graphs."""
    path: Path | None = None
    try:
        path = store_path(device)
        return dict(_choice_of(entry) for entry in json.loads(path.read_text()))
    except (FileNotFoundError, importlib.metadata.PackageNotFoundError):
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning(
            "Stored timings of matrix products in %s cannot be read (%s: %s): built-in choices are used; "
            "remove the file or run once with GAPLESS_TUNE_LINEAR=1",
            path,
            type(error).__name__,
            error,
        )
        return {}


def _choice_of(entry: dict[str, Any]) -> tuple[Product, Tiles | GatedTiles | None]:
    product = _product_of(entry["product"])
    if not entry["tiles"]:
        return product, None
    if takes_gated_tiles(product):
        return product, _gated_tiles_of(entry["tiles"], product)
    return product, _tiles_of(entry["tiles"])


def _to_json(value: Product | Tiles | GatedTiles) -> dict[str, Any]:
    fields = dataclasses.asdict(value)
    return {name: str(v) if isinstance(v, torch.dtype) else v for name, v in fields.items()}


def _product_of(entry: dict[str, Any]) -> Product:
    dtype = getattr(torch, str(entry["dtype"]).removeprefix("torch."))
    _check_numbers(entry, but={"dtype"})
    return Product(**{**entry, "dtype": dtype})


def _tiles_of(entry: dict[str, Any]) -> Tiles:
    _check_numbers(entry, but=set())
    tiles = Tiles(**entry)
    fewest, most = (0, 2) if tiles.on_tensor_cores else (1, 4)
    sizes = (tiles.block_o, tiles.block_i, tiles.split, tiles.num_warps)
    if not fewest <= tiles.num_early <= most or tiles.num_stages < 1 or tiles.prefetch < 0:
        raise ValueError(f"no kernel has such tiles: {tiles}")
    if any(size < 1 or size & (size - 1) for size in sizes):
        raise ValueError(f"not all sizes are powers of two: {tiles}")
    return tiles


def _gated_tiles_of(entry: dict[str, Any], product: Product) -> GatedTiles:
    _check_numbers(entry, but=set())
    tiles = GatedTiles(**entry)
    sizes = (tiles.block_t, tiles.block_o, tiles.block_i)
    if any(size < 64 or size & (size - 1) for size in sizes) or tiles.shared_by < 1:
        raise ValueError(f"no kernel has such tiles: {tiles}")
    if not 0 <= tiles.skew < tiles.num_stages or not tiles.fits(product):
        raise ValueError(f"not as many steps as buffers: {tiles}")
    return tiles


def _check_numbers(entry: dict[str, Any], *, but: set[str]) -> None:
    wrong = [name for name, value in entry.items() if name not in but and not isinstance(value, int)]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: not a number")


def _kernel_source() -> str:
    names = ("linear_jit.py", "gated_product_jit.py")
    return "".join(Path(__file__).with_name(name).read_text() for name in names)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

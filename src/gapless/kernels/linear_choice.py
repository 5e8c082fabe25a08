"""Which kernel multiplies: tiles of ours, or cuBLAS, for every shape of a product with few tokens, of one
with some more that a norm follows, and of a gated one with many.

A choice depends on the shape alone and never changes once asked for: a graph captured at start-up and the
eager run it must equal bit for bit have to agree. It comes from timings of this very GPU if
``linear_tuner.py`` has stored some, else from ``default_tiles``, a rule made from timings on an H200. The
store is a file of JSON; its name holds the GPU, the versions of torch and Triton and the text of the kernels
that multiply, so timings of other ones are never read. ``None`` in place of tiles means cuBLAS.
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
from gapless.kernels.linear_rules import default_gated_tiles, default_tiles
from gapless.kernels.linear_tiles import MAX_PARTS, GatedTiles, Product, Tiles, takes_gated_tiles
from gapless.kernels.select import is_hopper

logger = logging.getLogger(__name__)


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
    return product, _tiles_of(entry["tiles"], product)


def _to_json(value: Product | Tiles | GatedTiles) -> dict[str, Any]:
    fields = dataclasses.asdict(value)
    return {name: str(v) if isinstance(v, torch.dtype) else v for name, v in fields.items()}


def _product_of(entry: dict[str, Any]) -> Product:
    dtype = getattr(torch, str(entry["dtype"]).removeprefix("torch."))
    _check_numbers(entry, but={"dtype"})
    return Product(**{**entry, "dtype": dtype})


def _tiles_of(entry: dict[str, Any], product: Product) -> Tiles:
    _check_numbers(entry, but=set())
    tiles = Tiles(**entry)
    fewest, most = (0, 2) if tiles.on_tensor_cores else (1, 4)
    sizes = (tiles.block_o, tiles.block_i, tiles.split, tiles.num_warps, tiles.parts)
    if not fewest <= tiles.num_early <= most or tiles.num_stages < 1:
        raise ValueError(f"no kernel has such tiles: {tiles}")
    if tiles.prefetch != 0 and (tiles.prefetch < 64 or tiles.prefetch & (tiles.prefetch - 1)):
        raise ValueError(f"prefetch is neither 0 nor a power of two of at least 64 columns: {tiles}")
    if any(size < 1 or size & (size - 1) for size in sizes):
        raise ValueError(f"not all sizes are powers of two: {tiles}")
    if tiles.parts > MAX_PARTS or not tiles.fits(product):
        raise ValueError(f"{product} cannot be cut into {tiles.parts} parts")
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

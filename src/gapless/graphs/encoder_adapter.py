"""What the encoder runner asks of an encoder: inputs, outputs, sizes, and a forward over static memory.

An encoder turns *items* (images, videos, anything of its own size) into rows. Everything that depends on an
item's shape (boundaries, positions, the order of windows) is computed on the host before the forward, so that
the forward is a function of static tensors alone. Counts are named like the symbols of the input schema and
add up over items, so several items run as one. ``ImageBatch`` is the adapter of every encoder of images of
one shape (CLIP, SigLIP, DINOv2); a tower with variable lengths implements ``EncoderAdapter`` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from gapless.errors import ConfigError
from gapless.graphs.buffers import Value
from gapless.graphs.encoder_budgets import Sizes
from gapless.graphs.input_field import InputField, dim_size
from gapless.graphs.runner import OutputField, prefix_of

ItemT = TypeVar("ItemT", contravariant=True)

Values = Mapping[str, Value]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspace:
    """Static scratch that every graph of an encoder shares, made once at its largest size; dimensions as in
    ``InputField.dims``."""

    name: str
    dims: tuple[str | int, ...]
    dtype: torch.dtype

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(dim_size(dim, sizes) for dim in self.dims)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What of a run does not live in tensors, and so is frozen by a capture."""

    limits: Sizes
    """Host numbers that kernels are launched with (the longest segment): right for every smaller value."""
    segmentation: Hashable = None
    """All boundaries, where the attention needs them on the host; None where it reads them on the device."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncoderRun:
    """One forward: static memory of one size under capture and at replay, tensors of its own when eager."""

    tensors: Mapping[str, Tensor]
    sizes: Sizes
    bounds: Bounds
    workspaces: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        """An input, or a workspace."""
        found = self.tensors.get(name)
        return self.workspaces[name] if found is None else found


class EncoderAdapter(Protocol[ItemT]):
    """An encoder as the runner sees it."""

    symbol: str
    """The count that budgets are given in: ``tokens`` where items have lengths."""
    granule: int
    """A run's ``symbol`` count is always a multiple of it."""
    fields: tuple[InputField, ...]
    outputs: tuple[OutputField, ...]
    """Their first dimension is one symbol: an item owns as many rows as it counts."""
    workspaces: tuple[Workspace, ...]

    def sizes_of(self, item: ItemT) -> Sizes:
        """Every symbol's count for one item."""

    def most(self, count: int) -> Sizes:
        """The most of every symbol that a run with ``count`` of ``symbol`` can have: rounded up."""

    def bounds_of(self, items: Sequence[ItemT]) -> Bounds:
        """What a graph of exactly these items freezes."""

    def worst_bounds(self, count: int) -> Bounds:
        """What a graph for any items of up to ``count`` may freeze. Its ``segmentation`` is None: raises
        ``ConfigError`` where the attention needs boundaries on the host, and so has no such graphs."""

    def prepare(self, items: Sequence[ItemT]) -> Values:
        """The inputs of a run of ``items``, one behind the other, without padding."""

    def dummy(self, sizes: Sizes) -> Values:
        """Legal inputs that fill ``sizes``, for warm-up and capture."""

    def forward(self, run: EncoderRun) -> tuple[Tensor, ...]:
        """One tensor per output, from the tensors of ``run`` alone."""


@runtime_checkable
class CompilesAhead(Protocol):
    """An adapter may have this, too: its kernels are then compiled at once before the first capture."""

    def compiling_ahead(self) -> AbstractContextManager[Callable[[], None]] | None:
        """A block in which a forward has its kernels compiled side by side instead of running them, from the
        call of what it yields on; None where that is not possible."""


@dataclass(kw_only=True)
class ImageBatch:
    """The adapter of an encoder whose items all have one shape: ``forward(images) -> tensor`` or a tuple.

    ``forward`` takes ``[N, *item_shape]`` and returns tensors of shape ``[N, ...]``, rows independent of each
    other. The shapes of its outputs are found by running it once. Raises ``ConfigError`` where it returns
    something else.
    """

    forward_images: Callable[[Tensor], Tensor | tuple[Tensor, ...]]
    item_shape: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype = torch.float32
    symbol: str = "images"
    granule: int = 1
    workspaces: tuple[Workspace, ...] = ()
    fields: tuple[InputField, ...] = field(init=False)
    outputs: tuple[OutputField, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.fields = (
            InputField(
                name="block_input",
                dims=(self.symbol, *self.item_shape),
                dtype=self.dtype,
                poison=float("nan"),
                on_device=True,
            ),
        )
        self.outputs = tuple(
            OutputField(
                name="block_output" if index == 0 else f"block_output_{index}",
                dim=self.symbol,
                row_shape=tuple(result.shape[1:]),
                dtype=result.dtype,
            )
            for index, result in enumerate(self._try())
        )

    def sizes_of(self, item: Tensor) -> Sizes:
        if tuple(item.shape) != self.item_shape:
            raise ConfigError(f"an item of shape {tuple(item.shape)}; this encoder takes {self.item_shape}")
        return {self.symbol: 1}

    def most(self, count: int) -> Sizes:
        return {self.symbol: count}

    def bounds_of(self, items: Sequence[Tensor]) -> Bounds:
        return Bounds(limits={})

    def worst_bounds(self, count: int) -> Bounds:
        return Bounds(limits={})

    def prepare(self, items: Sequence[Tensor]) -> Values:
        return {"block_input": items[0][None] if len(items) == 1 else torch.stack(tuple(items))}

    def dummy(self, sizes: Sizes) -> Values:
        shape = (sizes[self.symbol], *self.item_shape)
        return {"block_input": torch.zeros(shape, dtype=self.dtype, device=self.device)}

    def forward(self, run: EncoderRun) -> tuple[Tensor, ...]:
        return self._results(run["block_input"])

    def _try(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            results = self._results(torch.zeros(2, *self.item_shape, dtype=self.dtype, device=self.device))
        for result in results:
            if not isinstance(result, Tensor) or result.shape[:1] != (2,):
                raise ConfigError(
                    "an encoder of images must return tensors with one row per image; for two images it "
                    f"returned {getattr(result, 'shape', type(result).__name__)}"
                )
        return results

    def _results(self, images: Tensor) -> tuple[Tensor, ...]:
        result = self.forward_images(images)
        return result if isinstance(result, tuple) else (result,)


class StaticMemory:
    """Workspaces at their largest, and the views that a run of some size has of them.

    They are made before the first capture and never again, so growing cannot break an older graph (SGLang
    29216): what needs more than the maximum does not run in a graph.
    """

    def __init__(
        self, workspaces: Sequence[Workspace], *, max_sizes: Sizes, torch_device: torch.device
    ) -> None:
        self._workspaces = tuple(workspaces)
        # static: written in place for the life of this object, never rebound
        self.buffers = {
            w.name: torch.zeros(w.shape(max_sizes), dtype=w.dtype, device=torch_device) for w in workspaces
        }

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def views(self, sizes: Sizes) -> dict[str, Tensor]:
        return {w.name: prefix_of(self.buffers[w.name], w.shape(sizes)) for w in self._workspaces}


def fresh_run(
    adapter: EncoderAdapter[Any], values: Values, *, sizes: Sizes, bounds: Bounds, device: torch.device
) -> EncoderRun:
    """A run in memory of its own, of any size: what eager runs use."""
    tensors: dict[str, Tensor] = {}
    for declared in adapter.fields:
        value = values[declared.name]
        if isinstance(value, np.ndarray):
            # Frozen ones are kept for other runs, and PyTorch would warn of their memory.
            value = torch.from_numpy(np.ascontiguousarray(value) if value.flags.writeable else value.copy())
        tensors[declared.name] = value.to(device=device, dtype=declared.dtype)
    workspaces = {
        w.name: torch.zeros(w.shape(sizes), dtype=w.dtype, device=device) for w in adapter.workspaces
    }
    return EncoderRun(tensors=tensors, sizes=sizes, bounds=bounds, workspaces=workspaces)

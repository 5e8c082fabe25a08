"""Vision towers: Transformers' modules, with all that depends on grids computed before the forward.

``make_tower`` builds one with empty weights; a loader fills ``weight_targets()``. A ``VisionTower`` is also
the adapter that the encoder runner asks (``graphs/encoder_adapter.py``): its static buffers have the names
that encoder runners elsewhere use. In a graph are patch embedding, blocks, merger and deepstack mergers.
Invariant: ``forward`` reads nothing but its run's tensors, and equals the module's own forward. ``P``
patches, ``U`` merged units (rows that come out), ``E`` the decoder's hidden size, ``L`` deepstack layers. The
two families are in ``qwen_vl.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from gapless.attention.encoder_interface import attach_varlen
from gapless.attention.varlen import Segments, VarlenBackend, create_varlen_backend
from gapless.errors import ConfigError, ModelError
from gapless.graphs.context import in_short_warm_up
from gapless.graphs.encoder_adapter import Bounds, EncoderRun, Values, Workspace
from gapless.graphs.encoder_budgets import Sizes
from gapless.graphs.frozen_arrays import frozen
from gapless.graphs.input_field import InputField
from gapless.graphs.runner import OutputField
from gapless.kernels.launch import can_compile_ahead, compiling_ahead, prepare_compiling
from gapless.kernels.select import has_fused_kernels
from gapless.models.layers import WeightTarget
from gapless.models.vision.fused import BlockInputs, FusedBlocks, PatchAngles, merge_gated
from gapless.models.vision.grids import (
    Grid,
    GridArrays,
    GridCache,
    check_grid,
    cumulative,
    joined,
    num_patches_of,
)
from gapless.models.vision.pixels import patch_rows
from gapless.multimodal.items import MediaItem, Normalisation

_NAN = float("nan")
NUM_COLOURS = 3
"""Channels of pixels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where a tower runs, and on what. See ``make_tower``."""

    dtype: torch.dtype
    device: torch.device
    attention: str = "auto"
    is_fused: bool | None = None


class VisionTower:
    """A tower of one family. Subclasses say what a grid's arrays are and how the forward goes."""

    symbol = "tokens"
    has_windows: ClassVar[bool] = False

    def __init__(self, config: Any, module: nn.Module, placement: Placement) -> None:
        dtype, device = placement.dtype, placement.device
        self.config, self.dtype, self.device = config, dtype, device
        self.module = module.eval().requires_grad_(False)
        self.backend: VarlenBackend = create_varlen_backend(placement.attention, device_type=device.type)
        attach_varlen(self.module, self.backend)  # type: ignore[arg-type]
        self.is_fused = has_fused_kernels(device) if placement.is_fused is None else placement.is_fused
        if self.is_fused and config.hidden_act in ("silu", "swish"):
            merge_gated(self.module)
        self.angles = PatchAngles(module.rotary_pos_emb) if self.is_fused else None
        self.merge_size: int = config.spatial_merge_size
        self.granule: int = self.merge_size**2
        self.hidden_size: int = config.out_hidden_size
        self.num_deepstack = len(getattr(config, "deepstack_visual_indexes", ()))
        self.num_channels: int = config.in_channels
        self.patch_values = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.head_size: int = config.hidden_size // config.num_heads
        self.grids = GridCache(self.make_arrays)
        self._sizes = GridCache(self._sizes_of_grid)
        self._bounds_of_one: GridCache[Grid, Bounds] = GridCache(lambda grid: self._bounds([grid]))
        self._inputs: GridCache[tuple[Grid, ...], Mapping[str, np.ndarray]] = GridCache(
            self._host_inputs, num_patches=num_patches_of
        )
        self.fields: tuple[InputField, ...] = self._fields()
        self.outputs: tuple[OutputField, ...] = self._outputs()
        self.workspaces: tuple[Workspace, ...] = self._workspaces()

    def weight_targets(self, prefix: str = "visual.") -> dict[str, WeightTarget]:
        """Checkpoint tensor name → where it goes; ``model.visual.`` in checkpoints of newer Transformers."""
        return {
            f"{prefix}{name}": WeightTarget(tensor=parameter, shape=tuple(parameter.shape))
            for name, parameter in self.module.named_parameters()
        }

    def make_arrays(self, grid: Grid) -> GridArrays:
        """What the forward needs to know of ``grid``."""
        raise NotImplementedError

    def forward(self, run: EncoderRun) -> tuple[Tensor, ...]:
        """``[U, E]``, and ``[U, L, E]`` for a tower with deepstack."""
        raise NotImplementedError

    def sizes_of(self, item: MediaItem) -> Sizes:
        """Raises ``ModelError`` for patches that are not those of the grid or of this tower."""
        sizes, pixels = self._sizes[item.grid_thw], item.normalisation
        patches_PC, num_repeats = item.patches_PC, 1 if pixels is None else pixels.num_repeats
        width, rest = divmod(self.patch_values, num_repeats)
        if rest or patches_PC.shape != (sizes["tokens"], width):
            raise ModelError(
                f"patches of shape {patches_PC.shape} do not belong to grid {item.grid_thw}, which has "
                f"{sizes['tokens']} of {width} values"
            )
        if pixels is not None and (patches_PC.dtype != np.uint8 or self.num_channels != NUM_COLOURS):
            raise ModelError(
                f"patches of type {patches_PC.dtype} in {self.num_channels} channels cannot be "
                "normalised: pixels are uint8 in three"
            )
        return sizes

    def _sizes_of_grid(self, grid: Grid) -> Sizes:
        check_grid(grid, merge_size=self.merge_size)
        num_patches = math.prod(grid)
        sizes = {"tokens": num_patches, "merged": num_patches // self.granule, "segments": grid[0]}
        if self.has_windows:
            window_lens = self.grids[grid].window_lens_W
            assert window_lens is not None
            sizes["windows"] = len(window_lens)
        return sizes

    def most(self, count: int) -> Sizes:
        """In the worst case every merged unit is an image, and a window, of its own."""
        units = -(-count // self.granule)
        sizes = {"tokens": count, "merged": units, "segments": units}
        return sizes | {"windows": units} if self.has_windows else sizes

    def bounds_of(self, items: Sequence[MediaItem]) -> Bounds:
        if len(items) == 1:
            return self._bounds_of_one[items[0].grid_thw]
        return self._bounds([item.grid_thw for item in items])

    def _bounds(self, grids: Sequence[Grid]) -> Bounds:
        arrays = [self.grids[grid] for grid in grids]
        limits = {"max_full_len": max(int(a.full_lens_N.max()) for a in arrays)}
        if self.has_windows:
            limits["max_window_len"] = self.max_window_len
        if not self.backend.fixes_segments:
            return Bounds(limits=limits)
        full = tuple(int(n) for a in arrays for n in a.full_lens_N)
        window = tuple(int(n) for a in arrays if a.window_lens_W is not None for n in a.window_lens_W)
        return Bounds(limits=limits, segmentation=(full, window))

    def worst_bounds(self, count: int) -> Bounds:
        if self.backend.fixes_segments:
            raise ConfigError(
                f"encoder attention {self.backend.name} fixes the boundaries of images in a graph, and a "
                "token budget serves any; use encoder graphs of mode exact, or another attention"
            )
        limits = {"max_full_len": count}
        if self.has_windows:
            limits["max_window_len"] = min(self.max_window_len, count)
        return Bounds(limits=limits)

    @property
    def max_window_len(self) -> int:
        """Patches of a whole window."""
        side: int = self.config.window_size // self.config.patch_size
        return side**2

    def prepare(self, items: Sequence[MediaItem]) -> Values:
        inputs = self._inputs[tuple([item.grid_thw for item in items])]
        return {"patches": patch_rows(items), **inputs}

    def _host_inputs(self, grids: Sequence[Grid]) -> Mapping[str, np.ndarray]:
        """All inputs but the patches: known by identity as long as they are kept."""
        arrays = [self.grids[grid] for grid in grids]
        full_lens_N = joined([a.full_lens_N for a in arrays])
        inputs = {
            "position_ids": joined([a.positions_P2 for a in arrays]),
            "cu_full_len": cumulative(full_lens_N),
            "cu_full_len_kk": full_lens_N,
            **self.prepare_more(arrays),
        }
        return {name: frozen(array) for name, array in inputs.items()}

    def prepare_more(self, arrays: Sequence[GridArrays]) -> Mapping[str, np.ndarray]:
        """The inputs that only this family has."""
        raise NotImplementedError

    def dummy(self, sizes: Sizes) -> Values:
        """One image, a single row of merged units, that fills ``sizes``: every kernel has work to do."""
        return self.prepare([self.blank((1, self.merge_size, sizes["merged"] * self.merge_size))])

    def blank(self, grid: Grid, *, pixels: np.random.Generator | None = None) -> MediaItem:
        """An image or video of one grey, or of random ``pixels``, in the form that a processor gives it, so
        that it takes the same way to the device as those of requests: as pixels, or as values for a tower
        of other than three channels."""
        still = self.config.temporal_patch_size if grid[0] == 1 else 1
        shape, half = (math.prod(grid), self.patch_values // still), (0.5,) * 3
        item = MediaItem(
            kind="image" if grid[0] == 1 else "video",
            patches_PC=np.zeros(shape, np.uint8)
            if pixels is None
            else pixels.integers(0, 256, shape, np.uint8),
            grid_thw=grid,
            ranges=((0, math.prod(grid) // self.granule),),
            normalisation=Normalisation(rescale_factor=1 / 255, mean=half, std=half, num_repeats=still),
        )
        if self.num_channels == NUM_COLOURS:
            return item
        values_PC = np.tile(item.array_PC, (1, still)).astype(np.float32) / 127.5 - 1
        return replace(item, patches_PC=values_PC, normalisation=None)

    def compiling_ahead(self) -> AbstractContextManager[Callable[[], None]] | None:
        return compiling_ahead(begins_late=True) if can_compile_ahead(self.device) else None

    def embed_patches(self, patches_PC: Tensor, projection: nn.Conv3d) -> Tensor:
        """A convolution whose kernel is the whole patch is a matrix product."""
        weight = projection.weight.view(projection.weight.shape[0], -1)
        return nn.functional.linear(patches_PC.to(weight.dtype), weight, projection.bias)

    def blocks_on(self, run: EncoderRun, hidden_PH: Tensor) -> Blocks:
        """This run's blocks, starting from ``hidden``. Cosines and sines of every patch are in the static
        workspace from then on."""
        table, workspace_PHD = run["sin_cos_ws"], run["block_ws"]
        if self.angles is not None:
            self.angles.write(run["position_ids"], table)
            inputs = BlockInputs(table_P2F=table, workspace_PHD=workspace_PHD, backend=self.backend)
            return FusedBlocks(hidden_PH, inputs)
        module: Any = self.module
        cos_PD, sin_PD = module.rotary_pos_emb(hidden_PH, run["position_ids"])
        table[:, 0].copy_(cos_PD)
        table[:, 1].copy_(sin_PD)
        return ModuleBlocks(hidden_PH, table, workspace_PHD)

    def blocks_to_run(self, one_of_each_kind: Iterable[int]) -> Iterator[tuple[int, nn.Module]]:
        """The tower's blocks by index; in a short warm-up those alone."""
        enough = frozenset(one_of_each_kind) if in_short_warm_up() else None
        for index, block in enumerate(cast("nn.ModuleList", self.module.blocks)):
            if enough is None or index in enough:
                yield index, block

    def full_segments(self, run: EncoderRun) -> Segments:
        return self._segments(run, "full", 0)

    def window_segments(self, run: EncoderRun) -> Segments:
        return self._segments(run, "window", 1)

    def _segments(self, run: EncoderRun, kind: str, index: int) -> Segments:
        segmentation: Any = run.bounds.segmentation
        return Segments(
            cu_seqlens=run[f"cu_{kind}_len"],
            cu_seqlens_kk=run[f"cu_{kind}_len_kk"],
            max_len=run.bounds.limits[f"max_{kind}_len"],
            lengths=None if segmentation is None else segmentation[index],
        )

    def _fields(self) -> tuple[InputField, ...]:
        shape = ("tokens", self.patch_values)
        patches = InputField(
            name="patches", dims=shape, dtype=self.dtype, poison=_NAN, on_device=True, from_host=True
        )
        return (
            patches,
            InputField(name="position_ids", dims=("tokens", 2), poison=1),
            InputField(name="cu_full_len", dims=("segments+1",), pad="last"),
            InputField(name="cu_full_len_kk", dims=("segments",)),
        )

    def _outputs(self) -> tuple[OutputField, ...]:
        width = self.hidden_size
        embeds = OutputField(name="block_output", dim="merged", row_shape=(width,), dtype=self.dtype)
        if not self.num_deepstack:
            return (embeds,)
        shape = (self.num_deepstack, width)
        return embeds, OutputField(name="deepstack_output", dim="merged", row_shape=shape, dtype=self.dtype)

    def _workspaces(self) -> tuple[Workspace, ...]:
        """``sin_cos_ws`` has room for ``max_content_len`` patches, like everything here: nothing grows."""
        heads = (self.config.num_heads, self.head_size)
        # Both halves of a head have the same angles: kernels read one.
        width = self.head_size // 2 if self.is_fused else self.head_size
        return (
            Workspace(name="block_input", dims=("tokens", self.config.hidden_size), dtype=self.dtype),
            Workspace(name="block_ws", dims=("tokens", *heads), dtype=self.dtype),
            Workspace(name="sin_cos_ws", dims=("tokens", 2, width), dtype=torch.float32),
        )


class Blocks(Protocol):
    """Blocks of a tower, run one behind the other."""

    def run(self, block: Any, segments: Segments) -> None:
        """``hidden = block(hidden)``."""

    def hidden(self) -> Tensor:
        """What the last block has put out: ``[P, H]``."""


class ModuleBlocks:
    """Transformers' own, as they are."""

    def __init__(self, hidden_PH: Tensor, table_P2D: Tensor, workspace_PHD: Tensor) -> None:
        self._hidden_PH, self._table_P2D, self._workspace_PHD = hidden_PH, table_P2D, workspace_PHD

    def run(self, block: Any, segments: Segments) -> None:
        self._hidden_PH = block(
            self._hidden_PH,
            cu_seqlens=segments.cu_seqlens,
            max_seqlen=segments.max_len,
            position_embeddings=(self._table_P2D[:, 0], self._table_P2D[:, 1]),
            segments=segments,
            workspace_SHD=self._workspace_PHD,
        )

    def hidden(self) -> Tensor:
        return self._hidden_PH


def make_tower(
    model_type: str,
    vision_config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str = "auto",
    is_fused: bool | None = None,
) -> VisionTower:
    """The tower of a model with this ``model_type``, its weights not filled in. ``attention`` names a backend
    of ``attention/varlen.py``. ``is_fused``: on fused kernels, or on Transformers' modules as they are; by
    default as the device allows. Raises ``ModelError`` for another model or a config that it does not take.
    """
    from gapless.models.vision.qwen_vl import FAMILIES

    prepare_compiling(device)
    family = FAMILIES.get(model_type)
    if family is None:
        raise ModelError(
            f"no vision tower for model_type={model_type!r}; there are some for {', '.join(FAMILIES)}"
        )
    return family(
        vision_config, Placement(dtype=dtype, device=device, attention=attention, is_fused=is_fused)
    )


def build_module(
    config_class: Any, module_class: Any, vision_config: Mapping[str, Any], placement: Placement
) -> tuple[Any, nn.Module]:
    """Config and module of Transformers, with parameters of no particular value. Raises ``ModelError`` for
    keys that the config class refuses."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.initialization import no_init_weights

    known = {
        key: value
        for key, value in vision_config.items()
        if key not in ("model_type", "dtype", "torch_dtype")
    }
    try:
        config = config_class(**known)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ModelError(f"vision_config does not fit {config_class.__name__}: {error}") from error
    with torch.device(placement.device), no_init_weights():
        return config, module_class._from_config(config, dtype=placement.dtype)

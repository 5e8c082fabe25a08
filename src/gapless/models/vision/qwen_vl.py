"""The towers of Qwen2.5-VL and Qwen3-VL: Transformers' modules, called part by part.

Qwen2.5-VL orders patches by windows; most of its layers attend within a window, a few within the whole frame,
and the merged rows are put back in order at the end. Qwen3-VL adds learned positions that are interpolated to
each image's grid, attends within frames only, and taps some layers for the decoder (deepstack). Both orders
come from the host as indices, so no sort and no boolean index is in the forward. Shapes as in ``tower.py``,
``H`` the tower's own hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from gapless.graphs.encoder_adapter import EncoderRun
from gapless.graphs.input_field import InputField
from gapless.kernels.select import is_hopper
from gapless.models.vision import grids
from gapless.models.vision.fused import activate_in_products, fused_add_interpolated
from gapless.models.vision.grids import Grid, GridArrays, cumulative, joined, joined_indices
from gapless.models.vision.tower import Placement, VisionTower, build_module


class Qwen25Tower(VisionTower):
    """See the module docstring."""

    has_windows: ClassVar[bool] = True

    def __init__(self, vision_config: Mapping[str, Any], placement: Placement) -> None:
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
            Qwen2_5_VisionTransformerPretrainedModel,
        )

        config, module = build_module(
            Qwen2_5_VLVisionConfig,
            Qwen2_5_VisionTransformerPretrainedModel,
            vision_config,
            placement,
        )
        super().__init__(config, module, placement)
        self.fields += (
            InputField(name="cu_window_len", dims=("windows+1",), pad="last"),
            InputField(name="cu_window_len_kk", dims=("windows",)),
            InputField(name="window_index", dims=("merged",)),
            InputField(name="reverse_index", dims=("merged",)),
        )

    def make_arrays(self, grid: Grid) -> GridArrays:
        merge = self.merge_size
        window_index_U, window_lens_W = grids.windows(
            grid, merge_size=merge, window_size=self.config.window_size, patch_size=self.config.patch_size
        )
        by_unit = grids.positions(grid, merge).reshape(-1, self.granule, 2)
        return GridArrays(
            full_lens_N=grids.full_lens(grid),
            positions_P2=np.ascontiguousarray(by_unit[window_index_U].reshape(-1, 2)),
            window_lens_W=window_lens_W,
            window_index_U=window_index_U,
            reverse_index_U=np.argsort(window_index_U).astype(np.int32),
        )

    def prepare_more(self, arrays: Sequence[GridArrays]) -> Mapping[str, np.ndarray]:
        window_lens_W = joined([a.window_lens_W for a in arrays])
        return {
            "cu_window_len": cumulative(window_lens_W),
            "cu_window_len_kk": window_lens_W,
            "window_index": joined_indices([a.window_index_U for a in arrays]),
            "reverse_index": joined_indices([a.reverse_index_U for a in arrays]),
        }

    def forward(self, run: EncoderRun) -> tuple[Tensor, ...]:
        module: Any = self.module
        blocks = self.blocks_on(run, self._embed(run))
        full, window = self.full_segments(run), self.window_segments(run)
        is_full = [index in module.fullatt_block_indexes for index in range(len(module.blocks))]
        for index, block in self.blocks_to_run(is_full.index(kind) for kind in set(is_full)):
            blocks.run(block, full if is_full[index] else window)
        return (module.merger(blocks.hidden())[run["reverse_index"]],)

    def _embed(self, run: EncoderRun) -> Tensor:
        """Patches in the order of windows, in the static workspace."""
        module: Any = self.module
        embedded_PH = self.embed_patches(run["patches"], module.patch_embed.proj)
        by_unit = embedded_PH.view(-1, self.granule, embedded_PH.shape[-1])
        hidden_PH = run["block_input"]
        # Padding takes rows of the first unit: a value like any other, that no real row looks at.
        return hidden_PH.copy_(by_unit[run["window_index"]].view_as(hidden_PH))


class Qwen3Tower(VisionTower):
    """See the module docstring."""

    def __init__(self, vision_config: Mapping[str, Any], placement: Placement) -> None:
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

        config, module = build_module(Qwen3VLVisionConfig, Qwen3VLVisionModel, vision_config, placement)
        super().__init__(config, module, placement)
        has_tanh = config.hidden_act == "gelu_pytorch_tanh"
        if self.is_fused and has_tanh and self.dtype.itemsize == 2 and is_hopper(self.device):
            activate_in_products(cast("nn.ModuleList", module.blocks))
        taps = 4  # corners of a cell of the learned grid
        self.fields += (
            InputField(name="interp_indices", dims=("tokens", taps), poison=1),
            InputField(
                name="interp_weights", dims=("tokens", taps), dtype=torch.float32, poison=float("nan")
            ),
        )

    def make_arrays(self, grid: Grid) -> GridArrays:
        module: Any = self.module
        indices_P4, weights_P4 = grids.interpolation(
            grid,
            merge_size=self.merge_size,
            num_grid_per_side=module.num_grid_per_side,
            mode=module.interpolation_mode,
            align_corners=module.interpolation_align_corners,
        )
        return GridArrays(
            full_lens_N=grids.full_lens(grid),
            positions_P2=grids.positions(grid, self.merge_size),
            interp_indices_P4=indices_P4,
            interp_weights_P4=weights_P4,
        )

    def prepare_more(self, arrays: Sequence[GridArrays]) -> Mapping[str, np.ndarray]:
        return {
            "interp_indices": joined([a.interp_indices_P4 for a in arrays]),
            "interp_weights": joined([a.interp_weights_P4 for a in arrays]),
        }

    def forward(self, run: EncoderRun) -> tuple[Tensor, ...]:
        module: Any = self.module
        blocks = self.blocks_on(run, self._embed(run))
        segments = self.full_segments(run)
        taps_UE: list[Tensor] = []
        for index, block in self.blocks_to_run([0, *module.deepstack_visual_indexes]):
            blocks.run(block, segments)
            if index in module.deepstack_visual_indexes:
                # in any order: a merger belongs to the layer that it is listed for
                merger = module.deepstack_merger_list[module.deepstack_visual_indexes.index(index)]
                taps_UE.append(merger(blocks.hidden()))
        embeds_UE = module.merger(blocks.hidden())
        return (embeds_UE, torch.stack(taps_UE, dim=1)) if taps_UE else (embeds_UE,)

    def _embed(self, run: EncoderRun) -> Tensor:
        """Patches with their learned positions, in the static workspace."""
        module: Any = self.module
        embedded_PH = self.embed_patches(run["patches"], module.patch_embed.proj)
        hidden_PH, table_SH = run["block_input"], module.pos_embed.weight
        indices_P4, weights_P4 = run["interp_indices"], run["interp_weights"]
        if self.is_fused:
            fused_add_interpolated(embedded_PH, table_SH, indices_P4, weights_P4, hidden_PH)
        else:
            positions_PH = (module.pos_embed(indices_P4) * weights_P4[:, :, None]).sum(1)
            torch.add(embedded_PH, positions_PH.to(embedded_PH.dtype), out=hidden_PH)
        return hidden_PH


FAMILIES: dict[str, type[Qwen25Tower] | type[Qwen3Tower]] = {
    "qwen2_5_vl": Qwen25Tower,
    "qwen3_vl": Qwen3Tower,
    "qwen3_vl_moe": Qwen3Tower,
}

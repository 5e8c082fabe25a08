"""Rotary angles of tokens that have three positions each: temporal, vertical and horizontal (m-rope).

Every frequency of a head belongs to one of the axes and turns with the token's position on it; text has the
same position on all three, which makes it ordinary rotary embedding. A head is not split for it: the cosines
and sines of a step are made once, one row per token, and everything behind reads them as if token ``t`` sat
at position ``t`` of a rotary table. Positions of media may exceed the number of tokens before them (a video
with few frames), so angles are computed and no table limits them. On a GPU ``kernels/mrope.py`` makes the
rows; this forward is its oracle. ``T`` tokens, ``F`` frequencies. Read ``rope.py`` for the frequencies.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gapless.models.rope import RopeConfig, inverse_frequencies

AxisLayout = Literal["chunked", "interleaved"]


class AxisAngles(torch.nn.Module):
    """Makes the rows of cosines and sines of one step; ``RopeConfig.axis_sections`` says which axis turns
    what."""

    def __init__(self, config: RopeConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        assert config.axis_sections is not None
        self.dtype, self.factor = dtype, config.attention_factor
        axes_F = frequency_axes(config.axis_sections, layout=config.axis_layout)
        self.frequencies_F: Tensor
        self.axes_F: Tensor
        self.register_buffer("frequencies_F", inverse_frequencies(config).to(device), persistent=False)
        self.register_buffer(
            "axes_F", torch.tensor(axes_F, dtype=torch.int32, device=device), persistent=False
        )

    def forward(self, positions: Tensor) -> Tensor:
        """``[3, T]``, or ``[T]`` where all axes agree, to ``[T, 2, F]``: cosines (0) and sines (1)."""
        if positions.dim() == 1:
            angles_TF = positions.float().unsqueeze(1) * self.frequencies_F
        else:
            angles_TF = positions.index_select(0, self.axes_F).float().t() * self.frequencies_F
        rows_T2F = torch.stack((angles_TF.cos(), angles_TF.sin()), dim=1)
        if self.factor != 1.0:
            rows_T2F = rows_T2F * self.factor
        return rows_T2F.to(self.dtype)


def frequency_axes(sections: tuple[int, int, int], *, layout: AxisLayout) -> list[int]:
    """The axis (0 temporal, 1 vertical, 2 horizontal) of each frequency, lowest index first.

    ``chunked`` (Qwen2-VL): all of one axis, then all of the next. ``interleaved`` (Qwen3-VL): thw thw …, as
    long as an axis has frequencies left of its section; temporal takes what remains.
    """
    if layout == "chunked":
        return [axis for axis, size in enumerate(sections) for _ in range(size)]
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for index in range(axis, 3 * sections[axis], 3):
            axes[index] = axis
    return axes

"""Which frames of a video a model sees.

The rules are those of Transformers' video processors, number for number: Qwen2.5-VL takes frames at equal
steps from the first one, a multiple of its temporal patch; Qwen3-VL spreads them from the first to the last.
Invariant: indices ascend and lie inside the video. Read ``videos.py`` for who decodes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gapless.errors import RequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoFacts:
    """What sampling decides by."""

    num_frames: int
    fps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameSampling:
    """``spacing``: ``steps`` as Qwen2.5-VL, ``ends`` as Qwen3-VL. ``num_frames`` overrides ``fps``."""

    spacing: Literal["steps", "ends"]
    fps: float = 2.0
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    temporal_patch_size: int = 2

    def choose(self, video: VideoFacts) -> list[int]:
        """Raises ``RequestError`` for a video with fewer frames than were asked for."""
        total = video.num_frames
        if self.num_frames is not None and self.num_frames > total:
            raise RequestError(f"num_frames={self.num_frames}: the video has only {total}")
        if self.spacing == "ends":
            count = self.num_frames or int(total / video.fps * self.fps)
            if self.num_frames is None:
                count = min(max(count, self.min_frames), self.max_frames, total)
            return [int(i) for i in np.linspace(0, total - 1, count).round()]
        patch = self.temporal_patch_size
        if self.num_frames is not None:
            count = round(self.num_frames / patch) * patch
        else:
            most = math.floor(min(self.max_frames, total) / patch) * patch
            wish = min(max(total / video.fps * self.fps, self.min_frames), most, total)
            count = math.floor(wish / patch) * patch
        count = count or min(patch, total)
        step = total / count
        return [min(int(i * step), total - 1) for i in range(count)]

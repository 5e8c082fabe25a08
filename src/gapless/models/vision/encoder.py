"""``MediaEncoder`` over a vision tower and its graphs: what an engine calls for the images of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gapless.graphs.device.base import GraphDevice
from gapless.graphs.encoder import EncoderOptions, EncoderRunner
from gapless.graphs.report import StepLog
from gapless.graphs.store import SharedPool
from gapless.models.vision.base import EncodedMedia
from gapless.models.vision.tower import VisionTower
from gapless.multimodal.items import MediaItem


class TowerEncoder:
    """A tower run by an ``EncoderRunner``; ``options`` say in which mode (``off`` runs eagerly)."""

    def __init__(
        self,
        tower: VisionTower,
        *,
        device: GraphDevice,
        options: EncoderOptions,
        log: StepLog | None = None,
        pool: SharedPool | None = None,
    ) -> None:
        """``log`` counts replays and eager runs beside those of the engine's steps."""
        self.tower = tower
        self.runner: EncoderRunner[MediaItem] = EncoderRunner(
            tower, device=device, options=options, log=log, pool=pool
        )

    def encode(self, items: Sequence[MediaItem]) -> list[EncodedMedia]:
        """See ``MediaEncoder``. Raises ``ModelError`` for patches that the tower does not take."""
        return [
            EncodedMedia(embeds_NE=rows[0], deepstack_LNE=rows[1].transpose(0, 1) if len(rows) > 1 else None)
            for rows in self.runner.run(items)
        ]

    def capture(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        self.runner.capture(on_progress=on_progress)

    def report(self) -> dict[str, Any]:
        return self.runner.report()

    def release(self) -> None:
        self.runner.release()

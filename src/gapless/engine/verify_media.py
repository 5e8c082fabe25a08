"""Verification of what images need: rows of nobody reach nothing, and graphs of the encoder are right.

Batches may show media in two of three rows, always the same ones; whatever lies in the others is stale. A
replay must give the same bits with NaN there as with numbers: comparing it with an eager run is not enough,
which would read the same memory. The encoder runs random images of several sizes packed together, against
padded eager bit for bit, against each image alone within a bound, and with poisoned padding. Read
``verify.py`` for the rest.
"""

from __future__ import annotations

import copy

import numpy as np
import torch

from gapless.engine.media_buffers import MediaBuffers
from gapless.graphs.check import CheckTarget, no_traffic
from gapless.graphs.check_report import CheckReport, sizes_text
from gapless.graphs.compare import bounded_mismatch, exact_mismatch
from gapless.graphs.encoder import EncoderMode, EncoderRunner
from gapless.graphs.modes import Phase
from gapless.models.vision.base import MediaEncoder
from gapless.models.vision.encoder import TowerEncoder
from gapless.models.vision.tower import VisionTower
from gapless.multimodal.items import MediaItem

_NAN = float("nan")
_NAME = "ignores stale media rows"


def may_be_media(num_tokens: int) -> np.ndarray:
    """1 for the rows that batches may fill with media, int32: the same in every batch."""
    return (np.arange(num_tokens, dtype=np.int32) % 3 != 0).astype(np.int32)


def fill_media(media: MediaBuffers) -> None:
    """Random rows where batches may show media, NaN everywhere else."""
    for buffer in _buffers(media):
        buffer.normal_()
    _fill_stale(media, _NAN)


def check_stale_rows(target: CheckTarget, media: MediaBuffers, report: CheckReport, *, seed: int) -> None:
    """Add a result for every captured size to ``report``. Leaves the buffers as ``fill_media`` does."""
    runner, generator = target.runner, torch.Generator().manual_seed(seed)
    mode = runner.strategy.runtime_mode
    with torch.no_grad(), runner.store.device.stream_scope(), no_traffic(runner):
        for descriptor in target.descriptors:
            real = target.real_descriptors(descriptor)[0]
            values, sizes = target.make_values(real, generator), runner.sizes_of(real)
            results = []
            for stale in (_NAN, 1.0):
                _fill_stale(media, stale)
                rows = runner.run(descriptor, mode, values, num_real=sizes)
                results.append([tensor.clone() for tensor in rows])
            mismatch = exact_mismatch(*results)
            detail = None if mismatch is None else str(mismatch)
            report.add(_NAME, target.name, sizes_text(runner.sizes_of(descriptor)), detail)
        _fill_stale(media, _NAN)


def check_encoder(encoder: MediaEncoder, *, tolerance: float, seed: int) -> CheckReport:
    """Every budget, or with exact graphs some sizes, which are captured if they have not been yet. Nothing
    without graphs."""
    report = CheckReport(name=str(Phase.ENCODER))
    if not isinstance(encoder, TowerEncoder) or encoder.runner.mode is EncoderMode.OFF:
        return report
    runner = encoder.runner
    generator = np.random.default_rng(seed)
    log = runner.log
    counts = copy.deepcopy(log.replays), log.eager.copy()
    for size in runner.ladder:
        items = _random_items(encoder.tower, size, generator)
        subject = f"{size} patches"
        runner.run(items)  # captures them in exact mode
        replayed = [tensor for rows in runner.run(items) for tensor in rows]
        padded = [tensor for rows in runner.padded_eager(items) for tensor in rows]
        alone = [tensor for rows in runner.eager(items) for tensor in rows]
        mismatches = {
            "equals padded eager": exact_mismatch(replayed, padded),
            "close to plain eager": bounded_mismatch(padded, alone, tolerance=tolerance),
            "ignores padding": exact_mismatch(_poisoned(runner, items), replayed),
        }
        for name, mismatch in mismatches.items():
            report.add(name, report.name, subject, None if mismatch is None else str(mismatch))
    log.replays, log.eager = counts  # verification is no traffic
    return report


def _poisoned(runner: EncoderRunner[MediaItem], items: list[MediaItem]) -> list[torch.Tensor]:
    assert runner.generation is not None, "it has graphs"
    inputs = runner.generation.memory.inputs
    try:
        inputs.poison = True
        return [tensor for rows in runner.run(items) for tensor in rows]
    finally:
        inputs.poison = False


def _random_items(tower: VisionTower, size: int, generator: np.random.Generator) -> list[MediaItem]:
    """Two wide images and a third on top that together nearly fill ``size`` patches."""
    units = size // tower.granule
    parts = [n for n in (units // 2, units // 3, max(1, units // 8)) if n]
    return [tower.blank((1, tower.merge_size, n * tower.merge_size), pixels=generator) for n in parts]


def _fill_stale(media: MediaBuffers, value: float) -> None:
    for buffer in _buffers(media):
        is_stale_T = torch.from_numpy(may_be_media(len(buffer))) == 0
        buffer[is_stale_T.to(buffer.device)] = value


def _buffers(media: MediaBuffers) -> list[torch.Tensor]:
    return [buffer for buffer in (media.embeds_TE, media.deepstack_TLE) if buffer is not None]

"""Verification of the buffers that images come in: rows of nobody reach nothing.

Batches may show media in two of three rows, always the same ones; whatever lies in the others is stale. A
replay must give the same bits with NaN there as with numbers: comparing it with an eager run is not enough,
which would read the same memory. Read ``verify.py`` for the rest.
"""

from __future__ import annotations

import numpy as np
import torch

from gapless.engine.media_buffers import MediaBuffers
from gapless.graphs.check import CheckTarget, no_traffic
from gapless.graphs.check_report import CheckReport, sizes_text
from gapless.graphs.compare import exact_mismatch

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


def _fill_stale(media: MediaBuffers, value: float) -> None:
    for buffer in _buffers(media):
        is_stale_T = torch.from_numpy(may_be_media(len(buffer))) == 0
        buffer[is_stale_T.to(buffer.device)] = value


def _buffers(media: MediaBuffers) -> list[torch.Tensor]:
    return [buffer for buffer in (media.embeds_TE, media.deepstack_TLE) if buffer is not None]

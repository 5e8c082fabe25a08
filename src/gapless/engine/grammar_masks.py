"""Masks of the rows that follow a grammar: from the matchers' bits to impossible logits.

A bit per token, not a float: 19 KB a row for a vocabulary of 150,000. The bits lie in one static buffer, with
the rows they belong to in front, so a step costs one copy. Invariants: the buffer on the host is written only
after the last copy out of it has ended; a row whose matcher fails keeps all its tokens, and its request ends
with the reason. What must be computed is ``sampling/token_masks.py``; ``kernels/token_mask.py`` does it on a
GPU.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from gapless.engine.step import ScheduledSequence
from gapless.graphs.device.pinned import PinnedSlot
from gapless.kernels import token_mask
from gapless.sampling import token_masks


class GrammarMasks:
    """For at most ``max_num_reqs`` rows; takes its memory with the first grammar."""

    def __init__(
        self, *, max_num_reqs: int, vocab_size: int, torch_device: torch.device, has_fused_kernels: bool
    ) -> None:
        self._max_num_reqs, self._num_words = max_num_reqs, -(-vocab_size // 32)
        self._torch_device, self._has_fused_kernels = torch_device, has_fused_kernels
        self._slot: PinnedSlot | None = None
        self._host: np.ndarray | None = None
        self._device: Tensor | None = None

    def apply(
        self,
        entries: Seq[ScheduledSequence],
        rows: Seq[int],
        logits_RV: Tensor,
        *,
        banned: dict[int, frozenset[int]],
    ) -> dict[int, str]:
        """Mask ``logits_RV[r]`` in place for each ``r`` of ``rows``; ``banned[r]`` as in
        ``GrammarMatcher.fill``. Returns what went wrong, by row."""
        host, device = self._buffers()
        host[: len(rows)] = rows
        bits_KW = host[self._max_num_reqs :].reshape(self._max_num_reqs, self._num_words)
        errors = {}
        for place, row in enumerate(rows):
            matcher = entries[row].sequence.matcher
            assert matcher is not None
            try:
                matcher.fill(bits_KW[place], banned=banned.get(row, ()))
            except Exception as error:  # of this grammar: the other rows go on
                bits_KW[place] = -1
                errors[row] = str(error)
        if self._slot is not None:
            num_words = self._max_num_reqs + len(rows) * self._num_words
            self._slot.send(device.data_ptr(), 4 * num_words)
        rows_K = device[: len(rows)]
        device_KW = device[self._max_num_reqs :].view(self._max_num_reqs, self._num_words)[: len(rows)]
        mask = token_mask.mask_rows if self._has_fused_kernels else token_masks.mask_rows
        mask(logits_RV, device_KW, rows_K)
        return errors

    def _buffers(self) -> tuple[np.ndarray, Tensor]:
        if self._host is None or self._device is None:
            size = self._max_num_reqs * (1 + self._num_words)
            self._device = torch.zeros(size, dtype=torch.int32, device=self._torch_device)
            if self._torch_device.type == "cuda":
                self._slot = PinnedSlot(4 * size, self._torch_device)
                self._host = self._slot.host.view(np.int32)
            else:
                self._host = self._device.numpy()
        if self._slot is not None:
            self._slot.wait()
        return self._host, self._device

"""Which sequence's token counts lie where on the device, and keeping them right.

A sequence with penalties gets a slot of the table when it first samples; the slot is filled with its prompt
once, and every step adds the token it drew, on the device. So the next step can be launched before the host
knows that token. Invariant: a slot is used only if it holds exactly the outputs before the one to be drawn,
in the sequence's present life; after a preemption (the generation differs) or a gap it is filled anew from
what the host knows, which is then everything. The table starts small and doubles, up to one slot for each
request of a step; slots of sequences that do not take part in a step may be taken over. The tensor functions
are in ``sampling/token_counts.py``, their kernels in ``kernels/penalty.py``.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gapless.engine.request import Sequence
from gapless.engine.step import ScheduledSequence
from gapless.errors import GaplessError
from gapless.kernels import penalty
from gapless.sampling import token_counts
from gapless.sampling.sampler import to_device

_FIRST_SLOTS = 8


def most_bytes(*, max_num_reqs: int, vocab_size: int) -> int:
    """What a full table takes, with the half-size one it grows out of."""
    return (max_num_reqs + max_num_reqs // 2) * vocab_size * torch.int32.itemsize


class PenaltyTable:
    """Token counts of at most ``max_num_reqs`` sequences on one device, shared by all engines of a runner."""

    def __init__(
        self, *, max_num_reqs: int, vocab_size: int, torch_device: torch.device, has_fused_kernels: bool
    ) -> None:
        self._max_num_reqs, self._has_fused_kernels = max_num_reqs, has_fused_kernels
        self._counts_SV = torch.zeros((0, vocab_size), dtype=torch.int32, device=torch_device)
        self._slots: dict[Sequence, _Slot] = {}  # by identity: numbers repeat between engines
        self._free: list[int] = []
        self._used: list[tuple[_Slot, int, int]] = []
        """What ``apply`` has used since the last ``count``: slot, generation, outputs once it is counted."""
        self._rows_P = self._slots_P = torch.zeros(0, dtype=torch.int32, device=torch_device)

    @property
    def num_bytes(self) -> int:
        return self._counts_SV.nbytes

    def apply(self, entries: Seq[ScheduledSequence], rows: Seq[int], logits_RV: Tensor) -> None:
        """Penalise ``logits_RV[r]`` in place for each ``r`` of ``rows``, which is row of ``entries[r]``."""
        taking_part = {entries[r].sequence for r in rows}
        used = []
        for row in rows:
            entry = entries[row]
            slot = self._slots.get(entry.sequence)
            if slot is None:
                slot = self._slots[entry.sequence] = _Slot(self._take_slot(taking_part))
            num_drawn = entry.end - entry.sequence.num_prompt_tokens
            if (slot.generation, slot.num_counted) != (entry.generation, num_drawn):
                self._fill(slot, entry.sequence, num_drawn)
            used.append((slot, entry.generation, num_drawn + 1))
        self._used = used
        params = [entries[row].sequence.params for row in rows]
        packed = np.empty((5, len(rows)), dtype=np.int32)  # one copy to the device
        packed[0], packed[1] = rows, [slot.index for slot, _, _ in used]
        packed[2:].view(np.float32)[:] = [
            [p.repetition_penalty for p in params],
            [p.presence_penalty for p in params],
            [p.frequency_penalty for p in params],
        ]
        packed_5P = to_device(packed, logits_RV.device)
        self._rows_P, self._slots_P = packed_5P[0], packed_5P[1]
        values_3P = packed_5P[2:].view(torch.float32)
        functions = penalty if self._has_fused_kernels else token_counts
        functions.penalise_rows(
            logits_RV,
            self._counts_SV,
            self._rows_P,
            self._slots_P,
            repetition_P=values_3P[0],
            presence_P=values_3P[1],
            frequency_P=values_3P[2],
        )

    def count(self, tokens_R: Tensor) -> None:
        """Add what was drawn to the slots that the last ``apply`` used."""
        functions = penalty if self._has_fused_kernels else token_counts
        functions.count_drawn(self._counts_SV, tokens_R, self._rows_P, self._slots_P)
        for slot, generation, num_counted in self._used:
            slot.generation, slot.num_counted = generation, num_counted
        self._used = []

    def _fill(self, slot: _Slot, sequence: Sequence, num_drawn: int) -> None:
        output_ids = sequence.output_token_ids[:num_drawn]
        if len(output_ids) < num_drawn:
            raise GaplessError(
                f"penalties of request {sequence.request.request_id!r} need its {num_drawn} tokens, of which "
                f"the host knows {len(output_ids)}: its counts were given up while a step was in flight"
            )
        slot.generation = -1  # until it is counted, the slot belongs to no life
        token_counts.fill_slot(
            self._counts_SV,
            slot.index,
            prompt_ids=sequence.request.prompt_token_ids,
            output_ids=output_ids,
        )

    def _take_slot(self, taking_part: set[Sequence]) -> int:
        if not self._free and len(self._counts_SV) < self._max_num_reqs:
            self._grow()
        if not self._free:
            idle = [sequence for sequence in self._slots if sequence not in taking_part]
            # Ended ones first: a running one that sat a step out would have to be filled again.
            self._give_up([sequence for sequence in idle if sequence.is_finished] or idle)
        return self._free.pop()

    def _grow(self) -> None:
        ended = [sequence for sequence in self._slots if sequence.is_finished]
        if ended:
            self._give_up(ended)
            return
        num_before, size = self._counts_SV.shape
        num_slots = min(max(2 * num_before, _FIRST_SLOTS), self._max_num_reqs)
        grown_SV = torch.zeros((num_slots, size), dtype=torch.int32, device=self._counts_SV.device)
        grown_SV[:num_before].copy_(self._counts_SV)
        self._counts_SV = grown_SV
        self._free = list(range(num_slots - 1, num_before - 1, -1))

    def _give_up(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            del self._slots[sequence]
        # Counted anew: a step that was interrupted may have taken a slot for nobody.
        used = {slot.index for slot in self._slots.values()}
        self._free = [slot for slot in range(len(self._counts_SV) - 1, -1, -1) if slot not in used]


@dataclass(slots=True)
class _Slot:
    index: int
    generation: int = -1
    num_counted: int = 0
    """Outputs that the table holds."""

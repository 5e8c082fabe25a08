"""Penalties from a device table of token counts, so that no step waits for the host to know its tokens.

A slot of the table is one sequence: an int32 per token id, ``2 * (times drawn) + (is in the prompt)``. Three
tensor functions keep it: fill a slot from what the host knows, penalise rows of logits by their slots, count
the tokens just drawn. The arithmetic is that of ``sampler.penalise``. ``engine/penalties.py`` says which
sequence has which slot and when it is filled anew.

Shapes: R sampled rows, P penalised rows among them, S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gapless.sampling.sampler import penalise, to_device


def fill_slot(counts_SV: Tensor, slot: int, *, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
    """Overwrite one slot with a history that the host knows."""
    output = np.asarray(output_ids, dtype=np.int64)
    ids = np.unique(np.concatenate([np.asarray(prompt_ids, dtype=np.int64), output]))
    values = 2 * np.bincount(np.searchsorted(ids, output), minlength=len(ids))
    values += np.isin(ids, np.asarray(prompt_ids, dtype=np.int64))
    counts_V = counts_SV[slot].zero_()
    counts_V.index_copy_(
        0, to_device(ids, counts_SV.device), to_device(values.astype(np.int32), counts_SV.device)
    )


def penalise_rows(
    logits_RV: Tensor,
    counts_SV: Tensor,
    rows_P: Tensor,
    slots_P: Tensor,
    *,
    repetition_P: Tensor,
    presence_P: Tensor,
    frequency_P: Tensor,
) -> None:
    """Penalise ``logits_RV[rows_P]`` in place by the counts in ``slots_P`` (both int32, no row twice)."""
    counts_PV = counts_SV.index_select(0, slots_P)
    penalised_PV = penalise(
        logits_RV.index_select(0, rows_P),
        counts_PV != 0,
        (counts_PV >> 1).float(),
        repetition_R=repetition_P,
        presence_R=presence_P,
        frequency_R=frequency_P,
    )
    logits_RV.index_copy_(0, rows_P.to(torch.int64), penalised_PV)


def count_drawn(counts_SV: Tensor, tokens_R: Tensor, rows_P: Tensor, slots_P: Tensor) -> None:
    """Add the tokens drawn for ``rows_P`` to their slots, in place; negative ones are no tokens."""
    tokens_P = tokens_R.index_select(0, rows_P)
    index = (slots_P.to(torch.int64), tokens_P.clamp(min=0))
    counts_SV.index_put_(index, counts_SV[index] + 2 * (tokens_P >= 0).to(torch.int32))

"""Sums of many rows over ranks in one kernel of ours, alone or with residual addition and norm behind.

NCCL takes a prompt's sums in several passes through buffers of its own; two GPUs that push their rows into
each other's memory move each byte once, and the norm behind reads what has just come. Why that is right
stands in ``kernels/bulk_sum_jit.py``. Invariants: as in ``one_shot.py``, whose sums of few rows go before;
with more ranks NCCL moves fewer bytes, so what a call may hold shrinks with them, and whether it is quicker
is measured at start-up (``bulk_choice.py``). ``T`` rows, ``E`` elements of a row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gapless.kernels.launch import Constants, launch
from gapless.kernels.norm import norm_shape
from gapless.kernels.select import launch_options
from gapless.parallel.one_shot import NUM_HALVES, WORD_BYTES, has_form_of_sums
from gapless.parallel.rank_reducer import RankReducer

MAX_PROGRAMS = 256
"""Two a multiprocessor of the GPUs that ranks are made of; all of a call have to run at once."""
_MEMORY_BYTES = 64 * 1024 * 1024
"""Of each rank, for all sources and both halves."""
_MAX_WARPS = 16
_MAX_REGISTERS = 64
"""Of a thread, with which two programs of so many warps fit a multiprocessor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inbox:
    """The memory of one rank in which the others leave rows, and what it needs to send its own. All of it is
    static: graphs hold its addresses."""

    rank: int
    size: int
    num_programs: int
    rows: Tensor
    """int64: this rank's own memory for rows, of every half, source and program."""
    flags: Tensor
    """int32, a source and program each, zeros at first."""
    row_addresses_R: Tensor
    """int64: where each rank's ``rows`` begin, as this rank sees them; and its ``flags``:"""
    flag_addresses_R: Tensor
    epochs_P: Tensor
    """int32: how many calls each program has made, zeros at first."""
    released: Tensor
    """int32, one: not zero when nobody shall wait any more."""
    handles: tuple[Any, ...] = ()
    """What the other ranks' memory is reachable through, to be kept as long."""

    @property
    def region_bytes(self) -> int:
        """For the rows of one program in one call."""
        return region_bytes(self.size, self.num_programs)

    @staticmethod
    def num_words(size: int, num_programs: int) -> int:
        """Of 8 bytes, of one rank."""
        return _num_row_words(size, num_programs) + -(-(size - 1) * num_programs // 2)

    @classmethod
    def of_words(
        cls,
        words: Tensor,
        addresses: list[int],
        *,
        rank: int,
        num_programs: int,
        released: Tensor,
        handles: tuple[Any, ...] = (),
    ) -> Inbox:
        """In ``words`` (int64, zeros), which every rank has and which begin at ``addresses``."""
        size, device = len(addresses), words.device
        num_row_words = _num_row_words(size, num_programs)
        behind = [address + num_row_words * WORD_BYTES for address in addresses]
        return cls(
            rank=rank,
            size=size,
            num_programs=num_programs,
            rows=words[:num_row_words],
            flags=words[num_row_words:].view(torch.int32),
            row_addresses_R=torch.tensor(addresses, dtype=torch.int64, device=device),
            flag_addresses_R=torch.tensor(behind, dtype=torch.int64, device=device),
            epochs_P=torch.zeros(num_programs, dtype=torch.int32, device=device),
            released=released,
            handles=handles,
        )


def region_bytes(size: int, num_programs: int) -> int:
    """A multiple of 16."""
    return _MEMORY_BYTES // (NUM_HALVES * (size - 1) * num_programs) // 16 * 16


def _num_row_words(size: int, num_programs: int) -> int:
    return NUM_HALVES * (size - 1) * num_programs * region_bytes(size, num_programs) // WORD_BYTES


class BulkReducer(RankReducer):
    """Sums up to ``max_bytes`` of the ranks whose inboxes know each other."""

    def __init__(self, inbox: Inbox, *, max_bytes: int | None = None) -> None:
        self._inbox = inbox
        self.max_bytes = inbox.region_bytes * inbox.num_programs if max_bytes is None else max_bytes

    def serves(self, partial_TE: Tensor) -> bool:
        if not 0 < partial_TE.nbytes <= self.max_bytes or not has_form_of_sums(partial_TE):
            return False
        size = partial_TE.shape[-1]
        rows_of_first = -(-(partial_TE.numel() // size) // self._inbox.num_programs)
        return rows_of_first * size * partial_TE.itemsize <= self._inbox.region_bytes

    def _launch(
        self, tensors: tuple[Tensor, ...], *, residual_stride: int, eps: float, has_norm: bool
    ) -> None:
        box, partial_TE = self._inbox, tensors[0]
        size = partial_TE.shape[-1]
        memory = (box.rows, box.flags, box.row_addresses_R, box.flag_addresses_R, box.epochs_P, box.released)
        args = (*tensors, *memory, partial_TE.numel() // size, residual_stride, eps)
        constants = _constants(
            size, partial_TE.dtype, box.rank, box.size, box.num_programs, has_norm, partial_TE.device
        )
        launch(_kernels().sum_many_rows_kernel, (box.num_programs,), args, constants)


@functools.cache
def _constants(
    size: int,
    dtype: torch.dtype,
    rank: int,
    num_ranks: int,
    num_programs: int,
    has_norm: bool,
    device: torch.device,
) -> Constants:
    size_pad = norm_shape(size, dtype)["SIZE_PAD"]
    return Constants(
        SIZE=size,
        SIZE_PAD=size_pad,
        num_warps=min(max(size_pad * dtype.itemsize // (16 * 32), 1), _MAX_WARPS),
        RANK=rank,
        NUM_RANKS=num_ranks,
        NUM_PROGRAMS=num_programs,
        REGION=region_bytes(num_ranks, num_programs) // dtype.itemsize,
        HAS_NORM=has_norm,
        maxnreg=_MAX_REGISTERS,
        **launch_options(device),
    )


@functools.cache
def _kernels() -> ModuleType:
    from gapless.kernels import bulk_sum_jit

    return bulk_sum_jit

"""Sums of small tensors over ranks in one kernel of ours, alone or with residual addition and norm behind.

NCCL takes several hops of a ring and a kernel of its own; for the few kilobytes of a decode step it is
quicker that each rank writes its values into every other rank's memory (torch's symmetric memory) and adds up
what has come. Why that is right stands in ``kernels/rank_sum_jit.py``. What it costs depends on the machine,
so the largest message it serves is measured at start-up, inside graphs, as a step will run it. Invariants:
values are sent from wherever they lie, so no captured tensor needs to be registered; the order of summation
is the same on all ranks, so their results are the same bits; a reducer that is not there, or that disagrees
with NCCL in its first sums, is not used, and the reason is reported. NVLink multicast is never used. ``T``
rows, ``E`` elements of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gapless.kernels.launch import Constants, launch
from gapless.kernels.norm import norm_shape
from gapless.kernels.select import has_fused_kernels, launch_options
from gapless.parallel.exchange import ExchangeGroup
from gapless.parallel.rank_reducer import RankReducer

MAX_ROWS = 128
"""A program each. So few run all at once on any GPU that has symmetric memory."""
MAX_ROW_BYTES = 16 * 1024
MAX_BYTES = 1024 * 1024
"""Beyond this NCCL is quicker on every machine known."""
WORD_BYTES = 8
_VALUE_BYTES = 4
"""Of values, in a word of 8."""
_SLOT_WORDS = MAX_ROW_BYTES // _VALUE_BYTES
NUM_HALVES = 2
_ALIGNMENT = 16
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mailbox:
    """The memory of one rank in which the others leave their words, and what it needs to send its own. All
    of it is static: graphs hold its addresses."""

    rank: int
    size: int
    words: Tensor
    """int64, ``num_words(size)``: this rank's own, zeros at first."""
    addresses_R: Tensor
    """int64: where each rank's ``words`` begin, as this rank sees them."""
    epochs_T: Tensor
    """int32: how many calls each program has made, zeros at first."""
    released: Tensor
    """int32, one: not zero when nobody shall wait any more."""
    handles: tuple[Any, ...] = ()
    """What the other ranks' memory is reachable through, to be kept as long."""

    @staticmethod
    def num_words(size: int) -> int:
        return NUM_HALVES * size * MAX_ROWS * _SLOT_WORDS

    @classmethod
    def of_words(
        cls, words: Tensor, addresses: list[int], *, rank: int, handles: tuple[Any, ...] = ()
    ) -> Mailbox:
        return cls(
            rank=rank,
            size=len(addresses),
            words=words,
            addresses_R=torch.tensor(addresses, dtype=torch.int64, device=words.device),
            epochs_T=torch.zeros(MAX_ROWS, dtype=torch.int32, device=words.device),
            released=torch.zeros(1, dtype=torch.int32, device=words.device),
            handles=handles,
        )


class OneShotReducer(RankReducer):
    """Sums up to ``max_bytes`` of the ranks whose mailboxes know each other."""

    def __init__(self, mailbox: Mailbox, *, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._mailbox = mailbox
        device = mailbox.words.device
        self._release: Callable[[], object] = partial(mailbox.released.fill_, 1)
        if device.type == "cuda":
            # Made ahead: when they are needed, kernels wait on this device, and what loads a kernel or
            # allocates may wait for these. A copy needs neither, and streams of high priority have hardware
            # queues of their own, in which it is not behind them.
            one = torch.ones(1, dtype=torch.int32).pin_memory()
            stream = torch.cuda.Stream(device, priority=-1)
            self._release = partial(_copy_on, stream, one, mailbox.released)

    @property
    def released(self) -> Tensor:
        """What ``release_waiting`` sets, for other kernels that wait for the same ranks."""
        return self._mailbox.released

    def release_waiting(self) -> None:
        """A rank is gone: let kernels that wait for it go on, those to come too, so that the device becomes
        idle. What they leave is wrong; nobody may use it. Called from another thread than the steps'."""
        self._release()

    def wait_again(self) -> None:
        """Undoes ``release_waiting``, of ranks that are all there, when the device is idle."""
        self._mailbox.released.zero_()

    def serves(self, partial_TE: Tensor) -> bool:
        row_bytes = partial_TE.shape[-1] * partial_TE.itemsize
        return 0 < partial_TE.nbytes <= min(self.max_bytes, MAX_ROWS * row_bytes) and has_form_of_sums(
            partial_TE
        )

    def _launch(
        self, tensors: tuple[Tensor, ...], *, residual_stride: int, eps: float, has_norm: bool
    ) -> None:
        box, partial_TE = self._mailbox, tensors[0]
        size = partial_TE.shape[-1]
        args = (*tensors, box.words, box.addresses_R, box.epochs_T, box.released, residual_stride, eps)
        constants = _constants(size, partial_TE.dtype, box.rank, box.size, has_norm, partial_TE.device)
        launch(_kernels().sum_ranks_kernel, (partial_TE.numel() // size,), args, constants)


def has_form_of_sums(partial_TE: Tensor) -> bool:
    """Whether our kernels can read these rows: dtype, length of a row and alignment."""
    row_bytes = partial_TE.shape[-1] * partial_TE.itemsize
    return (
        partial_TE.dtype in _DTYPES
        and row_bytes <= MAX_ROW_BYTES
        and row_bytes % _ALIGNMENT == 0
        and partial_TE.data_ptr() % _ALIGNMENT == 0
        and partial_TE.is_contiguous()
    )


def open_mailbox(group: Any, control: Any, torch_device: torch.device) -> Mailbox:
    """That of this rank of ``group``. Who calls and what it raises: ``open_memory``."""
    if not has_fused_kernels(torch_device):
        raise RuntimeError("no Triton")
    words, addresses, rank, handles = open_memory(
        group, control, torch_device, num_words=Mailbox.num_words(group.size())
    )
    return Mailbox.of_words(words, addresses, rank=rank, handles=handles)


def open_memory(
    group: Any, control: Any, torch_device: torch.device, *, num_words: int
) -> tuple[Tensor, list[int], int, tuple[Any, ...]]:
    """Zeros (int64) that the other ranks can write to, where each rank's begin as this one sees them, this
    rank, and what has to be kept as long. Every member of ``group`` calls this at the same time; ``control``
    is a group of the same ranks for the CPU. Nobody may write before all have come back.

    Raises ``RuntimeError`` where the machine or this torch has no symmetric memory.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    words = symmetric_memory.empty(num_words, dtype=torch.int64, device=torch_device)
    words.zero_()
    torch.cuda.synchronize(torch_device)
    exchange = ExchangeGroup(group, control)
    memory = symmetric_memory.rendezvous(words, group=exchange.name)
    ranks = range(memory.world_size)
    addresses = [memory.get_buffer(rank, (num_words,), torch.int64).data_ptr() for rank in ranks]
    if addresses[memory.rank] != words.data_ptr():
        raise RuntimeError("this torch shows a rank's own memory at another address")
    return words, addresses, memory.rank, (memory, exchange)


def _copy_on(stream: torch.cuda.Stream, source: Tensor, target: Tensor) -> None:
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)


@functools.cache
def _constants(
    size: int, dtype: torch.dtype, rank: int, num_ranks: int, has_norm: bool, device: torch.device
) -> Constants:
    shape = norm_shape(size, dtype)
    return Constants(
        SIZE=size,
        SIZE_PAD=shape["SIZE_PAD"],
        num_warps=_num_warps(shape["SIZE_PAD"], dtype.itemsize),
        RANK=rank,
        NUM_RANKS=num_ranks,
        WORDS=size * dtype.itemsize // _VALUE_BYTES,
        WORDS_PAD=shape["SIZE_PAD"] * dtype.itemsize // _VALUE_BYTES,
        SLOT_WORDS=_SLOT_WORDS,
        SOURCE_WORDS=MAX_ROWS * _SLOT_WORDS,
        HAS_NORM=has_norm,
        **launch_options(device),
    )


def _num_warps(size_pad: int, itemsize: int) -> int:
    """16 bytes of a row per thread: with more, what has come from eight ranks does not fit in registers."""
    return min(max(size_pad * itemsize // (16 * 32), 1), 32)


@functools.cache
def _kernels() -> ModuleType:
    from gapless.kernels import rank_sum_jit

    return rank_sum_jit

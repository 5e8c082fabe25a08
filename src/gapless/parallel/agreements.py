"""What the ranks of one model decide together on the host, and the reason why they cannot go on.

Decisions go through a group of their own (gloo), so that agreeing on something never touches a stream, and
where all ranks are on one host through memory, which is quicker by an order of magnitude. Ranks run the same
code in the same order; whoever leaves that order on purpose says so by ``agree(False)``. Invariant: after
``fail`` every call raises the reason instead of waiting for a rank that is gone. Read ``shared_board.py`` for
the memory, ``group.py`` for the group that decides here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from gapless.errors import RankError
from gapless.parallel.shard import Shard
from gapless.parallel.shared_board import SharedBoard, open_board

logger = logging.getLogger(__name__)

_REASON_WAIT_S = 5.0
"""A collective that fails because its peer has gone waits so long for that peer's own words."""


class Agreements:
    """One rank's part in them. Whoever inherits sets ``shard`` and ``_control``, the gloo group, and says in
    ``_abort`` how those who wait in a collective are woken."""

    shard: Shard
    _control: Any

    def __init__(self, *, timeout_s: float) -> None:
        """``timeout_s``: for a rank that is alive and does not come."""
        self._timeout_s = timeout_s
        self._failure: RankError | None = None
        self._failed = threading.Event()
        self.num_agreements = 0
        self.agreements_s = 0.0
        """Seconds on the host for all of them, most of which are waits for the slowest rank."""
        self.agrees_by = "gloo"
        """In words, for the report."""
        self._board: SharedBoard | None = None

    @property
    def rank(self) -> int:
        return self.shard.rank

    @property
    def size(self) -> int:
        return self.shard.size

    @property
    def failure(self) -> RankError | None:
        return self._failure

    def fail(self, error: RankError) -> None:
        """Note that the ranks cannot go on (the first reason stays) and wake whoever waits in a collective.
        May be called from any thread."""
        if self._failure is None:
            self._failure = error
        self._failed.set()
        self._abort()

    def check(self) -> None:
        """Raises the reason if the ranks cannot go on."""
        if self._failure is not None:
            raise RankError(str(self._failure))

    def share_memory(self) -> None:
        """Agree through memory from now on, if that works between all ranks. Every rank calls it, and has
        somebody who calls ``fail`` when a rank is gone: in memory nobody sees that."""
        board, problem = open_board(
            rank=self.rank,
            size=self.size,
            timeout_s=self._timeout_s,
            from_first=lambda own: self._gather_objects(own)[0],
            first_problem=self.first_problem,
        )
        if board is None:
            self.agrees_by = f"gloo: {problem}"
            logger.info("ranks agree through %s", self.agrees_by)
            return
        self._board, self.agrees_by = board, "shared memory"

    def agree(self, is_well: bool = True) -> bool:
        """True when every rank says so. Also a barrier. Raises ``RankError``."""
        return bool(self.minimum([int(is_well)])[0])

    def first_problem(self, own: str | None = None) -> str | None:
        """What the first rank with a problem says of it, with its number; None when all are well. Every rank
        waits here for all others."""
        if self.agree(own is None):
            return None
        told = self._gather_objects(own)
        return next(f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None)

    def minimum(self, values: Sequence[int]) -> list[int]:
        """The smallest of all ranks' values, one by one."""
        if not values:
            return []
        with self._guarded(), self._counted():
            if (board := self._board) is not None:
                return [min(board.exchange(value, self.check)) for value in values]
            least = torch.tensor(values, dtype=torch.int64)
            dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._control)
            return least.tolist()

    def from_first(self, value: int) -> int:
        """Rank 0's value, on every rank."""
        with self._guarded(), self._counted():
            if (board := self._board) is not None:
                return board.exchange(value, self.check)[0]
            told = torch.tensor([value], dtype=torch.int64)
            dist.broadcast(told, src=dist.get_global_rank(self._control, 0), group=self._control)
            return int(told[0])

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Spin until the device is done. Raises ``RankError`` when a rank fails meanwhile: kernels that wait
        for it may never end."""
        while not is_done():
            self.check()

    def _gather_objects(self, own: Any) -> list[Any]:
        """Every rank's object, through gloo."""
        told: list[Any] = [None] * self.size
        with self._guarded():
            dist.all_gather_object(told, own, group=self._control)
        return told

    @contextmanager
    def _counted(self) -> Iterator[None]:
        start = perf_counter()
        yield
        self.num_agreements += 1
        self.agreements_s += perf_counter() - start

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """What a collective raises when a peer has gone, as that peer's reason."""
        self.check()
        try:
            yield
        except RuntimeError as error:
            # Who noticed first, this collective or whoever watches the processes, is a matter of luck.
            self._failed.wait(_REASON_WAIT_S)
            self.check()
            raise RankError(f"rank {self.rank} of {self.size}: a collective failed: {error}") from error

    def _abort(self) -> None:
        raise NotImplementedError

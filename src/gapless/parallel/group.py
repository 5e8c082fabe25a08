"""The process group of the ranks that hold one model: how it begins, what it sums on the device, how it ends.

Two torch groups lie under it: one for tensors (NCCL on CUDA, gloo on a CPU) and one for small decisions
(always gloo), which ``agreements.py`` makes there or in memory. Invariants: no collective is captured before
both communicators have been used once and outside ``capturing``; after ``fail`` every call raises the reason
instead of waiting for a rank that is gone; what is left out (``apart``, ``warming_up``) is left out by all
ranks. NVLink multicast stays off. Read ``collectives.py`` for the operators of a model, ``engine/ranks.py``
for how ranks find each other.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from gapless.env import inherited, prepare_nccl
from gapless.errors import GraphError, RankError
from gapless.graphs.device.destructors import wait_for_destructors
from gapless.kernels.launch import is_compiling_ahead
from gapless.kernels.norm import add_rms_norm_into
from gapless.parallel.agreements import Agreements
from gapless.parallel.bulk_choice import find_bulk
from gapless.parallel.bulk_sum import BulkReducer
from gapless.parallel.one_shot import OneShotReducer
from gapless.parallel.one_shot_choice import find_one_shot
from gapless.parallel.rank_reducer import RankReducer
from gapless.parallel.shard import Shard

NUM_WARM_UPS = 2
"""Of each kind of sum: the first makes what is made lazily, the second sees it."""
TIMEOUT_S = 600.0
"""A rank that is alive and does not come is given up after this; one that has died is seen at once."""
_LEAVE_S = 3.0
"""Leaving a group on GPUs that has lost a rank may not end; then this process can have no other group."""
_IDLE_S = 3.0
"""Kernels that were told to wait no longer end in milliseconds; the rest of a step may take longer."""
_DESTRUCTORS_S = 10.0
"""Thousands of graphs take the driver well under a second."""
_LOOK_S = 0.1
"""So often, while a group is left, somebody looks whether a rank has failed."""

_handles = itertools.count(1)


class RankGroup(Agreements):
    """Rank ``rank`` of ``size``, which meet in ``store``. Every rank must make it at about the same time."""

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        size: int,
        torch_device: torch.device,
        break_at_all_reduce: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """``break_at_all_reduce``: breakable graphs end before each sum over ranks and begin anew behind
        it."""
        super().__init__(timeout_s=timeout_s)
        self.shard = Shard(rank=rank, size=size, group=next(_handles))
        self.torch_device = torch_device
        self.breaks = break_at_all_reduce
        self.sums_by = "NCCL" if torch_device.type == "cuda" else "gloo"
        """In words, for the report."""
        self._one_shot: OneShotReducer | None = None
        self._bulk: BulkReducer | None = None
        self._num_warm_ups: Counter[Any] | None = None
        """By kind of sum, inside ``warming_up``."""
        self._threads_before: int | None = None
        self._is_apart = self._is_capturing = self._is_warm = self._is_closed = False
        self._aborting: threading.Thread | None = None
        self._abort_lock = threading.Lock()
        self._owns_world = not dist.is_initialized()
        timeout = timedelta(seconds=timeout_s)
        is_cuda = torch_device.type == "cuda"
        if is_cuda:
            prepare_nccl()
        if self._owns_world:
            # The world is the control group; tensors get a group of their own below.
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        ranks = list(range(size))
        self._control: Any = dist.new_group(ranks, backend="gloo", timeout=timeout)
        own: Any = {"backend": "nccl", "device_id": torch_device} if is_cuda else {"backend": "gloo"}
        self._tensors: Any = dist.new_group(ranks, timeout=timeout, **own)
        # The groups' own methods: torch.distributed's functions look up and log what is known here.
        self._sum, self._gather = dist.AllreduceOptions(), c10d.AllgatherOptions()
        self._sum.reduceOp = c10d.ReduceOp(c10d.ReduceOp.SUM)
        for options in (self._sum, self._gather):
            if hasattr(options, "asyncOp"):
                options.asyncOp = False  # on the current stream, as any other kernel
        self._warm_up()

    def all_reduce(self, partial: Tensor) -> None:
        """Sum over ranks, in place, on the current stream."""
        if self._is_left_out(partial, "sum"):
            return
        if (one_shot := self._one_shot_for(partial)) is not None:
            one_shot.all_reduce(partial)
            return
        if self._is_apart:
            return
        self._check_capture()
        with self._guarded():
            _wait(self._tensors.allreduce([partial], self._sum))

    def sum_add_rms_norm(
        self,
        partial_TE: Tensor,
        residual_TE: Tensor,
        weight_E: Tensor,
        eps: float,
        sum_TE: Tensor,
        normed_TE: Tensor,
    ) -> None:
        """``add_rms_norm_into`` of the sum of all ranks' ``partial_TE``, which may be overwritten with it."""
        if self._is_left_out(partial_TE, "sum and norm"):
            # Not nothing: what was never written may hold NaN, which would go on into the cache.
            add_rms_norm_into(partial_TE, residual_TE, weight_E, eps, sum_TE, normed_TE)
            return
        if (one_shot := self._one_shot_for(partial_TE)) is not None:
            one_shot.sum_add_rms_norm(partial_TE, residual_TE, weight_E, eps, sum_TE, normed_TE)
            return
        self.all_reduce(partial_TE)
        add_rms_norm_into(partial_TE, residual_TE, weight_E, eps, sum_TE, normed_TE)

    def gather_columns(self, local_RC: Tensor, num_columns: int) -> Tensor:
        """``[R, C]`` of each rank, side by side in the order of the ranks, the first ``num_columns`` of
        them."""
        self._check_capture()
        num_rows, local_columns = local_RC.shape
        gathered = local_RC.new_empty(self.size * num_rows, local_columns)
        if not self._is_apart:
            with self._guarded():
                _wait(self._tensors._allgather_base(gathered, local_RC.contiguous(), self._gather))
        side_by_side = gathered.view(self.size, num_rows, local_columns).transpose(0, 1)
        return side_by_side.reshape(num_rows, -1)[:, :num_columns].contiguous()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Around every capture: collectives may be recorded inside. All earlier ones have ended on all ranks
        when it begins, for a watchdog that asks after one in the middle would spoil the capture
        (pytorch#102542)."""
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside the block sums and gathers leave any values, and wait for nobody: for runs that differ
        between ranks and whose results nobody reads."""
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Inside the block what runs outside of ``capturing`` is a warm-up: every kind of sum is made
        ``NUM_WARM_UPS`` times, on all ranks, and left out afterwards. A forward holds dozens of each, and
        with every one ranks wait for the slowest of them."""
        self._num_warm_ups = Counter()
        try:
            yield
        finally:
            self._num_warm_ups = None

    def report(self) -> dict[str, Any]:
        """For the report of an engine."""
        return {
            "size": self.size,
            "sums_by": self.sums_by,
            "breaks_at_sums": self.breaks,
            "agrees_by": self.agrees_by,
            "agreements": self.num_agreements,
            "agreements_s": round(self.agreements_s, 3),
        }

    def find_one_shot(self) -> None:
        """Sum in one kernel from now on what is small enough, where that is there and quicker: few rows in
        one way, many in another. Every rank calls it, before anything is captured."""
        ask: dict[str, Any] = {"agree": self.agree, "from_first": self.from_first}
        where = (self._tensors, self._control, self.torch_device)
        self._one_shot, self.sums_by = find_one_shot(*where, on_open=self._keep_one_shot, **ask)
        if self._one_shot is not None:
            self._bulk, above = find_bulk(*where, few=self._one_shot, **ask)
            self.sums_by = f"one kernel up to {self._one_shot.max_bytes} bytes, {above}"

    def share_cores(self) -> None:
        """On a CPU: this process takes its part of the threads, unless ``OMP_NUM_THREADS`` says how many each
        takes. For the thread that runs steps; undone by ``close``."""
        if self.torch_device.type == "cpu" and not inherited("OMP_NUM_THREADS"):
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(max(1, self._threads_before // self.size))

    def close(self) -> None:
        """Leave the group; graphs that hold its collectives must be gone. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
        if self._failure is not None:
            self._abort()
        if self.torch_device.type != "cuda":
            self._leave()
            return
        if self._failure is None:
            torch.cuda.synchronize(self.torch_device)
        # It may wait for kernels that wait for a rank that is gone, or goes now; no call of it can be ended.
        leaving = _started(self._leave, "rank-leaving")
        if leaving is None:
            if self._failure is None:
                self._leave()
            return
        while leaving.is_alive() and self._failure is None:
            leaving.join(_LOOK_S)
        leaving.join(_LEAVE_S)

    def becomes_idle(self, limit_s: float = _IDLE_S) -> bool:
        """After ``fail``, on a GPU: whether its kernels come to their end, now that nobody is waited for. Not
        within ``limit_s``: nothing of the device may be freed, for that would wait for them."""
        ended: list[bool] = []

        def synchronize() -> None:
            with suppress(RuntimeError):  # of a device that has failed
                torch.cuda.synchronize(self.torch_device)
                ended.append(True)

        waiting = _started(synchronize, "rank-idle")
        if waiting is not None:
            waiting.join(limit_s)
        return bool(ended)

    def _leave(self) -> None:
        if self.torch_device.type == "cuda":
            torch.cuda.set_device(self.torch_device)  # the current device is that of a thread
            if self._failure is None:
                self._forget_graphs()
            if self._failure is not None:
                self._abort()  # whoever said so, perhaps just now, may not have come that far
                if self._aborting is not None:
                    self._aborting.join()
        self._board = None
        self._one_shot = self._bulk = None  # to free their memory waits for the device
        with suppress(RuntimeError, ValueError):  # of a peer that has gone already
            for group in (None,) if self._owns_world else (self._tensors, self._control):
                dist.destroy_process_group(group)  # None: all there are

    def _forget_graphs(self) -> None:
        """NCCL's memory must not go while the driver still tells it which graphs have gone."""
        torch.cuda.synchronize(self.torch_device)
        wait_for_destructors(_DESTRUCTORS_S)
        with suppress(RuntimeError, RankError):  # of a peer that has gone already
            # In a call of its own NCCL takes back what those destructors gave it.
            _wait(self._tensors.allreduce([torch.zeros(1, device=self.torch_device)], self._sum))
            torch.cuda.synchronize(self.torch_device)
            self.agree()

    def _warm_up(self) -> None:
        """Use both communicators once: what they make lazily must exist before a capture."""
        ones = torch.ones(self.size, device=self.torch_device)
        with torch.no_grad():
            self.all_reduce(ones)
            columns = self.gather_columns(ones.view(1, -1), self.size * self.size)
        if not bool((columns == self.size).all()) or not self.agree():
            raise RankError(f"rank {self.rank}: the first sum over {self.size} ranks came out wrong")
        self._is_warm = True

    def _is_left_out(self, partial: Tensor, kind: str) -> bool:
        """Whether this is a sum of a warm-up that has been made often enough."""
        counts = self._num_warm_ups
        if counts is None or self._is_capturing or self._is_apart:
            return False
        key = (kind, partial.shape, partial.dtype)
        counts[key] += 1
        return counts[key] > NUM_WARM_UPS

    def _one_shot_for(self, partial: Tensor) -> RankReducer | None:
        """What sums such values in one kernel; None: not that."""
        reducers: tuple[RankReducer | None, ...] = (self._one_shot, self._bulk)
        one_shot = next((r for r in reducers if r is not None and r.serves(partial)), None)
        if one_shot is None:
            return None
        if self._is_apart:  # where nobody must wait; a launch that only compiles does not
            return one_shot if is_compiling_ahead() else None
        self._check_capture()
        return one_shot

    def _check_capture(self) -> None:
        if self.torch_device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return
        if not (self._is_warm and self._is_capturing):
            raise GraphError(
                "a sum over ranks was reached in a capture that the ranks have not begun together: capture "
                "through a GraphStore that knows its peers"
            )

    def _abort(self) -> None:
        """NCCL's kernels end then; gloo's calls end when their peer's process does."""
        one_shot = self._one_shot  # once: a thread that leaves the group lets go of it
        if one_shot is not None:
            with suppress(RuntimeError):  # of a device that has failed: nothing waits on it any more
                one_shot.release_waiting()
        if self.torch_device.type != "cuda":
            _abort_backend(self._tensors, self.torch_device)
        else:
            # It tells the kernels at once, and then waits until the last graph that holds the communicator
            # has gone, which is up to whoever called this.
            with self._abort_lock:  # the end of the group may come here at the same time
                if self._aborting is None:
                    abort = partial(_abort_backend, self._tensors, self.torch_device)
                    self._aborting = _started(abort, "rank-aborting")
        _abort_backend(self._control, _CPU)

    def _keep_one_shot(self, reducer: OneShotReducer) -> None:
        """What ``fail`` releases from now on. Raises if it has been called: nothing may wait any more."""
        self._one_shot = reducer
        self.check()


def _started(run: Callable[[], object], name: str) -> threading.Thread | None:
    """A thread that the end of the interpreter does not wait for; None if it is ending, when Python (3.12 and
    later) starts none."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def _abort_backend(group: Any, device: torch.device) -> None:
    with suppress(RuntimeError, AttributeError):
        group._get_backend(device).abort()


_CPU = torch.device("cpu")


def _wait(work: Any) -> None:
    """On NCCL this orders streams and returns at once; where all is on one stream there is no work."""
    if work is not None:
        work.wait()

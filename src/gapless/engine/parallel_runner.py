"""The runner of the first rank: every step is told to the other ranks and run here like any other.

All ranks run the same ``ModelRunner`` over the same batch, so they dispatch to the same graphs, draw the same
tokens (draws depend on logits, seed and index, and gathered logits are the same bits everywhere) and keep
them on their own device for the next step. Nothing comes back but trouble. Invariants: a step is told before
it is run; when any rank fails, here or elsewhere, no further step starts and each one that was started ends
with ``RankError`` instead of waiting, also when a rank hangs. Read ``step_mirror.py`` for what is told.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from gapless.engine.graph_set import GraphSet
from gapless.engine.rank_worker import ResetReport, SetPaddedEager, TellReport
from gapless.engine.runner import ModelRunner
from gapless.engine.step import PendingStep, ScheduledBatch, StepResult
from gapless.engine.step_mirror import StepWriter
from gapless.errors import GaplessError, RankError
from gapless.graphs.dispatcher import Dispatcher
from gapless.graphs.plan import GraphPlan
from gapless.graphs.report import StepLog
from gapless.parallel.collectives import forget_group
from gapless.parallel.group import RankGroup
from gapless.parallel.workers import END_LIMIT_S, Workers


class ParallelRunner:
    """Runs ``runner`` in step with ``workers``. Implements ``StepRunner``."""

    def __init__(self, runner: ModelRunner, workers: Workers, group: RankGroup) -> None:
        self.inner, self._workers, self._group = runner, workers, group
        self._writer = StepWriter()
        self._is_shut_down = False
        self.num_blocks = runner.num_blocks
        self.block_size = runner.block_size
        self.max_model_len = runner.max_model_len
        self.max_num_reqs = runner.max_num_reqs
        self.max_num_batched_tokens = runner.max_num_batched_tokens
        self.vocab_size = runner.vocab_size
        self.max_steps_ahead = runner.max_steps_ahead
        self.media = runner.media
        # For an engine that is forgotten, or a program that ends, without a shutdown.
        self._leave = weakref.finalize(self, _leave, runner, workers, group)

    @property
    def graphs(self) -> GraphSet:
        return self.inner.graphs

    @property
    def plan(self) -> GraphPlan:
        return self.inner.plan

    @property
    def dispatcher(self) -> Dispatcher:
        return self.inner.dispatcher

    @property
    def log(self) -> StepLog:
        return self.inner.log

    @property
    def worker_pids(self) -> list[int]:
        """Processes of the other ranks, as far as they were started here."""
        return self._workers.pids

    @property
    def failure(self) -> GaplessError | None:
        """Why no step will run any more."""
        return self._workers.failure

    def check(self) -> None:
        """Raises ``GaplessError`` when a rank has failed: no step will run any more."""
        self._workers.check()

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run one step and wait for its tokens."""
        return self.launch(batch).wait()

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """As ``ModelRunner.launch``, on all ranks. Raises ``GaplessError`` naming the rank that failed."""
        if self._is_shut_down:
            raise GaplessError("the runner has been shut down: its graphs and cache are gone")
        self.check()
        with self._together(batch):
            self._workers.send(self._writer.write(batch))
            return _ParallelStep(self.inner.launch(batch), self, batch)

    @contextmanager
    def padded_eager(self) -> Iterator[None]:
        """As ``ModelRunner.padded_eager``, on all ranks."""
        self._tell(SetPaddedEager(True))
        try:
            with self.inner.padded_eager():
                yield
        finally:
            if self._workers.failure is None:
                self._tell(SetPaddedEager(False))

    def report(self) -> dict[str, Any]:
        """This rank's: graphs and steps are the same on all."""
        return self.inner.report()

    def reports_of_others(self) -> list[dict[str, Any]]:
        """The reports of ranks 1 to N - 1, after all steps that were launched."""
        with self._workers.watching("the report of the other ranks"):
            self._workers.send(TellReport())
            return self._workers.receive()

    def reset_report(self) -> None:
        self.inner.reset_report()
        if self._workers.failure is None and not self._is_shut_down:
            self._tell(ResetReport())

    def shutdown(self) -> None:
        """End the other ranks, release graphs and memory, leave the group, in this order. Safe to call
        twice."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._leave()

    def _tell(self, message: Any) -> None:
        """A rank that hangs does not read, and then there is no room for more."""
        with self._workers.watching("a message to the other ranks"):
            self._workers.send(message)

    @contextmanager
    def _together(self, batch: ScheduledBatch) -> Iterator[None]:
        """What goes wrong here leaves the other ranks waiting in the middle of a step, so it is the end."""
        try:
            with self._workers.watching_step(batch.step_id, self._group.torch_device.type):
                yield
        except RankError as error:
            self._workers.fail(error)  # unless the reason is known already
            self.check()
            raise
        except BaseException as error:
            name = type(error).__name__
            self._workers.fail(RankError(f"rank 0 failed in step {batch.step_id}: {name}: {error}"))
            raise


def _leave(runner: ModelRunner, workers: Workers, group: RankGroup) -> None:
    """The end of all ranks, with or without a ``shutdown``: graphs go before the group, since a communicator
    waits for those that hold it, also one that is aborted."""
    is_broken = workers.failure is not None
    try:
        with workers.watching("the end of the ranks", END_LIMIT_S):
            try:
                if not is_broken:
                    with suppress(GaplessError):  # of a rank that goes just now
                        workers.send(None)  # they wait for us where the group ends
                if not is_broken or group.torch_device.type == "cpu" or group.becomes_idle():
                    runner.shutdown()
            finally:
                group.close()
    finally:
        forget_group(group)
        workers.close()


class _ParallelStep:
    """A step that all ranks have launched. Implements ``PendingStep``."""

    __slots__ = ("_batch", "_runner", "_step")

    def __init__(self, step: PendingStep, runner: ParallelRunner, batch: ScheduledBatch) -> None:
        self._step, self._runner, self._batch = step, runner, batch

    def wait(self) -> StepResult:
        with self._runner._together(self._batch):
            result = self._step.wait()
        self._runner.check()  # what a collective has left behind whose peer went is no result
        return result

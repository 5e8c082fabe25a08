"""Ranks with something wrong with them, as targets for ``forked_ranks.forked``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

import gapless.engine.runner
import gapless.graphs.runner
from gapless.engine.rank_worker import main
from gapless.errors import MemoryLimitError
from gapless.graphs.modes import Phase


def fail_to_capture_a_prefill_size(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Reads from the device in the middle of recording the forward of 8 tokens, not in its warm-up."""
    runner = gapless.graphs.runner.GraphRunner
    real = runner._run_and_store

    def faulty(self: Any, views: Any) -> Any:
        results = real(self, views)
        is_faulty = self.phase is Phase.PREFILL and views.sizes["tokens"] == 8
        if is_faulty and self.store.device.is_recording():
            torch.ones(1).item()
        return results

    replace(runner, "_run_and_store", faulty)


def cannot_capture_a_prefill_size(rank: int, commands: int, lifeline: int) -> None:
    fail_to_capture_a_prefill_size()
    main(rank, commands, lifeline)


def cannot_capture_a_prefill_size_on_rank_2(rank: int, commands: int, lifeline: int) -> None:
    if rank == 2:
        fail_to_capture_a_prefill_size()
    main(rank, commands, lifeline)


def cannot_capture_behind_the_first_break(rank: int, commands: int, lifeline: int) -> None:
    """As above, in the second layer: the other ranks are about to replay sums of the first."""
    import gapless.models.decoder

    real = gapless.models.decoder.DecoderAttention.forward

    def faulty(self: Any, hidden_TE: Any, cos: Any, sin: Any) -> Any:
        if self.core.layer_index == 1 and hidden_TE.shape[0] == 8 and _records():
            torch.ones(1).item()
        return real(self, hidden_TE, cos, sin)

    gapless.models.decoder.DecoderAttention.forward = faulty
    main(rank, commands, lifeline)


def raises_in_its_third_step(rank: int, commands: int, lifeline: int) -> None:
    _in_step(3, _raise)
    main(rank, commands, lifeline)


def dies_in_its_third_step(rank: int, commands: int, lifeline: int) -> None:
    """Before it has joined the sums of that step, in which the first rank then waits."""
    _in_step(3, lambda: os._exit(7))
    main(rank, commands, lifeline)


def has_too_little_memory(rank: int, commands: int, lifeline: int) -> None:
    import gapless.engine.build

    def load_model(*args: Any, **kwargs: Any) -> Any:
        raise MemoryLimitError("the weights do not fit")

    gapless.engine.build.load_model = load_model
    main(rank, commands, lifeline)


def never_starts(rank: int, commands: int, lifeline: int) -> None:
    os._exit(5)


def hangs_before_it_is_ready(rank: int, commands: int, lifeline: int) -> None:
    time.sleep(1000)


def hangs_before_it_joins(rank: int, commands: int, lifeline: int) -> None:
    import gapless.engine.ranks

    gapless.engine.ranks.join_local = lambda *_: time.sleep(1000)
    main(rank, commands, lifeline)


def hangs_while_it_loads(rank: int, commands: int, lifeline: int) -> None:
    import gapless.engine.build

    gapless.engine.build.load_model = lambda *_, **__: time.sleep(1000)
    main(rank, commands, lifeline)


def dies_while_all_meet(rank: int, commands: int, lifeline: int) -> None:
    """After it has said that it is there: the first rank looks for it in the store."""
    import gapless.engine.ranks

    gapless.engine.ranks.join_local = lambda *_: os._exit(9)
    main(rank, commands, lifeline)


def dies_in_its_capture(rank: int, commands: int, lifeline: int) -> None:
    """While the first rank waits for it to agree that all are well."""
    _in_first_capture(lambda: os._exit(8))
    main(rank, commands, lifeline)


def hangs_in_its_capture(rank: int, commands: int, lifeline: int) -> None:
    _in_first_capture(lambda: time.sleep(1000))
    main(rank, commands, lifeline)


def cannot_open_the_memory_of_the_first(rank: int, commands: int, lifeline: int) -> None:
    import gapless.parallel.shared_board

    def refuse(place: Any) -> Any:
        raise PermissionError("not yours")

    gapless.parallel.shared_board._open = refuse
    main(rank, commands, lifeline)


def runs_out_of_memory_in_a_warm_up(rank: int, commands: int, lifeline: int) -> None:
    """Of the second size, while the others wait for it in the first sum of theirs."""
    real = gapless.graphs.runner.GraphRunner._warm_up

    def faulty(self: Any, descriptor: Any, **how: Any) -> Any:
        if rank == 1 and self._is_warm:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, descriptor, **how)

    gapless.graphs.runner.GraphRunner._warm_up = faulty
    main(rank, commands, lifeline)


def _raise() -> None:
    raise ValueError("the third step is one too many")


def _in_step(number: int, act: Any) -> None:
    real = gapless.engine.runner.ModelRunner.launch
    count = 0

    def faulty(self: Any, batch: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            act()
        return real(self, batch)

    gapless.engine.runner.ModelRunner.launch = faulty


def _in_first_capture(act: Any) -> None:
    real = gapless.graphs.runner.GraphRunner._run_and_store

    def faulty(self: Any, views: Any) -> Any:
        if self.store.device.is_recording():
            act()
        return real(self, views)

    gapless.graphs.runner.GraphRunner._run_and_store = faulty


def _records() -> bool:
    from gapless.graphs.device import get_device

    return get_device(torch.device("cpu")).is_recording()

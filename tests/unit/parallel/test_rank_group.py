"""The process group by itself, with one member; and which sums go through one kernel."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gapless.env import prepare_nccl
from gapless.errors import GraphError, RankError
from gapless.graphs.device.emulated import EmulatedDevice
from gapless.parallel import agreements, collectives, one_shot_choice
from gapless.parallel import group as group_module
from gapless.parallel.group import RankGroup
from gapless.parallel.one_shot import MAX_BYTES
from gapless.parallel.one_shot_choice import find_one_shot
from gapless.parallel.shard import Shard

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def shared() -> Iterator[RankGroup]:
    group = RankGroup(dist.HashStore(), rank=0, size=1, torch_device=CPU)
    collectives.register_group(group)
    yield group
    collectives.forget_group(group)
    group.close()
    assert not dist.is_initialized()


@pytest.fixture
def group(shared: RankGroup, monkeypatch: pytest.MonkeyPatch) -> RankGroup:
    """Unharmed by what a test does to it."""
    for name in ("_failure", "torch_device", "_is_capturing", "breaks", "_one_shot"):
        monkeypatch.setattr(shared, name, getattr(shared, name))
    return shared


def member(group: RankGroup) -> Shard:
    """A shard that does not look whole, so that the operators run."""
    return Shard(rank=0, size=2, group=group.shard.group)


def test_agreements_with_nobody_else(group):
    assert group.agree()
    assert not group.agree(False)
    assert group.first_problem() is None
    assert group.first_problem("no room") == "rank 0: no room"
    assert group.minimum([3, 1]) == [3, 1]
    assert group.minimum([]) == []
    assert group.from_first(7) == 7


def test_agreements_and_the_time_for_them_are_counted(group, monkeypatch):
    before = group.report()
    times = iter([10.0, 10.25, 20.0, 20.5])
    monkeypatch.setattr(agreements, "perf_counter", lambda: next(times))
    group.agree()
    group.from_first(7)
    after = group.report()
    assert after["agreements"] == before["agreements"] + 2
    assert after["agreements_s"] == pytest.approx(before["agreements_s"] + 0.75, abs=0.002)


def test_operators_give_the_sum_in_place_and_columns_without_padding(group):
    values = torch.arange(6.0).view(2, 3)
    summed = collectives.all_reduce(values, member(group))
    assert summed is values
    columns = collectives.gather_columns(values, 2, member(group))
    assert columns.tolist() == [[0, 1], [3, 4]]
    assert columns.is_contiguous()


def test_one_rank_calls_nothing():
    values = torch.ones(2)
    assert collectives.all_reduce(values, Shard(group=999)) is values
    assert collectives.gather_columns(values, 2, Shard(group=999)) is values


def test_operators_are_nodes_that_run_at_every_replay(group, device: EmulatedDevice, monkeypatch):
    sums: list[int] = []
    monkeypatch.setattr(group, "all_reduce", lambda values: sums.append(values.add_(1).numel()))
    values, out = torch.zeros(2, 3), torch.zeros(2, 3)
    with torch.no_grad():
        device.begin_segment(device.new_pool())
        out.copy_(collectives.all_reduce(values * 1, member(group)))
        segment = device.end_segment()
    assert not sums, "a capture computes nothing"
    assert "gapless.sum_over_ranks.default" in segment.op_names
    for value in (1.0, 5.0):
        values.fill_(value)
        segment.replay()
        assert out.tolist() == [[value + 1] * 3] * 2
    assert sums == [6, 6]


def test_a_closed_group_is_named():
    with pytest.raises(RankError, match="rank group 12345 has been closed"):
        collectives.all_reduce(torch.ones(1), Shard(rank=0, size=2, group=12345))


def test_after_a_failure_everything_says_the_reason(group, monkeypatch):
    monkeypatch.setattr(group, "_abort", lambda: None)
    group.fail(RankError("rank 3 is gone"))
    group.fail(RankError("and so is rank 2"))
    calls = (
        group.check,
        group.agree,
        lambda: group.all_reduce(torch.ones(1)),
        lambda: group.gather_columns(torch.ones(1, 1), 1),
        lambda: group.wait_for(lambda: False),
    )
    for call in calls:
        with pytest.raises(RankError, match=r"^rank 3 is gone$"):
            call()
    group._failed.clear()


def test_waiting_for_the_device_ends_when_it_is_done(group):
    answers = iter([False, False, True])
    group.wait_for(lambda: next(answers))
    assert next(answers, None) is None


def test_ranks_apart_neither_sum_nor_wait(group, monkeypatch):
    monkeypatch.setattr(group, "_tensors", None)  # nothing of it may be used
    with group.apart():
        values = torch.tensor([2.0])
        group.all_reduce(values)
        assert values.item() == 2
        assert group.gather_columns(torch.ones(2, 3), 3).shape == (2, 3)


def test_a_capture_that_was_not_announced_may_hold_no_sum(group, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    group.torch_device = torch.device("cuda")
    values = torch.ones(1)
    with pytest.raises(GraphError, match="capture through a GraphStore that knows its peers"):
        group.all_reduce(values)
    with group.capturing():
        group.all_reduce(values)
    monkeypatch.setattr(group, "_is_warm", False)
    with group.capturing(), pytest.raises(GraphError):
        group.all_reduce(values)


@pytest.mark.parametrize("is_noticed", ["before", "meanwhile"])
def test_leaving_a_group_on_gpus_ends_when_a_rank_is_lost(monkeypatch, is_noticed):
    """However long torch waits for that rank: ``destroy_process_group`` cannot be interrupted."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(group_module, "_LEAVE_S", 0.1)
    for_ever = threading.Event()
    monkeypatch.setattr(RankGroup, "_leave", lambda self: for_ever.wait())
    monkeypatch.setattr(RankGroup, "_abort", lambda self: None)
    group = object.__new__(RankGroup)
    group.torch_device, group._failed = torch.device("cuda"), threading.Event()
    group._is_closed, group._threads_before, group._failure = False, None, None
    lost = partial(group.fail, RankError("lost"))
    if is_noticed == "before":
        lost()
    else:
        threading.Timer(0.3, lost).start()
    start = time.monotonic()
    group.close()
    for_ever.set()
    assert time.monotonic() - start < 10.0
    assert str(group.failure) == "lost"


def test_small_sums_go_through_one_kernel_where_there_is_one(group):
    small: list[tuple[int, ...]] = []
    group._one_shot = SimpleNamespace(
        serves=lambda values: values.numel() < 10,
        all_reduce=lambda values: small.append((values.numel(),)),
        sum_add_rms_norm=lambda values, *others: small.append((values.numel(), len(others))),
    )
    group.all_reduce(torch.ones(4))
    group.all_reduce(torch.ones(40))
    group.sum_add_rms_norm(torch.ones(1, 4), *([torch.ones(1, 4)] * 5))
    assert small == [(4,), (4, 5)]


def test_a_rank_that_is_lost_while_the_group_is_left_still_ends_what_waits(group, monkeypatch):
    """The sums' memory may go, in the thread that leaves, just when the thread that watches lets go of it."""
    ended: list[str] = []

    class Leaving(RankGroup):
        looks = 0

        @property
        def _one_shot(self) -> Any:
            self.looks += 1
            return SimpleNamespace(release_waiting=lambda: None) if self.looks == 1 else None

    lost = object.__new__(Leaving)
    backend = SimpleNamespace(abort=lambda: ended.append("aborted"))
    lost._tensors = lost._control = SimpleNamespace(_get_backend=lambda device: backend)
    lost.torch_device, lost._failure, lost._failed = CPU, None, threading.Event()
    lost.fail(RankError("lost"))
    assert ended == ["aborted"] * 2


def test_a_failure_does_not_wait_for_the_graphs_that_hold_a_communicator(monkeypatch):
    """NCCL's abort returns only when they have gone, which the caller of ``fail`` may have to bring about."""
    graphs_gone, ended = threading.Event(), []

    class Backend:
        def abort(self) -> None:
            if graphs_gone.wait(30):
                ended.append("aborted")

    lost = object.__new__(RankGroup)
    lost._tensors = SimpleNamespace(_get_backend=lambda device: Backend())
    lost._control = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(abort=lambda: None))
    lost.torch_device, lost._failure, lost._failed = torch.device("cuda", 0), None, threading.Event()
    lost._one_shot = lost._aborting = None
    lost._abort_lock = threading.Lock()
    start = time.monotonic()
    failing = [threading.Thread(target=lost.fail, args=(RankError("lost"),)) for _ in range(2)]
    for thread in failing:
        thread.start()
    lost.fail(RankError("lost"))
    for thread in failing:
        thread.join(30)
    assert time.monotonic() - start < 10
    assert not ended
    graphs_gone.set()
    lost._aborting.join(30)
    assert ended == ["aborted"], "once, however often the group fails"


def test_a_rank_that_is_lost_when_a_group_is_left_is_aborted_before_the_group_goes(monkeypatch):
    """Whoever notes the failure may be anywhere on its way."""
    log: list[str] = []
    leaving = object.__new__(RankGroup)
    leaving.torch_device, leaving._failure, leaving._owns_world = torch.device("cuda", 0), None, True
    leaving._one_shot = leaving._aborting = None
    leaving._abort_lock = threading.Lock()
    slow = SimpleNamespace(abort=lambda: (time.sleep(0.2), log.append("aborted")))
    leaving._tensors = SimpleNamespace(_get_backend=lambda device: slow)
    leaving._control = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(abort=lambda: None))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: log.append("gone"))
    monkeypatch.setattr(leaving, "_forget_graphs", lambda: setattr(leaving, "_failure", RankError("lost")))
    leaving._leave()
    assert log == ["aborted", "gone"]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_group_that_ends_with_the_interpreter_needs_no_thread(monkeypatch, is_lost):
    """Python 3.12 starts none any more by then."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    left: list[bool] = []
    group = object.__new__(RankGroup)
    group.torch_device = torch.device("cuda", 0)
    group._is_closed, group._threads_before = False, None
    group._failure = RankError("lost") if is_lost else None
    group._one_shot = group._tensors = group._control = group._aborting = None
    group._abort_lock = threading.Lock()
    monkeypatch.setattr(group, "_leave", lambda: left.append(True))
    assert not group.becomes_idle(30)
    group.close()
    assert left == ([] if is_lost else [True]), "who waits for a rank that is gone could not be given up"


def test_a_kernel_that_is_found_after_a_rank_was_lost_is_never_launched(group, monkeypatch):
    """Whoever noted the failure had nothing to release."""
    monkeypatch.setattr(group, "_abort", lambda: None)
    launched: list[str] = []

    def find(*_: Any, on_open: Any, **others: Any) -> Any:
        group.fail(RankError("lost"))
        on_open(SimpleNamespace())
        launched.append("a kernel that waits")

    monkeypatch.setattr(group_module, "find_one_shot", find)
    with pytest.raises(RankError, match="lost"):
        group.find_one_shot()
    assert not launched
    group._failed.clear()


def test_a_device_that_does_not_become_idle_is_not_waited_for(monkeypatch):
    ends = threading.Event()
    lost = object.__new__(RankGroup)
    lost.torch_device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: ends.wait(30))
    assert not lost.becomes_idle(0.05)
    ends.set()
    assert lost.becomes_idle(30)

    def failed(device: object) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", failed)
    assert not lost.becomes_idle(30)


def test_a_rank_that_is_lost_while_sums_are_compared_is_not_waited_for(group, monkeypatch):
    """The kernel that compares has no other end."""
    released: list[str] = []

    def find(*_: Any, on_open: Any, **others: Any) -> Any:
        on_open(SimpleNamespace(release_waiting=lambda: released.append("released")))
        group.fail(RankError("lost"))
        others["agree"](True)

    monkeypatch.setattr(group_module, "find_one_shot", find)
    monkeypatch.setattr(group, "_tensors", None)
    monkeypatch.setattr(group, "_control", None)
    with pytest.raises(RankError, match="lost"):
        group.find_one_shot()
    assert released == ["released"]
    group._failed.clear()


def test_warm_ups_make_each_kind_of_sum_twice_and_leave_out_the_rest(group, monkeypatch):
    """What is lazy about a kind has happened by then, and nobody reads what such runs compute."""
    made: list[tuple[str, int]] = []
    group._one_shot = SimpleNamespace(
        serves=lambda values: values.numel() < 10,
        all_reduce=lambda values: made.append(("small", values.numel())),
        sum_add_rms_norm=lambda values, *others: made.append(("with norm", values.numel())),
    )
    tensors = SimpleNamespace(allreduce=lambda values, options: made.append(("large", values[0].numel())))
    monkeypatch.setattr(group, "_tensors", tensors)
    monkeypatch.setattr(
        group_module, "add_rms_norm_into", lambda *args: made.append(("norm", args[0].numel()))
    )

    def forward() -> None:
        for size in (4, 40):
            for _ in range(5):
                group.all_reduce(torch.ones(1, size))
                group.sum_add_rms_norm(torch.ones(1, size), *([torch.ones(1, size)] * 5))

    forward()
    assert len(made) == 25
    for _ in range(2):  # each time anew
        made.clear()
        with group.warming_up():
            forward()
            forward()
            counts = {kind: made.count(kind) for kind in made}
            assert counts == {
                ("small", 4): 2,
                ("with norm", 4): 2,
                ("norm", 4): 8,  # without the sum: memory that was never written may hold NaN
                ("large", 40): 2,  # the same kind, whatever stands behind it
                ("norm", 40): 10,
            }
            made.clear()
            with group.capturing():
                forward()
            assert len(made) == 25, "a capture, and what it runs between its segments, is whole"
    made.clear()
    forward()
    assert len(made) == 25


@pytest.mark.parametrize("is_compiling", [False, True])
def test_ranks_apart_compile_the_one_kernel_and_never_run_it(group, monkeypatch, is_compiling):
    asked: list[int] = []
    group._one_shot = SimpleNamespace(serves=lambda values: True, all_reduce=lambda v: asked.append(1))
    monkeypatch.setattr(group, "_tensors", None)
    monkeypatch.setattr(group_module, "is_compiling_ahead", lambda: is_compiling)
    with group.apart():
        group.all_reduce(torch.ones(4))
    assert len(asked) == is_compiling


def test_large_sums_are_followed_by_the_norm(group, monkeypatch):
    normed: list[Any] = []
    monkeypatch.setattr(group_module, "add_rms_norm_into", lambda *args: normed.append(args))
    group._one_shot = SimpleNamespace(serves=lambda values: False)
    args = (torch.ones(2, 4), torch.ones(2, 4), torch.ones(4), 1e-5, torch.ones(2, 4), torch.ones(2, 4))
    group.sum_add_rms_norm(*args)
    assert [tuple(map(id, found)) for found in normed] == [tuple(map(id, args))]


@pytest.mark.parametrize("is_break", [False, True])
def test_a_sum_with_its_norm_is_one_operator(group, monkeypatch, is_break):
    """Of whatever strategy; and what it gives are new tensors."""
    group.breaks = is_break

    def fake(partial, residual, weight, eps, total, normed):
        total.copy_(partial + residual)
        normed.copy_(weight * eps)

    monkeypatch.setattr(group, "sum_add_rms_norm", fake)
    args = (torch.ones(2, 4), torch.ones(2, 4), torch.arange(4.0), 2.0)
    total, normed = collectives.sum_add_rms_norm(*args, member(group))
    assert total.tolist() == [[2.0] * 4] * 2
    assert normed.tolist() == [[0.0, 2.0, 4.0, 6.0]] * 2


class FakeReducer:
    sum_add_rms_norm = None
    release_waiting = lambda self: None  # noqa: E731

    def __init__(self, *_: Any) -> None:
        self.max_bytes = 0


def choose(monkeypatch: pytest.MonkeyPatch, *, faster_up_to: int, **others: Any) -> tuple[Any, str]:
    monkeypatch.setattr(one_shot_choice, "open_mailbox", others.pop("mailbox", lambda *_: None))
    monkeypatch.setattr(one_shot_choice, "OneShotReducer", FakeReducer)
    launches = others.pop("launches", [lambda: None])
    monkeypatch.setattr(one_shot_choice, "_first_launches", lambda *_: launches)
    monkeypatch.setattr(one_shot_choice, "is_right", lambda *_: others.pop("is_right", True))

    def seconds(call: Any, agree: Any) -> float:
        values, is_ours = call.args[0], call.func is None
        return 1.0 if is_ours == (values.nbytes <= faster_up_to) else 2.0

    monkeypatch.setattr(one_shot_choice, "seconds_of_call", seconds)
    monkeypatch.setattr(
        one_shot_choice, "partial", lambda func, *args, **_: SimpleNamespace(func=func, args=args)
    )
    agree = others.pop("agree", lambda is_well: is_well)
    from_first = others.pop("from_first", lambda value: value)
    return find_one_shot(None, None, CPU, agree=agree, from_first=from_first, on_open=lambda reducer: None)


def test_multicast_between_gpus_stays_off(monkeypatch):
    """Also where the environment asks for it."""
    monkeypatch.setattr(os, "environ", environ := {"NCCL_NVLS_ENABLE": "1"})
    prepare_nccl()
    assert environ["NCCL_NVLS_ENABLE"] == "0"
    assert environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


def test_a_sum_writes_no_record_that_nobody_reads(monkeypatch):
    """torch would keep the Python stack of each of the last 2000 collectives."""
    for given in ({}, {"TORCH_FR_BUFFER_SIZE": "9"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}):
        environ = dict(given)
        monkeypatch.setattr(os, "environ", environ)
        prepare_nccl()
        found = {name: value for name, value in environ.items() if name.endswith("BUFFER_SIZE")}
        assert found == (given or {"TORCH_FR_BUFFER_SIZE": "0"}), "whoever wants the records has them"


@pytest.mark.parametrize("limit", [8192, 65536, MAX_BYTES])
def test_the_largest_message_that_was_faster_is_the_limit(monkeypatch, limit):
    reducer, why = choose(monkeypatch, faster_up_to=limit)
    assert reducer.max_bytes == limit
    assert why == f"one kernel up to {limit} bytes, NCCL above"


def test_the_first_rank_decides_for_all(monkeypatch):
    reducer, _ = choose(monkeypatch, faster_up_to=8192, from_first=lambda value: 16384)
    assert reducer.max_bytes == 16384


def _missing(*_: Any) -> Any:
    raise RuntimeError("no fabric\nlong story")


def _changed(*_: Any) -> Any:
    raise TypeError("another torch")


def test_kernels_that_wait_for_a_rank_that_cannot_launch_are_released(monkeypatch):
    """One after the other: while a kernel waits, loading the next may wait for it."""
    done: list[str] = []
    monkeypatch.setattr(FakeReducer, "release_waiting", lambda self: done.append("released"))
    answers = iter([True, True, False])  # mailbox, first kernel, second kernel
    launches = [lambda: done.append("first"), lambda: done.append("second"), lambda: done.append("third")]
    found = choose(monkeypatch, faster_up_to=8192, agree=lambda is_well: next(answers), launches=launches)
    assert found == (None, "NCCL only: one-shot sums cannot be launched (on another rank)")
    assert done == ["first", "second", "released"]


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"mailbox": _missing}, "NCCL only: no symmetric memory (no fabric)"),
        ({"agree": lambda is_well: False}, "NCCL only: no symmetric memory (on another rank)"),
        ({"mailbox": _changed}, "NCCL only: no symmetric memory (another torch)"),
        ({"launches": [_missing]}, "NCCL only: one-shot sums cannot be launched (no fabric)"),
        ({"is_right": False}, "NCCL only: one-shot sums differ from NCCL's"),
        ({"from_first": lambda value: 0}, "NCCL only: faster at every size that was measured"),
    ],
    ids=["not here", "not there", "another torch", "no launch", "wrong", "slower"],
)
def test_why_there_is_no_one_kernel(monkeypatch, others, why):
    assert choose(monkeypatch, faster_up_to=8192, **others) == (None, why)

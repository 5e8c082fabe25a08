"""One rank of two or more that check or time sums in one kernel, each on its GPU. Prints a JSON object
for each.

``python one_shot_ranks.py WHAT RANK SIZE PORT``, with names of ``WHAT`` below, comma between; run by
``test_one_shot_cuda.py``.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gapless.kernels.launch import is_compiling_ahead
from gapless.kernels.norm import add_rms_norm_into
from gapless.parallel import bulk_choice, one_shot
from gapless.parallel.bulk_sum import MAX_PROGRAMS, BulkReducer
from gapless.parallel.group import RankGroup
from gapless.parallel.one_shot import OneShotReducer
from gapless.parallel.rank_reducer import RankReducer

E = 4096
EPS = 1e-5
NUM_SETS = 8
NUM_ROUNDS = 3000
NUM_BULK_ROUNDS = 1000
NUM_TIMED = 40


class Calls:
    """Sums over ``num_rows`` rows, three with a norm and one without, on inputs of which there are
    ``NUM_SETS`` sets; every rank knows all ranks' inputs, and so the sums in float64."""

    def __init__(self, reducer: RankReducer, rank: int, size: int, num_rows: int, dtype: torch.dtype):
        self.reducer, self.dtype = reducer, dtype
        generator = torch.Generator("cuda").manual_seed(num_rows)
        shape = (size, NUM_SETS, 4, num_rows, E)
        everyone = (torch.randn(shape, device="cuda", generator=generator) * 3).to(dtype)
        self.sets = everyone[rank].clone()
        self.residual = torch.randn(num_rows, E, device="cuda", generator=generator).to(dtype)
        self.weight = (torch.rand(E, device="cuda", generator=generator) + 0.5).to(dtype)
        self.sums = everyone.double().sum(0)
        self.inputs = torch.empty_like(self.sets[0])
        self.total, self.normed = torch.empty_like(self.inputs), torch.empty_like(self.inputs)
        self.graph: torch.cuda.CUDAGraph | None = None

    def load(self, index: int) -> None:
        self.inputs.copy_(self.sets[index])
        self.total.fill_(float("nan"))
        self.normed.fill_(float("nan"))

    def call(self) -> None:
        for i in range(3):
            args = (self.inputs[i], self.residual, self.weight, EPS, self.total[i], self.normed[i])
            self.reducer.sum_add_rms_norm(*args)
        self.total[3].copy_(self.inputs[3])
        self.reducer.all_reduce(self.total[3])

    def run(self) -> None:
        if self.graph is None:
            self.call()
        else:
            self.graph.replay()

    def num_wrong(self, index: int) -> Tensor:
        """Elements that are further from the sum in float64 than roundings explain."""
        unit = 2.0**-8 if self.dtype == torch.bfloat16 else 2.0**-11
        wanted = self.sums[index].clone()
        size = wanted.abs()
        wanted[:3] += self.residual.double()
        bound = unit * (size + wanted.abs()) + 1e-6
        wrong = ~((self.total.double() - wanted).abs() <= bound)
        total = self.total[:3].double()
        scale = (total.square().mean(-1, keepdim=True) + EPS).rsqrt()
        normed = total * scale * self.weight.double()
        return (
            wrong.sum()
            + (~((self.normed[:3].double() - normed).abs() <= 2 * unit * normed.abs() + 1e-6)).sum()
        )


def check(group: RankGroup, reducer: OneShotReducer) -> dict[str, Any]:
    kinds = ((1, torch.bfloat16), (33, torch.bfloat16), (2, torch.float16), (64, torch.bfloat16))
    return check_calls(group, reducer, kinds, NUM_ROUNDS)


def check_many(group: RankGroup, reducer: OneShotReducer) -> dict[str, Any]:
    kinds = ((300, torch.bfloat16), (129, torch.bfloat16), (2, torch.float16), (600, torch.bfloat16))
    return check_calls(group, bulk_of(group, reducer), kinds, NUM_BULK_ROUNDS)


def check_refused(group: RankGroup, reducer: OneShotReducer) -> dict[str, Any]:
    """As ``check``, after a rank could not launch the kernel for many rows and the others were released."""

    def refuse(*_: Any) -> None:
        if not is_compiling_ahead():
            raise RuntimeError("refused")

    if group.rank == 1:
        BulkReducer.all_reduce = refuse  # type: ignore[method-assign]
    group.find_one_shot()
    few = group._one_shot
    assert few is not None, group.sums_by
    assert group._bulk is None, group.sums_by
    assert not few.released.any()
    return check(group, few)


def bulk_of(group: RankGroup, few: OneShotReducer) -> BulkReducer:
    where = (group._tensors, group._control, group.torch_device)
    reducer = BulkReducer(bulk_choice._open(*where, MAX_PROGRAMS, few))
    group.agree()
    return reducer


def check_calls(
    group: RankGroup, reducer: RankReducer, kinds: tuple[tuple[int, torch.dtype], ...], num_rounds: int
) -> dict[str, Any]:
    """Graphs of two sizes and eager calls of others, in an order that is the same on all ranks; which rank is
    late differs."""
    order, own = random.Random(5), random.Random(group.rank)
    all_calls = [Calls(reducer, group.rank, group.size, num_rows, dtype) for num_rows, dtype in kinds]
    stream = torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    checksum = torch.zeros_like(wrong)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for calls in all_calls[:2]:
            calls.load(0)
            calls.call()
            stream.synchronize()
            calls.graph = torch.cuda.CUDAGraph()
            calls.graph.capture_begin(capture_error_mode="thread_local")
            calls.call()
            calls.graph.capture_end()
        for number in range(num_rounds):
            calls = all_calls[order.choices(range(4), (5, 5, 1, 1))[0]]
            index = order.randrange(NUM_SETS)
            calls.load(index)
            if own.random() < 0.1:
                torch.cuda._sleep(own.randrange(100_000))
            for _ in range(order.randrange(1, 4)):  # behind one another, with nothing in between
                calls.run()
            wrong += calls.num_wrong(index)
            checksum.mul_(31).add_(calls.total.view(torch.int16).long().sum() + number)
            checksum.add_(calls.normed.view(torch.int16).long().sum())
        stream.synchronize()
    # Two kernels give the same sums.
    calls = all_calls[1]
    calls.load(3)
    calls.call()
    summed = calls.inputs[0].clone()
    reducer.all_reduce(summed)
    total, normed = torch.empty_like(summed), torch.empty_like(summed)
    add_rms_norm_into(summed, calls.residual, calls.weight, EPS, total, normed)
    same_sum = torch.equal(total, calls.total[0])
    ulps = (normed.view(torch.int16).int() - calls.normed[0].view(torch.int16).int()).abs().max()
    for calls in all_calls:
        calls.graph = None
    return {
        "wrong": int(wrong),
        "checksum": int(checksum),
        "is_same_sum": same_sum,
        "norm_ulps": int(ulps),
    }


def seconds(run: Callable[[], object], agree: Callable[[bool], bool]) -> float:
    """Of one call in a graph of ``NUM_TIMED``."""
    run()
    torch.cuda.synchronize()
    agree(True)
    stream, found = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(NUM_TIMED):
            run()
        graph.capture_end()
        for _ in range(7):
            agree(True)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            found.append(start.elapsed_time(end) / NUM_TIMED)
        graph.reset()
    return statistics.median(found[2:]) / 1000


def ways_of(group: RankGroup, reducer: RankReducer, num_rows: int) -> dict[str, Callable[[], None]]:
    """One sum with its norm, each way by its name."""
    values = torch.zeros(num_rows, E, dtype=torch.bfloat16, device="cuda")
    weight = torch.ones(E, dtype=torch.bfloat16, device="cuda")
    rest = (torch.zeros_like(values), weight, EPS, torch.empty_like(values), torch.empty_like(values))

    def plain() -> None:
        reducer.all_reduce(values)
        add_rms_norm_into(values, *rest)

    def nccl() -> None:
        dist.all_reduce(values, group=group._tensors)
        add_rms_norm_into(values, *rest)

    return {
        "fused": lambda: reducer.sum_add_rms_norm(values, *rest),
        "plain": plain,
        "nccl": nccl,
        "norm_alone": lambda: add_rms_norm_into(values, *rest),
    }


def time_ways(group: RankGroup, ways: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Microseconds."""
    return {name: round(seconds(way, group.agree) * 1e6, 2) for name, way in ways.items()}


def time(group: RankGroup, reducer: OneShotReducer) -> dict[str, Any]:
    """Microseconds of one sum with its norm, by rows and way."""
    group.find_one_shot()
    found: dict[str, Any] = {"sums_by": group.sums_by}
    choose_warps = one_shot._num_warps
    for num_rows in (1, 8, 32, 128):
        ways = ways_of(group, reducer, num_rows)
        row = time_ways(group, ways)
        for num_warps in (8, 32) if num_rows in (1, 32) else ():
            one_shot._num_warps = lambda *_, n=num_warps: n
            one_shot._constants.cache_clear()
            row |= time_ways(group, {f"fused, {num_warps} warps": ways["fused"]})
        one_shot._num_warps = choose_warps
        one_shot._constants.cache_clear()
        found[str(num_rows)] = row
    return found


def time_many(group: RankGroup, reducer: OneShotReducer) -> dict[str, Any]:
    """As ``time``, of many rows."""
    bulk = bulk_of(group, reducer)
    sizes = (256, 512, 1024, 2048, 4096)
    return {str(num_rows): time_ways(group, ways_of(group, bulk, num_rows)) for num_rows in sizes}


WHAT = {each.__name__: each for each in (check, check_many, check_refused, time, time_many)}


def main(what: str, rank: int, size: int, port: int) -> None:
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
    device = torch.device("cuda", rank)
    group = RankGroup(store, rank=rank, size=size, torch_device=device, timeout_s=60.0)
    reducer = OneShotReducer(one_shot.open_mailbox(group._tensors, group._control, device))
    group.agree()
    with torch.no_grad():
        for name in what.split(","):
            run = WHAT[name]
            print(json.dumps(run(group, reducer)), flush=True)
    torch.cuda.synchronize()
    group.agree()
    group.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))

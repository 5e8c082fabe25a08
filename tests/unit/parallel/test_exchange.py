"""Exchanges of symmetric memory between a process that has had engines before and a fresh one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from gapless.parallel.exchange import ExchangeGroup, ExchangeStore
from gapless.parallel.group import RankGroup


class TorchProcess:
    """What ``StoreExchange`` of torch does in one process: it counts exchanges, whatever the group."""

    def __init__(self, num_exchanges: int) -> None:
        self.number = num_exchanges

    def all_gather(self, store: dist.Store, rank: int, value: str) -> list[str]:
        # Through a store of torch's own, so that C++ calls ours, as it does there.
        store = dist.PrefixStore("CUDASymmetricMemory", store)
        keys = [f"{self.number}/{peer}" for peer in range(2)]
        self.number += 1
        store.set(keys[rank], value)
        store.wait(keys)
        return [store.get(key).decode() for key in keys]


def test_a_process_of_many_engines_meets_a_fresh_one():
    """The first rank has had two engines, of two exchanges each; the other process is new each time."""
    old = TorchProcess(4)
    for _ in range(2):
        shared = dist.HashStore()
        fresh, found = TorchProcess(0), {}

        def exchange(process: TorchProcess, rank: int, shared=shared, found=found) -> None:
            store = ExchangeStore(shared, timeout_s=20.0)
            found[rank] = [process.all_gather(store, rank, f"{what} of {rank}") for what in ("fd", "pad")]

        other = threading.Thread(target=exchange, args=(fresh, 1))
        other.start()
        exchange(old, 0)
        other.join(20.0)
        assert found[0] == found[1] == [["fd of 0", "fd of 1"], ["pad of 0", "pad of 1"]]


def test_kinds_of_exchange_are_counted_each_by_itself():
    shared = dist.HashStore()
    store = ExchangeStore(shared)
    store.set("memory/7/0", b"a")
    store.set("signals/3/0", b"b")
    store.set("memory/8/0", b"c")
    store.set("plain", b"d")
    assert [shared.get(key) for key in ("memory/0/0", "signals/0/0", "memory/1/0", "plain")] == [
        b"a",
        b"b",
        b"c",
        b"d",
    ]


def test_a_peer_that_does_not_come_is_given_up():
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        ExchangeStore(dist.HashStore(), timeout_s=0.2).wait(["memory/0/1"])
    assert time.monotonic() - start < 5.0


@pytest.fixture
def ranks() -> Iterator[RankGroup]:
    group = RankGroup(dist.HashStore(), rank=0, size=1, torch_device=torch.device("cpu"))
    yield group
    group.close()


def test_torch_finds_the_group_and_its_store_by_name(ranks: RankGroup):
    exchange = ExchangeGroup(ranks._tensors, ranks._control)
    found = c10d._resolve_process_group(exchange.name)
    assert (found.rank(), found.size()) == (0, 1)
    found.get_group_store().set("memory/9/0", b"here")
    assert found.get_group_store().get("memory/9/0") == b"here"
    assert ExchangeGroup(ranks._tensors, ranks._control).name != exchange.name


def test_the_next_exchange_of_the_same_ranks_does_not_find_what_the_last_one_left(ranks: RankGroup):
    """Or it would not wait, and use handles before its peer has made them."""
    for number in range(2):
        exchange = ExchangeGroup(ranks._tensors, ranks._control)
        store = c10d._resolve_process_group(exchange.name).get_group_store()
        with pytest.raises(RuntimeError):
            store.wait([f"memory/{number}/0"], timedelta(seconds=0.05))
        store.set(f"memory/{number}/0", b"here")
        store.wait([f"memory/{number}/0"])

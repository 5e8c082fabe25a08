"""How ranks of different age exchange the handles of symmetric memory.

torch names every exchange by a number that counts those of the *process* (``StoreExchange``, torch 2.11 to
2.13; pytorch#196082). The first rank lives on when an engine ends and the others are fresh processes each
time, so from its second engine on it would wait for keys that nobody sets. Here both count from the first
number that this engine has seen. The group that torch is given has that store and nothing else to do.
Invariants: a peer that does not come is given up after ``timeout_s``; a group never finds what an earlier
one of the same ranks has left, or it would take handles before its peers have made them. Read ``one_shot.py``
for the sums.
"""

from __future__ import annotations

import itertools
import re
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

EXCHANGE_S = 30.0
"""Ranks come here together, out of an agreement."""

_NUMBERED = re.compile(r"(.*/)(\d+)(/\d+)")
"""What is exchanged, the number of the exchange, and the rank."""
_names = itertools.count(1)


class ExchangeStore(dist.Store):
    """``store`` for the exchanges of one engine. Raises ``RuntimeError`` when a peer does not come."""

    def __init__(self, store: dist.Store, *, timeout_s: float = EXCHANGE_S) -> None:
        super().__init__()
        self._store, self._timeout = store, timedelta(seconds=timeout_s)
        self._first: dict[str, int] = {}

    # What torch calls in an exchange, from C++.
    def set(self, key: str, value: Any) -> None:
        self._store.set(self._renumbered(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._renumbered(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait([self._renumbered(key) for key in keys], timeout or self._timeout)

    def _renumbered(self, key: str) -> str:
        found = _NUMBERED.fullmatch(key)
        if found is None:
            return key
        what, number, rank = found[1], int(found[2]), found[3]
        return f"{what}{number - self._first.setdefault(what, number)}{rank}"


class ExchangeGroup:
    """The members of ``group`` once more, under a ``name`` that torch's symmetric memory is given. torch
    knows it as long as this object lives."""

    def __init__(self, group: Any, control: Any) -> None:
        """``control``: a group of the same ranks for the CPU; torch wants to see some backend."""
        name: Any = f"gapless-exchange-{next(_names)}"  # torch's type for names is private
        self.name = name
        """Never used twice: torch keeps what it finds by name."""
        store = group.get_group_store()
        # Counted by the ranks' own store, so all count alike.
        ordinal = store.add(f"gapless-exchanges-of/{group.rank()}", 1)
        self._store = ExchangeStore(dist.PrefixStore(f"gapless-exchange-{ordinal}", store))
        self._group = dist.ProcessGroup(self._store, group.rank(), group.size())
        cpu = torch.device("cpu")
        self._group._register_backend(cpu, dist.ProcessGroup.BackendType.GLOO, control._get_backend(cpu))
        c10d._register_process_group(name, self._group)

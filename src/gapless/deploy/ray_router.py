"""Ray Serve's choice of a replica, made by ``serve/routing.py``: who holds a prompt's beginning, in limits.

Ray Serve loads this class by name into every process that has a handle on the engines; each learns from what
it has sent itself. Load is counted in requests that a replica is known to have, since that is what Ray
reports; a replica unknown to be busy is idle. The order returned is a wish: Ray asks each whether it has room
and takes the next if it has not. Read ``ray_serve.py`` for where it is switched on. It needs Ray's request
router API (2.47 or later).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from gapless.serve.messages import EmbedRequest, GenerateRequest
from gapless.serve.routing import Router, name_prefix

MAX_PENDING = 4096
"""Prompts whose names are kept until Ray says where they went."""


class PrefixAwareRouter(FIFOMixin, RequestRouter):
    """For deployments whose methods take a ``GenerateRequest`` or an ``EmbedRequest``."""

    def initialize_state(self, *, block_size: int = 16, slack_requests: int = 8) -> None:
        """``slack_requests``: how many more than the least busy a replica may have and still be preferred."""
        self._block_size = block_size
        self._choices = Router(slack_tokens=slack_requests)
        self._numbers: dict[ReplicaID, int] = {}
        self._next_number = itertools.count()
        self._prefixes: OrderedDict[int, list[bytes]] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if not candidate_replicas:
            return []
        prefix = [] if pending_request is None else self._prefix_of(pending_request)
        loads = {self._number(replica.replica_id): self._load(replica) for replica in candidate_replicas}
        best = self._choices.choose(loads, prefix).replica
        rest = [replica for replica in candidate_replicas if self._number(replica.replica_id) != best]
        first = [replica for replica in candidate_replicas if self._number(replica.replica_id) == best]
        return [first, sorted(rest, key=lambda replica: loads[self._number(replica.replica_id)])]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        prefix = self._prefixes.pop(id(pending_request), None)
        if prefix is None:
            prefix = _name(pending_request, self._block_size)
        self._choices.sent(self._number(replica_id), prefix)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        alive = {replica.replica_id for replica in replicas}
        for replica_id in [known for known in self._numbers if known not in alive]:
            self._choices.forget(self._numbers.pop(replica_id))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        if replica_id in self._numbers:
            self._choices.forget(self._numbers.pop(replica_id))

    def _number(self, replica_id: ReplicaID) -> int:
        if replica_id not in self._numbers:
            self._numbers[replica_id] = next(self._next_number)
        return self._numbers[replica_id]

    def _load(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0

    def _prefix_of(self, pending_request: PendingRequest) -> Sequence[bytes]:
        """Named once, although Ray may ask several times until a replica has room."""
        key = id(pending_request)
        if key not in self._prefixes:
            self._prefixes[key] = _name(pending_request, self._block_size)
            while len(self._prefixes) > MAX_PENDING:
                self._prefixes.popitem(last=False)
        return self._prefixes[key]


def _name(pending_request: PendingRequest, block_size: int) -> list[bytes]:
    asked = pending_request.args[0] if pending_request.args else None
    if not isinstance(asked, GenerateRequest | EmbedRequest):
        return []
    return name_prefix(asked.prompt_token_ids, block_size=block_size, extra=asked.cache_extra)

"""Ray Serve's choice of a replica, made by ``serve/routing.py``: who holds a prompt's beginning, in limits.

Ray Serve loads this class by name into every process that has a handle on the engines; each learns from what
it has sent itself. Load is counted in requests: the larger of what Ray knows of a replica and of what was
sent there from here and is not over, and those that were chosen for it and not sent yet, because a burst is
chosen for as a whole before Ray counts any of it. The order returned is a wish: Ray asks each whether it has
room and takes the next if it has not. A request gets the replica that was chosen for it, so this is no
``FIFOMixin``, which would hand them out in order of arrival. It needs Ray's request router API (2.47 or
later). Read ``ray_serve.py`` for where it is switched on.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from gapless.serve.messages import EmbedRequest, GenerateRequest
from gapless.serve.routing import Router, name_prefix

MAX_PENDING = 4096
"""Choices that are kept until Ray says where a request went; some are given up before that."""
_TELLS_COMPLETION = hasattr(RequestRouter, "on_request_completed")
"""Older versions of Ray do not say when a request is over: then only what Ray knows counts."""


@dataclass(slots=True)
class _Chosen:
    """``pending`` is held so that its ``id`` is nobody else's meanwhile. It stays between its sending and the
    replica's answer, but counts as sent then."""

    pending: PendingRequest
    replica_id: ReplicaID
    prefix: list[bytes]
    is_sent: bool = False

    def goes_to(self, replica_id: ReplicaID) -> bool:
        """Whether that is where Ray has decided to send it, which may not be where it was chosen for."""
        future = self.pending.future
        is_decided = future.done() and not future.cancelled() and future.exception() is None
        return is_decided and future.result().replica_id == replica_id


class PrefixAwareRouter(RequestRouter):
    """For deployments whose methods take a ``GenerateRequest`` or an ``EmbedRequest``."""

    def initialize_state(self, *, block_size: int = 16, slack_requests: int = 8) -> None:
        """``slack_requests``: how many more than the least busy a replica may have and still be preferred."""
        self._block_size = block_size
        self._choices = Router(slack_tokens=slack_requests)
        self._numbers: dict[ReplicaID, int] = {}
        self._next_number = itertools.count()
        self._sent: Counter[ReplicaID] = Counter()
        self._chosen: OrderedDict[int, _Chosen] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if not candidate_replicas:
            return []
        # Ray may ask again until a replica has room; the prompt is named once.
        prefix = self._take_prefix(pending_request)
        for given_up in [key for key, each in self._chosen.items() if each.pending.future.cancelled()]:
            del self._chosen[given_up]  # its caller has gone before a replica had room: it is nobody's load
        unsent = self._num_unsent()
        by_number = {self._number(replica.replica_id): replica for replica in candidate_replicas}
        loads = {
            number: self._load(replica.replica_id) + unsent[replica.replica_id]
            for number, replica in by_number.items()
        }
        best = self._choices.choose(loads, prefix).replica
        if pending_request is not None:
            self._chosen[id(pending_request)] = _Chosen(pending_request, by_number[best].replica_id, prefix)
            while len(self._chosen) > MAX_PENDING:
                self._chosen.popitem(last=False)
        rest = sorted(loads.keys() - {best}, key=lambda number: (loads[number], number))
        return [[by_number[best]], [by_number[number] for number in rest]]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        if _TELLS_COMPLETION:
            self._sent[replica_id] += 1
        for each in self._chosen.values():
            if not each.is_sent and each.goes_to(replica_id):
                each.is_sent = True  # Ray does not say which it was; of one replica's they are alike
                break

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._choices.sent(self._number(replica_id), self._take_prefix(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        if self._sent[replica_id] > 1:
            self._sent[replica_id] -= 1
        else:
            del self._sent[replica_id]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        alive = {replica.replica_id for replica in replicas}
        for replica_id in [known for known in self._numbers if known not in alive]:
            self._forget(replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    def _take_prefix(self, pending_request: PendingRequest | None) -> list[bytes]:
        known = self._chosen.pop(id(pending_request), None)
        return _name(pending_request, self._block_size) if known is None else known.prefix

    def _num_unsent(self) -> Counter[ReplicaID]:
        return Counter(each.replica_id for each in self._chosen.values() if not each.is_sent)

    def _forget(self, replica_id: ReplicaID) -> None:
        number = self._numbers.pop(replica_id, None)
        if number is not None:
            self._choices.forget(number)
        del self._sent[replica_id]

    def _number(self, replica_id: ReplicaID) -> int:
        if replica_id not in self._numbers:
            self._numbers[replica_id] = next(self._next_number)
        return self._numbers[replica_id]

    def _load(self, replica_id: ReplicaID) -> int:
        return max(self.replica_queue_len_cache.get(replica_id) or 0, self._sent[replica_id])


def _name(pending_request: PendingRequest | None, block_size: int) -> list[bytes]:
    asked = pending_request.args[0] if pending_request is not None and pending_request.args else None
    if not isinstance(asked, GenerateRequest | EmbedRequest):
        return []
    return name_prefix(asked.prompt_token_ids, block_size=block_size, extra=asked.cache_extra)

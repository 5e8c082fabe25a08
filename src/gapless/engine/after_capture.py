"""What a start does once all is captured: look up every graph, note what it reads, time wide paddings.

Used by ``build.py``, at the end of its capture; ``verify.py`` compares with what was noted.
"""

from __future__ import annotations

from gapless.engine.graph_set import GraphSet
from gapless.errors import GraphError
from gapless.graphs.audit import Snapshot
from gapless.graphs.batch import BatchDescriptor, BatchShape
from gapless.graphs.dispatcher import MAX_PADDING_RATIO, MAX_PADDING_TOKENS, Dispatcher
from gapless.graphs.modes import Phase, Strategy
from gapless.graphs.plan import GraphPlan
from gapless.graphs.store import GraphStore
from gapless.models.base import CausalModel
from gapless.parallel.group import RankGroup


def check_lookup(store: GraphStore, dispatcher: Dispatcher, plan: GraphPlan) -> None:
    """Every captured key of the two phases must be what the dispatcher returns for a batch of exactly that
    size."""
    for row in store.ledger:
        descriptor = row.key.descriptor
        if row.key.phase not in (Phase.PREFILL, Phase.DECODE):
            continue
        if descriptor.uniform:
            query_lens = (plan.uniform_query_len,) * descriptor.num_reqs
        elif row.key.phase is Phase.PREFILL and descriptor.num_tokens != plan.uniform_query_len:
            query_lens = (descriptor.num_tokens,)
        else:
            query_lens = (plan.uniform_query_len,) * (descriptor.num_tokens // plan.uniform_query_len)
        found = dispatcher.dispatch(BatchShape(query_lens=query_lens))
        if found.descriptor != descriptor and found.mode <= row.key.mode:
            raise GraphError(f"captured {row.key}, but a batch of exactly that size is dispatched to {found}")


def measure_gaps(graphs: GraphSet, dispatcher: Dispatcher, group: RankGroup | None) -> None:
    """Where a listed ladder leaves wide gaps, measure whether padding up to the next size beats an eager
    step."""
    if graphs.prefill.strategy is Strategy.DISABLED:
        return
    below = 0
    for descriptor in reversed(dispatcher.capture_descriptors(Phase.PREFILL)):
        fewest, below = below + 1, descriptor.num_tokens
        padding = descriptor.num_tokens - fewest
        if padding <= MAX_PADDING_TOKENS or descriptor.num_tokens <= MAX_PADDING_RATIO * fewest:
            continue
        plain = BatchDescriptor(num_tokens=fewest, num_reqs=1)
        is_graph_faster = graphs.prefill.time_padding(descriptor, plain).is_graph_faster
        if group is not None:
            is_graph_faster = bool(group.from_first(is_graph_faster))
        if is_graph_faster:
            dispatcher.allow_padding(descriptor, up_to=padding)


def note_addresses(model: CausalModel) -> Snapshot:
    """Where every tensor lies that the model reaches, by name; it keeps none of them alive."""
    snapshot = Snapshot({"model": model})
    snapshot.forget()
    return snapshot

"""Which ladder each phase of a plan gets: the limits of model and engine meet the sizes that were asked for.

Per-phase options win over ``capture_sizes``, which count tokens for both phases. Where decode replays the
graphs that prefill owns, its ladder holds only sizes on top of prefill's. Read ``ladder.py`` for the ladders
themselves.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from gapless.graphs.capabilities import Capabilities, GraphRequest
from gapless.graphs.ladder import Dropped, Ladder, decode_ladder, prefill_ladder, requests_from_tokens
from gapless.graphs.modes import RuntimeMode, Strategy

_BOTH_PHASES = "cudagraph_capture_sizes"


def is_one_piecewise_set(prefill: Strategy, decode: Strategy) -> bool:
    """Piecewise graphs are keyed by tokens alone, so phases of one strategy share a set."""
    return prefill is decode and prefill.runtime_mode is RuntimeMode.PIECEWISE


def prefill_sizes(request: GraphRequest, capabilities: Capabilities, *, serves_decode: bool) -> Ladder:
    """Token counts. ``serves_decode``: decode has no other graphs, so its largest batch must fit too."""
    limit = _reachable(capabilities, capabilities.chunked_prefill_size)
    default_max = min(limit, capabilities.prefill_max_cap or limit)
    if serves_decode:
        decode_tokens = _reachable(capabilities, capabilities.max_reqs * capabilities.uniform_query_len)
        limit, default_max = max(limit, decode_tokens), max(default_max, decode_tokens)
    sizes, name = request.prefill_sizes, "--cuda-graph-bs-prefill"
    if sizes is None:
        sizes, name = request.capture_sizes, _BOTH_PHASES
    return prefill_ladder(
        limit=limit,
        default_max=default_max,
        max_size=request.prefill_max,
        sizes=sizes,
        multiple_of=capabilities.token_multiple,
        sizes_name=name,
    )


def decode_sizes(request: GraphRequest, capabilities: Capabilities, *, uses_prefill_graphs: bool) -> Ladder:
    """Request counts. ``uses_prefill_graphs``: only what was asked for on top of prefill's sizes."""
    query_len = capabilities.uniform_query_len
    sizes, name = request.decode_sizes, "--cuda-graph-bs-decode"
    rounded: tuple[Dropped, ...] = ()
    if sizes is None and request.decode_max is None and uses_prefill_graphs:
        return Ladder()
    if sizes is None and request.capture_sizes is not None:
        name = _BOTH_PHASES
        sizes, rounded = requests_from_tokens(request.capture_sizes, query_len=query_len, sizes_name=name)
    ladder = decode_ladder(
        max_reqs=max(1, _reachable(capabilities, capabilities.max_reqs * query_len) // query_len),
        max_size=request.decode_max,
        sizes=sizes,
        multiple_of=capabilities.token_multiple // gcd(capabilities.token_multiple, query_len),
        sizes_name=name,
    )
    return replace(ladder, dropped=rounded + ladder.dropped)


def _reachable(capabilities: Capabilities, tokens: int) -> int:
    total = capabilities.max_total_tokens
    return tokens if total is None else min(tokens, total)

"""Which of several replicas a request goes to: where its prefix lies, unless that one has too much to do.

Pure bookkeeping, without clocks or sockets, so that the server, Ray Serve's router and the simulation
(``benchmarks/scale_sim.py``) share it. A prompt is named by the hashes of its leading blocks, the very names
that the engine's prefix cache uses (``cache/prefix.py``), so what is remembered here is what a replica may
really have; that it may have forgotten costs a prefill and nothing else. Load is *outstanding tokens*: those
of prompts whose first token has not come, and those still expected. Invariant: whoever is chosen has at most
``slack_tokens`` more to do than the one with the least, whatever the prefixes are. Read ``replicas.py`` next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gapless.cache.prefix import extend_hashes

Routing = Literal["prefix", "load"]
Reason = Literal["prefix", "load"]
"""Why a replica was chosen: it holds the beginning of the prompt, or it has the least to do."""

SLACK_TOKENS = 4096
"""Waiting behind this many tokens costs about what computing a long prefix anew does."""
EXPECTED_OUTPUT = 256
"""Tokens that a choice is expected to bring at most: limits are often the whole context, answers are not."""
MAX_PREFIX_BLOCKS = 512
"""Blocks of a prompt that are named: half a millisecond for 8192 tokens, less than a step of the engine."""
MAX_REMEMBERED = 1 << 16
"""Names kept in all; the oldest are dropped first. About 10 MB."""


@dataclass(frozen=True, slots=True)
class Choice:
    """``num_blocks``: how much of the prompt the replica is thought to hold."""

    replica: int
    reason: Reason
    num_blocks: int


class Router:
    """Remembers who was sent what. Replicas are numbers; ``loads`` names those that may be chosen now."""

    def __init__(self, routing: Routing = "prefix", *, slack_tokens: int = SLACK_TOKENS) -> None:
        self.routing, self.slack_tokens = routing, slack_tokens
        self._holders: OrderedDict[bytes, set[int]] = OrderedDict()
        self._last_turn: dict[int, int] = {}
        self._turn = 0

    def choose(self, loads: Mapping[int, float], prefix: Sequence[bytes] = ()) -> Choice:
        """One of ``loads``, which must not be empty. ``prefix``: see ``name_prefix``. Says nothing about what
        the request will leave there: call ``sent``."""
        least = min(loads.values())
        if self.routing == "prefix" and prefix:
            depths = self._depths(prefix, loads)
            near = {i: depth for i, depth in depths.items() if loads[i] - least <= self.slack_tokens}
            if near:
                replica = min(near, key=lambda i: (-near[i], loads[i], self._last_turn.get(i, 0), i))
                return Choice(replica, "prefix", near[replica])
        # Among equals the one whose last turn is longest ago, so that an idle server uses all of them.
        replica = min(loads, key=lambda i: (loads[i], self._last_turn.get(i, 0), i))
        return Choice(replica, "load", 0)

    def sent(self, replica: int, prefix: Sequence[bytes] = ()) -> None:
        """The replica computes this prompt from now on, and will hold it."""
        self._turn += 1
        self._last_turn[replica] = self._turn
        if self.routing != "prefix":
            return
        for name in prefix:
            self._holders.setdefault(name, set()).add(replica)
            self._holders.move_to_end(name)
        while len(self._holders) > MAX_REMEMBERED:
            self._holders.popitem(last=False)

    def forget(self, replica: int) -> None:
        """It has lost its cache: it died, or was told to empty it."""
        for name in [name for name, holders in self._holders.items() if replica in holders]:
            self._holders[name].discard(replica)
            if not self._holders[name]:
                del self._holders[name]

    @property
    def num_remembered(self) -> int:
        return len(self._holders)

    def _depths(self, prefix: Sequence[bytes], among: Iterable[int]) -> dict[int, int]:
        """How many leading blocks each replica holds, for those that hold any."""
        open_replicas, depths = set(among), {}
        for depth in range(len(prefix), 0, -1):
            for replica in self._holders.get(prefix[depth - 1], ()):
                if replica in open_replicas:
                    open_replicas.discard(replica)
                    depths[replica] = depth
            if not open_replicas:
                break
        return depths


def name_prefix(token_ids: Sequence[int], *, block_size: int, extra: bytes = b"") -> list[bytes]:
    """Names of the full blocks at the beginning of a prompt; ``extra`` keeps groups of callers apart. The
    last token is left out: a cache never serves the whole of a prompt."""
    hashes: list[bytes] = []
    num_blocks = min((len(token_ids) - 1) // block_size, MAX_PREFIX_BLOCKS)
    extend_hashes(hashes, token_ids, num_blocks=num_blocks, block_size=block_size, extra=extra)
    return hashes


def expected_tokens(num_choices: int, max_tokens: int | None) -> int:
    """What a request is expected to generate, as a share of a replica's load."""
    limit = EXPECTED_OUTPUT if max_tokens is None else min(max(max_tokens, 0), EXPECTED_OUTPUT)
    return num_choices * limit

"""What an engine decides about mixtures of experts: where captures are cut, and whether tokens are counted.

``tc_piecewise`` cuts at each mixture unless the user gives a list of his own; a breakable graph holds it
unless that list names it, because our kernels need nothing of the host. Counts of tokens per expert are made
on the device, inside the graphs; only reading them waits for it. Read ``models/moe.py`` next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapless.errors import ConfigError
from gapless.models.moe import MixtureOfExperts
from gapless.models.moe_config import MOE_OP

ExpertLayers = Mapping[int, MixtureOfExperts]
"""By layer index."""


def set_breaks(layers: ExpertLayers, splitting_ops: tuple[str, ...] | None) -> None:
    """Before the first capture: whether breakable graphs end a segment at each mixture."""
    for layer in layers.values():
        layer.is_break = MOE_OP in (splitting_ops or ())


class ExpertLoad:
    """Tokens that each expert of each layer was given; padding and start-up are not counted."""

    def __init__(self, layers: ExpertLayers) -> None:
        """Before the first capture. Raises ``ConfigError`` for a model without experts."""
        if not layers:
            raise ConfigError("--count-expert-tokens: this model has no experts; leave it out")
        self._layers = dict(layers)
        self.reset()

    def reset(self) -> None:
        for layer in self._layers.values():
            layer.start_counting()

    def report(self) -> list[dict[str, Any]]:
        """A row per layer, once every step has ended: ``{layer, tokens: [one number per expert]}``."""
        rows = []
        for index, layer in self._layers.items():
            assert layer.counts_N is not None
            rows.append({"layer": index, "tokens": layer.counts_N.tolist()})
        return rows

"""The plan of an engine before anything is loaded: what the start-up and ``gapless inspect`` both compute.

A config with its device defaults, the numbers of a model, the facts of the device and the names of registered
compiler passes go in, a ``GraphPlan`` comes out. So what ``inspect`` prints is what an engine with these
options starts from; only limits that memory sets come later. Read ``rules.py`` for the facts and
``graphs/plan.py`` for the decisions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gapless.config import EngineConfig
from gapless.engine.rules import Feature, capabilities_for
from gapless.env import read_env
from gapless.graphs.piecewise.passes import whole_graph_passes
from gapless.graphs.plan import GraphPlan, resolve
from gapless.models.base import ModelInfo


def max_step_tokens(config: EngineConfig, max_model_len: int) -> int:
    """The most tokens one step can hold: the budget (at least one token for every running request), and no
    more than all requests at full length."""
    assert config.chunked_prefill_size is not None  # with_device_defaults has filled these in
    assert config.max_running_requests is not None
    budget = max(config.chunked_prefill_size, config.max_running_requests)
    if config.max_total_tokens is not None:
        budget = min(budget, config.max_total_tokens)
    return min(budget, config.max_running_requests * max_model_len)


def make_plan(
    config: EngineConfig,
    info: ModelInfo,
    *,
    attention: Iterable[str],
    supports_graphs: bool,
    max_model_len: int,
    features: Iterable[Feature] = (),
    **facts: Any,
) -> GraphPlan:
    """Resolve the plan. ``facts`` are further arguments of ``capabilities_for``. Raises ``ConfigError``."""
    assert config.max_running_requests is not None
    capabilities = capabilities_for(
        info,
        attention=attention,
        supports_graphs=supports_graphs,
        max_running_requests=config.max_running_requests,
        chunked_prefill_size=max_step_tokens(config, max_model_len),
        max_total_tokens=config.max_total_tokens,
        features=features,
        whole_graph_passes=whole_graph_passes(),
        **{"is_pooling": info.is_pooling, **facts},
    )
    return resolve(config.graph_request(force=read_env().force_graphs), capabilities)

"""The traced forward of a model: token ids and positions in, hidden states out, cut at attention.

One per engine: prefill, decode, the throwaway captures that measure memory and the real ones all use it, so
a model is traced once. Read ``graphs/piecewise/compile.py`` for what it does, ``graph_set.py`` for who calls
it.
"""

from __future__ import annotations

from torch import Tensor

from gapless.attention.base import ATTENTION_OP
from gapless.graphs.device.base import GraphDevice
from gapless.graphs.graph_plan import PLANNED_PHASES, GraphPlan
from gapless.graphs.modes import Strategy
from gapless.graphs.piecewise import PiecewiseConfig, PiecewiseForward, registered_passes
from gapless.graphs.piecewise.compile import MIN_TRACE_ROWS
from gapless.models.base import CausalModel

EAGER_TRACE_TOKENS = 8
"""Rows of the traced batch where nothing is tuned to them: few, because the batch really runs."""


def make_compiled_forward(
    model: CausalModel,
    *,
    plan: GraphPlan,
    splitting_ops: tuple[str, ...] | None,
    device: GraphDevice,
    max_num_tokens: int,
    max_num_reqs: int,
) -> PiecewiseForward | None:
    """None where the plan compiles nothing. ``splitting_ops`` come on top of attention; the limits are those
    of one step.

    Raises ``ConfigError`` for an operator that does not exist.
    """
    if plan.tc_compiler is None:
        return None

    def hidden_states(input_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        return model.layers(model.embed(input_ids_T), positions_T)

    config = PiecewiseConfig(
        split_ops=(ATTENTION_OP, *(splitting_ops or ())) if plan.is_split else (),
        compiler=plan.tc_compiler,
        use_inductor_graph_partition=plan.use_inductor_graph_partition,
        passes=registered_passes(),
        off_switch=_off_switch(plan),
    )
    only_decodes = plan.prefill.strategy is Strategy.BREAKABLE
    max_rows = max_num_reqs if only_decodes else max_num_tokens
    is_dynamic = max_rows >= MIN_TRACE_ROWS  # else every step has one row
    return PiecewiseForward(
        hidden_states, config=config, device=device, default_dim=0 if is_dynamic else None
    )


def trace_tokens(forward: PiecewiseForward, *, max_num_tokens: int) -> int:
    """Tokens of the batch to trace with. Inductor tunes its code to them, so it gets the largest step."""
    if forward.config.compiler == "inductor":
        return max_num_tokens
    return min(max_num_tokens, EAGER_TRACE_TOKENS)


def _off_switch(plan: GraphPlan) -> str:
    """The flags that turn tracing off, for the phases that it serves."""
    named = [p for p in PLANNED_PHASES if plan.phase(p).strategy is Strategy.TC_PIECEWISE]
    flags = [f"--cuda-graph-backend-{phase}=disabled" for phase in named]
    return " ".join(flags) or "compilation mode 0"

"""The traced forward of a model: token ids and positions in, hidden states out, cut at attention.

One per engine: prefill, decode, the throwaway captures that measure memory and the real ones all use it, so
a model is traced once. Only a model that takes images has two: its prefill steps merge rows of an encoder,
which decode steps have no use for. Read ``graphs/piecewise/compile.py`` for what it does, ``graph_set.py``
for who calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gapless.attention.base import ATTENTION_OP
from gapless.engine.media_buffers import embeds_with_media, layers_with_media
from gapless.graphs.device.base import GraphDevice
from gapless.graphs.graph_plan import PLANNED_PHASES, GraphPlan
from gapless.graphs.modes import Phase, Strategy
from gapless.graphs.piecewise import PiecewiseConfig, PiecewiseForward, registered_passes
from gapless.graphs.piecewise.compile import MIN_TRACE_ROWS
from gapless.models.base import CausalModel
from gapless.models.moe_config import expert_ops

EAGER_TRACE_TOKENS = 8
"""Rows of the traced batch where nothing is tuned to them: few, because the batch really runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledForwards:
    """What each phase calls; the same object where one serves both. None: nothing of it is compiled."""

    prefill: PiecewiseForward | None
    decode: PiecewiseForward | None

    def of(self, phase: Phase) -> PiecewiseForward | None:
        return self.prefill if phase is Phase.PREFILL else self.decode

    @property
    def distinct(self) -> list[PiecewiseForward]:
        return list(dict.fromkeys(f for f in (self.prefill, self.decode) if f is not None))

    def report(self) -> dict[str, Any] | None:
        """Of the forward that serves both phases, or of prefill's with decode's in it; None without any."""
        if not self.distinct:
            return None
        first, *others = (forward.stats.to_dict() for forward in self.distinct)
        return {**first, "decode": others[0]} if others else first


NOT_COMPILED = CompiledForwards(prefill=None, decode=None)


def make_compiled_forwards(
    model: CausalModel,
    *,
    plan: GraphPlan,
    splitting_ops: tuple[str, ...] | None,
    always_split: tuple[str, ...] = (),
    device: GraphDevice,
    max_num_tokens: int,
    max_num_reqs: int,
) -> CompiledForwards:
    """None of them where the plan compiles nothing. ``splitting_ops`` come on top of attention (None: those
    of ``expert_ops``), and so do ``always_split``; the limits are those of one step.

    Raises ``ConfigError`` for an operator that does not exist.
    """
    if plan.tc_compiler is None:
        return NOT_COMPILED

    def hidden_states(input_ids_T: Tensor, positions: Tensor) -> Tensor:
        return model.layers(model.embed(input_ids_T), positions)

    def hidden_states_with_media(
        input_ids_T: Tensor,
        positions: Tensor,
        is_media_T: Tensor,
        embeds_TE: Tensor,
        deepstack_TLE: Tensor | None,
    ) -> Tensor:
        hidden_TE = embeds_with_media(model, input_ids_T, is_media_T, embeds_TE)
        return layers_with_media(model, hidden_TE, positions, is_media_T, deepstack_TLE)

    others = expert_ops(model.info.num_experts) if splitting_ops is None else splitting_ops
    config = PiecewiseConfig(
        split_ops=(ATTENTION_OP, *always_split, *others) if plan.is_split else (),
        compiler=plan.tc_compiler,
        use_inductor_graph_partition=plan.use_inductor_graph_partition,
        passes=registered_passes(),
        off_switch=_off_switch(plan),
    )

    def make(fn: Callable[..., Tensor], max_rows: int) -> PiecewiseForward:
        is_dynamic = max_rows >= MIN_TRACE_ROWS  # else every step has one row
        positions_dim = 0 if model.info.rope_axes == 1 else 1
        return PiecewiseForward(
            fn,
            config=config,
            device=device,
            dynamic_dims={"positions": positions_dim if is_dynamic else None},
            default_dim=0 if is_dynamic else None,
        )

    only_decodes = plan.prefill.strategy is Strategy.BREAKABLE
    if not model.info.is_multimodal:
        forward = make(hidden_states, max_num_reqs if only_decodes else max_num_tokens)
        return CompiledForwards(prefill=forward, decode=forward)
    return CompiledForwards(
        prefill=None if only_decodes else make(hidden_states_with_media, max_num_tokens),
        decode=None if plan.is_one_set else make(hidden_states, max_num_reqs),
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

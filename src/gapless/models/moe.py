"""A mixture of experts in place of a layer's feed-forward: router, experts, shared expert, statistics.

A router gives each token its ``K`` best experts and their weights (softmax over all experts in float32, added
up to 1 where the config says so); the token's result is the weighted sum of theirs, plus, in Qwen2-MoE, that
of an expert every token goes through. Invariants: which rows are real is read on the device from the batch's
``query_start_loc``, padding first or last; padding reaches no expert and no statistic, and its results are
zeros; shapes depend on the number of tokens alone, so every strategy captures it.

While ``torch.compile`` traces, the whole block is the operator ``MOE_OP``, at which ``tc_piecewise`` cuts by
default. A breakable graph holds it, unless ``is_break``; a full graph always does. Where ranks share the
experts, results are this rank's part of a sum, which the caller adds up. ``T`` tokens, ``E`` hidden size,
``N`` experts. Read ``experts.py`` for the weights, ``kernels/moe.py`` and ``grouped_experts.py`` for the two
ways to compute.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor, nn

from gapless.env import read_env
from gapless.errors import ConfigError, GraphError
from gapless.graphs.breakable import eager_break
from gapless.graphs.context import get_forward_context
from gapless.graphs.ops import direct, register_custom_op
from gapless.kernels import linear, moe, moe_sum
from gapless.kernels.select import has_fused_kernels
from gapless.models.experts import ExpertWeights
from gapless.models.grouped_experts import check_grouped_mm, choose_experts, grouped_experts
from gapless.models.layers import Linear, Placement, RMSNorm, WeightTarget, empty_parameter
from gapless.models.moe_config import ExpertConfig

small_linear = direct(linear.small_linear)
route_tokens = direct(moe.route_tokens)
expert_gate_up, expert_down = direct(moe.expert_gate_up), direct(moe.expert_down)
combine_experts = direct(moe_sum.combine_experts)
combine_add_rms_norm = direct(moe_sum.combine_add_rms_norm)


class FeedForward(Protocol):
    """What the shared expert is: the dense feed-forward of ``decoder.py``."""

    @property
    def gate_up(self) -> Linear: ...

    @property
    def down(self) -> Linear: ...

    def __call__(self, hidden_TE: Tensor) -> Tensor: ...

    def fused(self, hidden_TE: Tensor) -> Tensor:
        """The same on fused kernels."""

    def targets(self, prefix: str) -> dict[str, WeightTarget]: ...


class MixtureOfExperts(nn.Module):
    """``shared``: the expert that every token goes through, if the config has one."""

    def __init__(
        self,
        config: ExpertConfig,
        *,
        hidden_size: int,
        shared: FeedForward | None,
        placement: Placement,
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_name = f"moe#{next(_serials)}"
        """Unique in the process: how traced code finds this layer again."""
        _layers[self.layer_name] = self
        self.router = Linear(empty_parameter(config.num_experts, hidden_size, placement=placement))
        self.experts = ExpertWeights(config, hidden_size=hidden_size, placement=placement)
        self.shared: FeedForward | None = shared
        self.shared_gate = Linear(empty_parameter(1, hidden_size, placement=placement)) if shared else None
        self.uses_grouped_mm = _uses_grouped_mm(placement, hidden_size, self.experts.size)
        self.is_break = False
        """Whether breakable captures run it eagerly between two segments; to be set before any capture."""
        self.counts_N: Tensor | None = None
        """Real tokens that each expert was given since ``start_counting`` (int64, static), if it was called.
        """

    def forward(self, hidden_TE: Tensor) -> Tensor:
        """``[T, E] -> [T, E]`` by torch operations; zeros in rows of padding."""
        return self._run(hidden_TE, use_kernels=False)

    def fused(self, hidden_TE: Tensor) -> Tensor:
        """The same on fused kernels."""
        return self._run(hidden_TE, use_kernels=not self.uses_grouped_mm)

    def fused_add_norm(
        self, hidden_TE: Tensor, residual_TE: Tensor, norm: RMSNorm
    ) -> tuple[Tensor, Tensor] | None:
        """``(residual + fused(hidden), norm of that)``, where the kernel that ends the block may do the rest
        too; None: something must stand between them, so nothing was computed."""
        if self.uses_grouped_mm or self.is_break or torch.compiler.is_compiling():
            return None
        query_start_loc = get_forward_context().batch.query_start_loc
        terms, counts_N = _terms_of_sum(self, hidden_TE, query_start_loc)
        result = combine_add_rms_norm(*terms, residual_TE, norm.weight, norm.eps)
        _count(self, counts_N)
        return result

    def start_counting(self) -> None:
        """Count tokens per expert from now on; before any capture, for a graph counts or does not."""
        if self.counts_N is None:
            device = self.experts.down_NEF.device
            self.counts_N = torch.zeros(self.config.num_experts, dtype=torch.int64, device=device)
        self.counts_N.zero_()

    def targets(self, prefix: str, stored: Collection[str]) -> dict[str, WeightTarget]:
        """``prefix`` is the layer's, ``stored`` the names in the checkpoint (empty: there is none)."""
        names = (self.config.names.block, "mlp")
        block = next((n for n in names if f"{prefix}.{n}.gate.weight" in stored), names[0])
        targets = {f"{prefix}.{block}.gate.weight": _target(self.router)}
        targets.update(self.experts.targets(f"{prefix}.{block}", stored))
        if self.shared is not None and self.shared_gate is not None:
            targets.update(self.shared.targets(f"{prefix}.{block}.shared_expert"))
            targets[f"{prefix}.{block}.shared_expert_gate.weight"] = _target(self.shared_gate)
        return targets

    def _run(self, hidden_TE: Tensor, *, use_kernels: bool) -> Tensor:
        out_TE = torch.empty(hidden_TE.shape, dtype=hidden_TE.dtype, device=hidden_TE.device)
        if torch.compiler.is_compiling():
            moe_layer(hidden_TE, out_TE, self.layer_name, use_kernels)
        elif self.is_break:
            _compute_as_break(self, hidden_TE, out_TE, use_kernels)
        else:
            _compute(self, hidden_TE, out_TE, use_kernels)
        return out_TE


_layers: weakref.WeakValueDictionary[str, MixtureOfExperts] = weakref.WeakValueDictionary()
_serials = itertools.count()


@register_custom_op(mutates_args=["out_TE"])
def moe_layer(hidden_TE: Tensor, out_TE: Tensor, layer_name: str, use_kernels: bool) -> None:
    """The mixture called ``layer_name``, into ``out_TE``. Which rows are real it reads from the context of
    the step, and it adds to the layer's counts: no traced code looks at either."""
    layer = _layers.get(layer_name)
    if layer is None:
        raise GraphError(f"mixture of experts {layer_name!r} no longer exists: its model is gone")
    _compute(layer, hidden_TE, out_TE, use_kernels)


def _compute(layer: MixtureOfExperts, hidden_TE: Tensor, out_TE: Tensor, use_kernels: bool) -> None:
    query_start_loc = get_forward_context().batch.query_start_loc
    compute = _compute_by_kernels if use_kernels else _compute_by_torch
    _count(layer, compute(layer, hidden_TE, out_TE, query_start_loc))


_compute_as_break = eager_break(_compute)


def _count(layer: MixtureOfExperts, counts_N: Tensor) -> None:
    if layer.counts_N is not None:
        layer.counts_N.add_(counts_N)


def _compute_by_kernels(
    layer: MixtureOfExperts, hidden_TE: Tensor, out_TE: Tensor, query_start_loc: Tensor
) -> Tensor:
    terms, counts_N = _terms_of_sum(layer, hidden_TE, query_start_loc)
    combine_experts(*terms, out_TE)
    return counts_N


def _terms_of_sum(
    layer: MixtureOfExperts, hidden_TE: Tensor, query_start_loc: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]:
    """What the kernel that ends the block adds up, and tokens per expert."""
    config, experts = layer.config, layer.experts
    top_k = config.top_k
    block_p = moe.block_slots(hidden_TE.shape[0], num_experts=config.num_experts, top_k=top_k)
    logits_TN = _product(layer.router, hidden_TE)
    weights_TK, _, slots_P, blocks_B3, counts_N = route_tokens(
        logits_TN, query_start_loc, top_k, config.renormalizes, block_p
    )
    act_PF = expert_gate_up(hidden_TE, experts.gate_up_NOE, slots_P, blocks_B3, top_k)
    by_slot_PE = expert_down(act_PF, experts.down_NEF, slots_P, blocks_B3, weights_TK)
    shared_TE = shared_gate_T1 = None
    if layer.shared is not None and layer.shared_gate is not None:
        shared_TE, shared_gate_T1 = layer.shared.fused(hidden_TE), _product(layer.shared_gate, hidden_TE)
    return (by_slot_PE, query_start_loc, shared_TE, shared_gate_T1), counts_N


def _compute_by_torch(
    layer: MixtureOfExperts, hidden_TE: Tensor, out_TE: Tensor, query_start_loc: Tensor
) -> Tensor:
    config, experts = layer.config, layer.experts
    row_T = torch.arange(hidden_TE.shape[0], dtype=torch.int32, device=hidden_TE.device)
    is_real_T = (row_T >= query_start_loc[0]) & (row_T < query_start_loc[-1])
    weights_TK, experts_TK = choose_experts(
        layer.router(hidden_TE), is_real_T, top_k=config.top_k, renormalizes=config.renormalizes
    )
    total_TE, counts_N = grouped_experts(
        hidden_TE, experts.gate_up_NOE, experts.down_NEF, weights_TK, experts_TK
    )
    if layer.shared is not None and layer.shared_gate is not None:
        total_TE = total_TE + layer.shared(hidden_TE).float() * layer.shared_gate(hidden_TE).float().sigmoid()
    out_TE.copy_(torch.where(is_real_T.unsqueeze(1), total_TE, 0.0))
    return counts_N


def _product(matrix: Linear, hidden_TE: Tensor) -> Tensor:
    return matrix(hidden_TE) if matrix.weight is None else small_linear(hidden_TE, matrix.weight, None)


def _target(matrix: Linear) -> WeightTarget:
    assert matrix.weight is not None, "the weights are packed already"
    return WeightTarget(tensor=matrix.weight, shape=tuple(matrix.weight.shape))


def _uses_grouped_mm(placement: Placement, hidden_size: int, intermediate_size: int) -> bool:
    """Whether it is the way also where the kernels run. Raises ``ConfigError`` for a wish that cannot be
    granted and ``ModelError`` where neither way works."""
    asked, has_kernels = read_env().moe_backend, has_fused_kernels(placement.device)
    if asked == "triton" and placement.device.type != "cuda":
        raise ConfigError(f"GAPLESS_MOE_BACKEND=triton: {placement.device} has no Triton; unset it")
    if has_kernels and asked != "grouped_mm":
        return False
    if placement.device.type != "meta":
        check_grouped_mm(
            device=placement.device,
            dtype=placement.dtype,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
        )
    return asked == "grouped_mm"

"""A mixture of experts in float64, one token at a time; and routed batches for the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.kernels import moe, moe_sum


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """``real``: the first real row and the one behind the last; rows outside are NaN."""

    num_tokens: int
    num_experts: int
    top_k: int
    hidden: int
    size: int
    real: tuple[int, int]
    renormalizes: bool = True
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    only_expert: int | None = None
    """First choice of every token."""

    @property
    def rows(self) -> slice:
        return slice(*self.real)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    x_TE: Tensor
    logits_TN: Tensor
    gate_up_NOE: Tensor
    down_NEF: Tensor
    query_start_loc: Tensor


def make_inputs(case: Case, *, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(case.dtype).to(case.device)

    x_TE, logits_TN = normal(case.num_tokens, case.hidden), normal(case.num_tokens, case.num_experts)
    if case.only_expert is not None:
        logits_TN[:, case.only_expert] = 9.0
    for rows in (slice(0, case.real[0]), slice(case.real[1], None)):
        x_TE[rows], logits_TN[rows] = torch.nan, torch.nan
    middle = (case.real[0] + case.real[1]) // 2
    boundaries = [case.real[0], middle, case.real[1], case.real[1]]  # two requests and an empty slot
    return Inputs(
        x_TE=x_TE,
        logits_TN=logits_TN,
        gate_up_NOE=normal(case.num_experts, 2 * case.size, case.hidden, scale=case.hidden**-0.5),
        down_NEF=normal(case.num_experts, case.hidden, case.size, scale=case.size**-0.5),
        query_start_loc=torch.tensor(boundaries, dtype=torch.int32, device=case.device),
    )


def route_oracle(case: Case, logits_TN: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and experts of the real rows; of equal logits the lower expert comes first."""
    probability = logits_TN[case.rows].double().softmax(-1)
    values, order = probability.sort(dim=-1, descending=True, stable=True)
    weights, experts = values[:, : case.top_k], order[:, : case.top_k]
    if case.renormalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


def mixture_oracle(case: Case, inputs: Inputs) -> Tensor:
    """``[T, E]`` float64, zeros in rows of padding."""
    weights, experts = route_oracle(case, inputs.logits_TN)
    x = inputs.x_TE[case.rows].double()
    out = torch.zeros(case.num_tokens, case.hidden, dtype=torch.float64, device=case.device)
    for row in range(x.shape[0]):
        for weight, expert in zip(weights[row], experts[row], strict=True):
            gate, up = (inputs.gate_up_NOE[expert].double() @ x[row]).chunk(2)
            out[case.real[0] + row] += weight * (inputs.down_NEF[expert].double() @ (F.silu(gate) * up))
    return out


def error_bound(case: Case) -> float:
    """Relative error, in the norm of the whole result, that roundings explain.

    A sum of ``n`` random terms, added one after another in float32, grows as ``sqrt(i)``. Each step rounds
    by at most half an ``eps`` of what there is, up or down, so the errors add in squares to ``eps / 2 *
    sqrt(n / 2)`` of the result. Gate and up are two such sums over the hidden size, and ``silu`` passes on
    up to 1.5 times the error of gate; down is one over the intermediate size. To these come four roundings
    to the result's dtype. Most roundings are less than half an ``eps``: an H200 showed 0.4 of the first
    part. Products in TF32 (10 bits) are 100 times above the bound.
    """
    sums = 0.5 * ((1.5**2 + 1) * case.hidden / 2 + case.size / 2) ** 0.5
    return sums * torch.finfo(torch.float32).eps + 4 * torch.finfo(case.dtype).eps


def route(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    block_p = moe.block_slots(case.num_tokens, num_experts=case.num_experts, top_k=case.top_k)
    with torch.no_grad():
        return moe.route_tokens(
            inputs.logits_TN, inputs.query_start_loc, case.top_k, case.renormalizes, block_p
        )


def mixture(case: Case, inputs: Inputs) -> Tensor:
    """By the kernels."""
    weights, _, slots, blocks, _ = route(case, inputs)
    with torch.no_grad():
        act = moe.expert_gate_up(inputs.x_TE, inputs.gate_up_NOE, slots, blocks, case.top_k)
        by_slot = moe.expert_down(act, inputs.down_NEF, slots, blocks, weights)
        out = torch.full_like(inputs.x_TE, torch.nan)
        moe_sum.combine_experts(by_slot, inputs.query_start_loc, None, None, out)
    return out

"""Experts by plain torch operations around ``grouped_mm``: the CPU's path, the oracle of the kernels, and a
choice on CUDA.

Slots (a token with one of its experts) are sorted by expert; ``grouped_mm`` multiplies each expert's run of
rows, whose ends it reads on the device; results go back to their slots and are added up per token in a fixed
order. Shapes depend on the number of tokens alone, nothing is read on the host, and what padding leaves
undefined is replaced, never multiplied by zero. On CUDA ``grouped_mm`` takes bfloat16 only: with float16 it
copies offsets to the host, so it cannot be captured. ``T`` tokens, ``N`` experts, ``K`` experts per token,
``P`` = T * K slots, ``E`` hidden size, ``F`` intermediate size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.errors import ModelError
from gapless.graphs.ops import register_custom_op

ROW_ALIGNMENT = 16
"""Bytes that the length of a row must divide by, as ``grouped_mm`` wants it."""


def why_no_grouped_mm(
    *, device: torch.device, dtype: torch.dtype, hidden_size: int, intermediate_size: int
) -> str | None:
    """What keeps experts of these sizes from this path; None: nothing."""
    if not hasattr(F, "grouped_mm"):
        return "this PyTorch has no torch.nn.functional.grouped_mm"
    name = str(dtype).removeprefix("torch.")
    if device.type == "cuda" and dtype is not torch.bfloat16:
        return (
            f"grouped_mm on CUDA can be captured in bfloat16 only (with {name} it copies offsets to the host)"
        )
    for what, size in (("hidden_size", hidden_size), ("the intermediate size", intermediate_size)):
        if size * dtype.itemsize % ROW_ALIGNMENT:
            return (
                f"{what}={size} makes rows of {size * dtype.itemsize} bytes in {name}, and grouped_mm wants "
                f"multiples of {ROW_ALIGNMENT}"
            )
    return None


def check_grouped_mm(**facts: object) -> None:
    """Raise ``ModelError`` where ``why_no_grouped_mm(**facts)`` has a reason."""
    reason = why_no_grouped_mm(**facts)  # type: ignore[arg-type]
    if reason is not None:
        raise ModelError(f"experts cannot be computed by grouped_mm: {reason}")


def _fake_grouped_linear(rows_PI: Tensor, weight_NOI: Tensor, ends_N: Tensor) -> Tensor:
    return rows_PI.new_empty((rows_PI.shape[0], weight_NOI.shape[1]))


@register_custom_op(fake=_fake_grouped_linear, is_fresh=True)
def grouped_linear(rows_PI: Tensor, weight_NOI: Tensor, ends_N: Tensor) -> Tensor:
    """``rows[ends[n - 1] : ends[n]] @ weight[n].T``; rows behind the last end are undefined. An operator of
    our own, because torch's fake implementation knows bfloat16 only, while a CPU multiplies every dtype."""
    return F.grouped_mm(rows_PI, weight_NOI.transpose(1, 2), offs=ends_N)


def choose_experts(
    logits_TN: Tensor, is_real_T: Tensor, *, top_k: int, renormalizes: bool
) -> tuple[Tensor, Tensor]:
    """``[T, N] -> weights [T, K]`` float32 and ``experts [T, K]``; rows of padding have weight 0 and expert
    ``N``."""
    weights_TK, experts_TK = logits_TN.float().softmax(dim=-1).topk(top_k, dim=-1)
    if renormalizes:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    is_real_T1 = is_real_T.unsqueeze(1)
    return (
        torch.where(is_real_T1, weights_TK, 0.0),
        torch.where(is_real_T1, experts_TK, logits_TN.shape[1]),
    )


def grouped_experts(
    x_TE: Tensor, gate_up_NOE: Tensor, down_NEF: Tensor, weights_TK: Tensor, experts_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """``[T, E] -> [T, E]`` float32, the weighted sum of each token's experts, and tokens per expert ``[N]``
    int32."""
    num_tokens, top_k = experts_TK.shape
    num_experts = gate_up_NOE.shape[0]
    experts_P = experts_TK.flatten()
    counts_N = torch.zeros(num_experts + 1, dtype=torch.int32, device=x_TE.device)
    counts_N = counts_N.scatter_add_(0, experts_P, torch.ones_like(experts_P, dtype=torch.int32))[:-1]
    ends_N = counts_N.cumsum(0, dtype=torch.int32)
    sorted_P, order_P = experts_P.sort(stable=True)

    rows_PE = x_TE.index_select(0, order_P // top_k)
    gate_PF, up_PF = grouped_linear(rows_PE, gate_up_NOE, ends_N).chunk(2, dim=-1)
    placed_PE = grouped_linear(F.silu(gate_PF) * up_PF, down_NEF, ends_N)

    weighted_PE = placed_PE.float() * weights_TK.flatten().index_select(0, order_P).unsqueeze(1)
    weighted_PE = torch.where((sorted_P < num_experts).unsqueeze(1), weighted_PE, 0.0)
    by_slot_PE = torch.empty_like(weighted_PE).index_copy_(0, order_P, weighted_PE)
    return by_slot_PE.view(num_tokens, top_k, x_TE.shape[1]).sum(dim=1), counts_N

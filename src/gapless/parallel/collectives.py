"""What a model calls where its ranks meet: sums of partial results, and logits side by side.

All are registered operators, so every strategy has them: a full graph holds them inside, ``tc_piecewise``
cuts at sums (``ALL_REDUCE_OPS``), and a breakable graph holds a sum or, where its group says so, breaks at
it. A sum and the norm behind it are one operator on the fused kernels, in every strategy, so that all give
the same bits. On the emulated device operators are opaque nodes that really run at every replay. They find
their group by a number, which graphs may freeze. With one rank nothing is summed. ``T`` tokens, ``E`` hidden
size, ``R`` rows, ``C`` columns of one rank, ``V`` columns of all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gapless.errors import RankError
from gapless.graphs.breakable import eager_break
from gapless.graphs.ops import direct, register_custom_op
from gapless.kernels import norm
from gapless.parallel.group import RankGroup
from gapless.parallel.shard import Shard

ALL_REDUCE_OPS = ("gapless::sum_over_ranks", "gapless::sum_over_ranks_add_rms_norm")

_groups: dict[int, RankGroup] = {}


def register_group(group: RankGroup) -> None:
    """Make ``group`` known to the operators, until ``forget_group``."""
    _groups[group.shard.group] = group


def forget_group(group: RankGroup) -> None:
    _groups.pop(group.shard.group, None)


def all_reduce(partial_TE: Tensor, shard: Shard) -> Tensor:
    """The sum of all ranks' ``partial_TE``, which is overwritten with it."""
    if shard.is_whole:
        return partial_TE
    if not torch.compiler.is_compiling() and _group(shard.group).breaks:
        _sum_at_break(partial_TE, shard.group)
    else:
        _sum_over_ranks(partial_TE, shard.group)
    return partial_TE


def sum_add_rms_norm(
    partial_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float, shard: Shard
) -> tuple[Tensor, Tensor]:
    """``(residual + sum, norm of that)``, of the sum of all ranks' ``partial_TE``, which may be overwritten
    with it."""
    if shard.is_whole:
        return _fused_add_rms_norm(partial_TE, residual_TE, weight_E, eps)
    sum_TE, normed_TE = residual_TE.new_empty(residual_TE.shape), residual_TE.new_empty(residual_TE.shape)
    args = (partial_TE, residual_TE, weight_E, eps, sum_TE, normed_TE, shard.group)
    if not torch.compiler.is_compiling() and _group(shard.group).breaks:
        _sum_and_norm_at_break(*args)
    else:
        _sum_over_ranks_add_rms_norm(*args)
    return sum_TE, normed_TE


def gather_columns(local_RC: Tensor, num_columns: int, shard: Shard) -> Tensor:
    """``[R, C] -> [R, V]``: every rank's columns in the order of the ranks, without the padding behind
    ``num_columns``. All ranks get the same bits."""
    if shard.is_whole:
        return local_RC
    return _columns_of_ranks(local_RC, num_columns, shard.group)


@register_custom_op(mutates_args=["partial_TE"])
def sum_over_ranks(partial_TE: Tensor, group: int) -> None:
    """``all_reduce`` for the group of that number."""
    _group(group).all_reduce(partial_TE)


@register_custom_op(mutates_args=["partial_TE", "sum_TE", "normed_TE"])
def sum_over_ranks_add_rms_norm(
    partial_TE: Tensor,
    residual_TE: Tensor,
    weight_E: Tensor,
    eps: float,
    sum_TE: Tensor,
    normed_TE: Tensor,
    group: int,
) -> None:
    """``sum_add_rms_norm`` for the group of that number, into ``sum_TE`` and ``normed_TE``: where graphs are
    cut here, nothing has to be handed over."""
    _group(group).sum_add_rms_norm(partial_TE, residual_TE, weight_E, eps, sum_TE, normed_TE)


def _fake_columns(local_RC: Tensor, num_columns: int, group: int) -> Tensor:
    return local_RC.new_empty(local_RC.shape[0], num_columns)


@register_custom_op(fake=_fake_columns, is_fresh=True)
def columns_of_ranks(local_RC: Tensor, num_columns: int, group: int) -> Tensor:
    """``gather_columns`` for the group of that number."""
    return _group(group).gather_columns(local_RC, num_columns)


_sum_over_ranks, _columns_of_ranks = direct(sum_over_ranks), direct(columns_of_ranks)
_sum_over_ranks_add_rms_norm = direct(sum_over_ranks_add_rms_norm)
_fused_add_rms_norm = direct(norm.fused_add_rms_norm)


@eager_break
def _sum_at_break(partial_TE: Tensor, group: int) -> None:
    _sum_over_ranks(partial_TE, group)  # the operator, because a full graph records it here


@eager_break
def _sum_and_norm_at_break(
    partial_TE: Tensor,
    residual_TE: Tensor,
    weight_E: Tensor,
    eps: float,
    sum_TE: Tensor,
    normed_TE: Tensor,
    group: int,
) -> None:
    _sum_over_ranks_add_rms_norm(partial_TE, residual_TE, weight_E, eps, sum_TE, normed_TE, group)


def _group(number: int) -> RankGroup:
    found = _groups.get(number)
    if found is None:
        raise RankError(f"rank group {number} has been closed: the engine of this model was shut down")
    return found

"""What the two ways of summing over ranks in one kernel have in common: how they are called.

Read ``one_shot.py`` (few rows) and ``bulk_sum.py`` (many) for the kernels and the memory they need. ``T``
rows, ``E`` elements of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class RankReducer(ABC):
    """Sums up to ``max_bytes`` of ranks whose memory knows each other. All ranks call it in the same order,
    each on one stream."""

    max_bytes: int

    @abstractmethod
    def serves(self, partial_TE: Tensor) -> bool:
        """Whether this sum, over rows of the last dimension, is for the one kernel."""

    def all_reduce(self, partial_TE: Tensor) -> None:
        """Sum in place, on the current stream."""
        args = (partial_TE, partial_TE, partial_TE, partial_TE, partial_TE)
        self._launch(args, residual_stride=0, eps=0.0, has_norm=False)

    def sum_add_rms_norm(
        self,
        partial_TE: Tensor,
        residual_TE: Tensor,
        weight_E: Tensor,
        eps: float,
        sum_TE: Tensor,
        normed_TE: Tensor,
    ) -> None:
        """``add_rms_norm_into`` of the sum, which is rounded first as ``all_reduce`` would. ``partial`` is
        left as it is."""
        args = (partial_TE, residual_TE, weight_E, sum_TE, normed_TE)
        self._launch(args, residual_stride=residual_TE.stride(0), eps=eps, has_norm=True)

    @abstractmethod
    def _launch(
        self, tensors: tuple[Tensor, ...], *, residual_stride: int, eps: float, has_norm: bool
    ) -> None:
        """``tensors``: partial, residual, weight, sum and normed."""

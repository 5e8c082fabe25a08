"""Linear layers of which each rank holds a part: split by output features, or by input features.

The two are used in pairs: what a column-split product puts out is what a row-split one takes in, so ranks
meet once per pair, in a sum that the caller makes of the row-split outputs (``parallel/collectives.py``).
Invariants: the sum over ranks is what the whole layer computes (a bias is added by the first rank alone);
padding behind an uneven split is zero and stays zero; with one rank both are plain ``MergedLinear``s. ``I``
input features, ``O`` output features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gapless.models.layers import Linear, Placement, Slice, WeightTarget, empty_parameter
from gapless.parallel.shard import Span


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputPart:
    """One checkpoint matrix with ``total`` output features, of which this rank holds ``span`` in
    ``length`` rows; what is left of them is padding."""

    name: str
    total: int
    span: Span
    length: int


class ColumnParallelLinear(Linear):
    """One product for this rank's output features of several checkpoint matrices with the same input."""

    def __init__(
        self, in_features: int, parts: tuple[OutputPart, ...], *, bias: bool, placement: Placement
    ) -> None:
        out_features = sum(part.length for part in parts)
        super().__init__(
            empty_parameter(out_features, in_features, placement=placement),
            empty_parameter(out_features, placement=placement) if bias else None,
        )
        self.parts = parts
        if any(part.span.length != part.length for part in parts):
            _clear(self)

    def targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        assert self.weight is not None, "the weights are packed already"
        row = 0
        for part in self.parts:
            held = slice(row, row + part.span.length)
            taken = Slice(dim=0, start=part.span.start, length=part.span.length)
            is_all = part.span.length == part.total
            yield (
                f"{prefix}.{part.name}.weight",
                WeightTarget(
                    tensor=self.weight[held],
                    shape=(part.total, self.weight.shape[1]),
                    part=None if is_all else taken,
                ),
            )
            if self.bias is not None:
                yield (
                    f"{prefix}.{part.name}.bias",
                    WeightTarget(tensor=self.bias[held], shape=(part.total,), part=None if is_all else taken),
                )
            row += part.length


class RowParallelLinear(Linear):
    """``total`` input features, of which this rank multiplies ``span`` (in ``length`` columns): a partial
    result, to be summed over ranks."""

    def __init__(
        self,
        name: str,
        *,
        total: int,
        span: Span,
        length: int,
        out_features: int,
        bias: bool,
        placement: Placement,
    ) -> None:
        super().__init__(
            empty_parameter(out_features, length, placement=placement),
            empty_parameter(out_features, placement=placement)
            if bias and placement.shard.rank == 0
            else None,
        )
        self.name, self.total, self.span = name, total, span
        self._has_bias = bias
        if span.length != length:
            _clear(self)

    def targets(self, prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        assert self.weight is not None, "the weights are packed already"
        out_features = self.weight.shape[0]
        is_all = self.span.length == self.total
        taken = Slice(dim=1, start=self.span.start, length=self.span.length)
        yield (
            f"{prefix}.{self.name}.weight",
            WeightTarget(
                tensor=self.weight[:, : self.span.length],
                shape=(out_features, self.total),
                part=None if is_all else taken,
            ),
        )
        if self.bias is not None:
            yield f"{prefix}.{self.name}.bias", WeightTarget(tensor=self.bias, shape=(out_features,))
        elif self._has_bias:  # the file has it; the first rank adds it
            nothing = Slice(dim=0, start=0, length=0)
            yield (
                f"{prefix}.{self.name}.bias",
                WeightTarget(tensor=self.weight.new_empty(0), shape=(out_features,), part=nothing),
            )


def _clear(linear: Linear) -> None:
    """Rows or columns that no checkpoint fills must not be what the allocator left behind."""
    assert linear.weight is not None
    linear.weight.zero_()
    if linear.bias is not None:
        linear.bias.zero_()

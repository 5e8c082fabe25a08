"""Comparing results: bit for bit with padded eager, within a bound with plain eager.

Matrix products of the same rows differ in the last bits when the number of rows differs, so only runs of one
bucket can be equal exactly. Against the real size the bound is a fraction of the largest expected value: 1e-4
in fp32, and what the mantissa allows below that. The coarsest type that takes part decides, because a float32
result of bfloat16 weights is no better than they are. NaN equals NaN in the same place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_BOUNDS = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
_UNKNOWN_BOUND = 1e-1
"""Of 8-bit types and whatever comes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """One output that is not what it should be."""

    output: int
    detail: str

    def __str__(self) -> str:
        return f"output {self.output}: {self.detail}"


def exact_mismatch(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> Mismatch | None:
    """The first output that is not bit-equal."""
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        if _has_same_bits(a, b):
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return Mismatch(output=index, detail=f"{_kind(a)} instead of {_kind(b)}")
        wrong = ~_equal_elements(a, b)
        return Mismatch(output=index, detail=_wrong_text(a, b, wrong))
    return None


def bounded_mismatch(
    actual: Sequence[Tensor], expected: Sequence[Tensor], *, tolerance: float | None = None
) -> Mismatch | None:
    """The first output further from ``expected`` than the bound; what is not floating point must be equal."""
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return Mismatch(output=index, detail=f"{_kind(a)} instead of {_kind(b)}")
        if not (a.is_floating_point() or a.is_complex()):
            wrong = a != b
            if bool(wrong.any()):
                return Mismatch(output=index, detail=_wrong_text(a, b, wrong))
            continue
        bound = bound_of(b, tolerance)
        wrong = ~(_equal_elements(a, b) | ((a - b).abs() <= bound))
        if bool(wrong.any()):
            return Mismatch(output=index, detail=f"{_wrong_text(a, b, wrong)}, over the bound {bound:.3g}")
    return None


def tolerance_for(dtypes: Iterable[torch.dtype]) -> float:
    """The relative bound for results that these types took part in; float32 where none is floating point."""
    known = [_BOUNDS.get(dtype, _UNKNOWN_BOUND) for dtype in dtypes if dtype.is_floating_point]
    return max(known, default=_BOUNDS[torch.float32])


def bound_of(expected: Tensor, tolerance: float | None = None) -> float:
    """The largest difference accepted: relative to the largest finite value, or to 1 if all are smaller."""
    if tolerance is None:
        tolerance = _BOUNDS.get(expected.dtype, _UNKNOWN_BOUND)
    finite = expected[expected.isfinite()].abs() if expected.numel() else expected
    return tolerance * max(1.0, float(finite.max()) if finite.numel() else 0.0)


def _has_same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or (
        a.shape == b.shape and a.dtype == b.dtype and bool(_equal_elements(a, b).all())
    )


def _equal_elements(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point() or a.is_complex():
        return (a == b) | (a.isnan() & b.isnan())
    return a == b


def _wrong_text(actual: Tensor, expected: Tensor, wrong: Tensor) -> str:
    where = tuple(int(i[0]) for i in wrong.nonzero(as_tuple=True))
    text = f"{int(wrong.sum())} of {wrong.numel()} elements differ, first at {list(where)}: "
    text += f"{actual[where].item():.8g} instead of {expected[where].item():.8g}"
    if actual.is_floating_point():
        largest = (actual - expected).abs().nan_to_num(nan=float("inf")).max()
        text += f", by at most {float(largest):.3g}"
    return text


def _kind(tensor: Tensor) -> str:
    return f"a tensor {tuple(tensor.shape)} {tensor.dtype}"

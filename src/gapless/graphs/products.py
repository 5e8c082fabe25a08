"""Forwards without their matrix products, for runs whose results nobody reads.

Which kernels a forward launches depends on shapes, not on values. The first product of a process loads its
library and takes tenths of a second, and those of a large batch are nearly all of its time: here each is a
tensor of the right shape that nothing has been written to. Everything else runs as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_FIRST: Mapping[Any, int] = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten._addmm_activation.default: 1,
    torch.ops.aten.bmm.default: 0,
}
"""Products, and which of their arguments is the left factor; the right one follows."""
_HARMLESS = {"use_gelu"}
"""Options that change what a product holds, but not its shape."""


class ProductsLeftOut(TorchDispatchMode):
    """Within the block, on this thread."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        first = _FIRST.get(func)
        if first is None or not _HARMLESS.issuperset(kwargs or ()):
            return func(*args, **(kwargs or {}))
        left, right = args[first : first + 2]
        return left.new_empty((*left.shape[:-1], right.shape[-1]))

"""OutputPlan: which dimensions of a callable's results are dynamic, and how results become what it returned.

The callable runs at two sizes per dynamic dimension, and the shapes are compared: a dimension that grew by
``m`` for each row is ``m*symbol+k``. A declaration replaces the comparison. Results are tensors in any
nesting that PyTorch's pytree knows (tuples, lists, dicts, registered dataclasses); other values in them are
frozen and must be the same at every size. Read ``probe.py`` for the runs themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from gapless.errors import ConfigError, GraphError
from gapless.graphs.input_field import parse_dim
from gapless.graphs.runner import OutputField

OutputDims = Mapping[int, str]
"""Dynamic dimensions of one output tensor."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What the callable returned for ``sizes``."""

    sizes: Mapping[str, int]
    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec

    @classmethod
    def of(cls, sizes: Mapping[str, int], result: Any) -> Observed:
        leaves, structure = pytree.tree_flatten(result)
        return cls(dict(sizes), tuple(leaves), structure)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Tensor))


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputPlan:
    """``fields`` has one entry per result tensor, in order; 0-d results are stored with one element."""

    fields: tuple[OutputField, ...]
    names: tuple[str, ...]
    """Of the tensors; ``leaf_names`` are of everything."""
    leaf_names: tuple[str, ...]
    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]
    """Of the result, with None for tensors."""
    is_tensor: tuple[bool, ...]
    is_scalar: tuple[bool, ...]
    """Per tensor: it has no dimensions."""

    @classmethod
    def infer(cls, runs: Sequence[Observed], declared: Sequence[OutputDims] | None = None) -> OutputPlan:
        """From runs at different sizes: the first is the reference, each other changes one symbol of the run
        before it. Raises ``GraphError`` for results that cannot come out of a graph.
        """
        reference = runs[0]
        names = _names(reference)
        for run in runs[1:]:
            _check_same_kind(reference, run, names)
        tensors = reference.tensors
        if not tensors:
            raise GraphError("it returns no tensor, so a replay would have no result")
        tensor_names = [
            n for n, leaf in zip(names, reference.leaves, strict=True) if isinstance(leaf, Tensor)
        ]
        if declared is not None and len(declared) != len(tensors):
            raise ConfigError(
                f"outputs= declares {len(declared)} tensors; the callable returns {len(tensors)}: "
                + ", ".join(tensor_names)
            )
        fields = []
        for index, tensor in enumerate(tensors):
            dims = (
                _infer_dims(tensor_names[index], [run.tensors[index] for run in runs], runs)
                if declared is None
                else _declared_dims(tensor_names[index], tensor, declared[index], reference.sizes)
            )
            first, rest = (dims[0], dims[1:]) if dims else (1, ())
            fields.append(
                OutputField(
                    name=f"output {tensor_names[index]}", dim=first, row_shape=rest, dtype=tensor.dtype
                )
            )
        return cls(
            fields=tuple(fields),
            names=tuple(tensor_names),
            leaf_names=tuple(names),
            structure=reference.structure,
            leaves=tuple(None if isinstance(leaf, Tensor) else leaf for leaf in reference.leaves),
            is_tensor=tuple(isinstance(leaf, Tensor) for leaf in reference.leaves),
            is_scalar=tuple(tensor.ndim == 0 for tensor in tensors),
        )

    def flatten(self, result: Any) -> tuple[Tensor, ...]:
        """The tensors of a result, ready for their buffers. Raises ``GraphError`` for another structure."""
        leaves, structure = pytree.tree_flatten(result)
        if structure != self.structure or [isinstance(leaf, Tensor) for leaf in leaves] != list(
            self.is_tensor
        ):
            raise GraphError(f"it returned {structure}, but {self.structure} at another size")
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return tuple(
            tensor.reshape(1) if scalar else tensor
            for tensor, scalar in zip(tensors, self.is_scalar, strict=True)
        )

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """What the callable would have returned."""
        remaining = iter(zip(tensors, self.is_scalar, strict=True))
        leaves = list(self.leaves)
        for index, is_tensor in enumerate(self.is_tensor):
            if is_tensor:
                tensor, scalar = next(remaining)
                leaves[index] = tensor.reshape(()) if scalar else tensor
        return pytree.tree_unflatten(leaves, self.structure)

    @property
    def frozen_leaves(self) -> dict[str, Any]:
        """Values in the result that are not tensors."""
        return {
            name: leaf for name, leaf in zip(self.leaf_names, self.leaves, strict=True) if leaf is not None
        }


def _names(run: Observed) -> list[str]:
    with_paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(run.leaves), run.structure))
    return [pytree.keystr(path) or "result" for path, _ in with_paths]


def _check_same_kind(reference: Observed, run: Observed, names: Sequence[str]) -> None:
    if run.structure != reference.structure:
        raise GraphError(
            f"it returns {run.structure} for {_text(run.sizes)} and {reference.structure} for "
            f"{_text(reference.sizes)}; a graph returns one structure"
        )
    for name, a, b in zip(names, reference.leaves, run.leaves, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.dtype != b.dtype or a.ndim != b.ndim:
                raise GraphError(
                    f"result {name} is {a.ndim}-dimensional {a.dtype} for {_text(reference.sizes)} and "
                    f"{b.ndim}-dimensional {b.dtype} for {_text(run.sizes)}; a graph returns one kind"
                )
        elif isinstance(a, Tensor) or isinstance(b, Tensor) or not _is_plain(a):
            raise GraphError(
                f"result {name} is a {type(a if not isinstance(a, Tensor) else b).__name__}: a graph returns "
                "tensors, and plain values that never change; leave it out (Transformers: use_cache=False)"
            )
        elif a != b:
            raise GraphError(
                f"result {name} is {a!r} for {_text(reference.sizes)} and {b!r} for {_text(run.sizes)}: a "
                "value computed in Python is frozen in a graph; return it as a tensor"
            )


def _infer_dims(name: str, tensors: Sequence[Tensor], runs: Sequence[Observed]) -> tuple[str | int, ...]:
    dims: list[str | int] = []
    for dim in range(tensors[0].ndim):
        size = tensors[0].shape[dim]
        slopes: dict[str, int] = {}
        for before, after, run_before, run_after in zip(tensors, tensors[1:], runs, runs[1:], strict=False):
            grown = after.shape[dim] - before.shape[dim]
            changed = [s for s in run_after.sizes if run_after.sizes[s] != run_before.sizes[s]]
            assert len(changed) == 1, "probe runs change one symbol at a time"
            step = run_after.sizes[changed[0]] - run_before.sizes[changed[0]]
            if grown % step:
                raise GraphError(
                    f"result {name}: dimension {dim} grows by {grown} when {changed[0]} grows by {step}; "
                    "declare outputs=, or return rows that grow with their inputs"
                )
            if grown:
                slopes[changed[0]] = grown // step
        if len(slopes) > 1 or any(slope < 1 for slope in slopes.values()):
            raise GraphError(
                f"result {name}: dimension {dim} depends on {' and '.join(slopes)} together; keep one "
                "dimension for each, because the real rows of a flattened one do not lie together"
            )
        if not slopes:
            dims.append(size)
            continue
        ((symbol, slope),) = slopes.items()
        dims.append(_dim_text(slope, symbol, size - slope * runs[0].sizes[symbol]))
    return tuple(dims)


def _declared_dims(
    name: str, tensor: Tensor, declared: OutputDims, sizes: Mapping[str, int]
) -> tuple[str | int, ...]:
    dims: list[str | int] = list(tensor.shape)
    for dim, text in declared.items():
        if not 0 <= dim < tensor.ndim:
            raise ConfigError(f"outputs=: result {name} has no dimension {dim}")
        factor, symbol, addend = parse_dim(text)
        if symbol not in sizes:
            raise ConfigError(f"outputs=: {text!r} is no dynamic dimension; these are {', '.join(sizes)}")
        if factor * sizes[symbol] + addend != tensor.shape[dim]:
            raise ConfigError(
                f"outputs=: result {name} has shape {tuple(tensor.shape)} for {_text(sizes)}, so its "
                f"dimension {dim} is not {text!r}"
            )
        dims[dim] = text
    return tuple(dims)


def _dim_text(factor: int, symbol: str, addend: int) -> str:
    text = symbol if factor == 1 else f"{factor}*{symbol}"
    return f"{text}{addend:+d}" if addend else text


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | complex | str)


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{symbol}={size}" for symbol, size in sizes.items())

"""The arguments of a graphed callable: which are inputs, which are frozen, and how a call is read.

A captured graph looks at no argument, so every one of them must be accounted for. A *declared* argument is an
input: its tensors are copied into static memory at each call, and its dynamic dimensions give the size.
Every other argument is *frozen*. Arguments may be nested (tuples, lists, dicts of tensors); a leaf is called
``position_embeddings[0]``. Read ``call_template.py`` for how calls are checked, ``graphed.py`` for the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.utils import _pytree as pytree

from gapless.errors import ConfigError, GraphError
from gapless.graphs.input_field import parse_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """An argument that changes from call to call.

    ``dims`` names the dynamic dimensions (``{0: "tokens"}``, also ``"reqs+1"``); the others are fixed by the
    example. ``pad`` fills the rows behind the real ones, and must be a value that the callable treats as
    "skip"; ``"last"`` repeats the last row (offsets). ``poison`` lists other legal pad values, which
    ``verify`` tries; ``"auto"`` is NaN and both extremes for floating point and none for other types.
    ``low`` and ``high`` (exclusive) are the legal range of values, from which ``verify`` draws fresh data;
    without them data is drawn like the example.
    """

    dims: Mapping[int, str]
    pad: int | float | bool | Literal["last"] = 0
    poison: int | float | tuple[int | float, ...] | Literal["auto"] | None = "auto"
    low: int | float | None = None
    high: int | float | None = None

    def __post_init__(self) -> None:
        for dim, text in self.dims.items():
            if not isinstance(dim, int) or isinstance(dim, bool) or dim < 0:
                raise ConfigError(f"Input(dims={dict(self.dims)}): {dim!r} is not a dimension; count from 0")
            parse_dim(text)
        if self.pad == "last" and set(self.dims) != {0}:
            raise ConfigError(
                f"Input(dims={dict(self.dims)}, pad='last'): repeating the last row needs dims={{0: ...}}"
            )
        if (self.low is None) != (self.high is None):
            raise ConfigError("Input: give both low and high, or neither")


class Arguments:
    """The parameters of ``fn`` with what was declared about them."""

    def __init__(self, fn: Callable[..., Any], inputs: Mapping[str, Input]) -> None:
        """Raises ``ConfigError`` when nothing is dynamic or a name does not exist."""
        try:
            self._signature = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{fn!r} has no readable signature; wrap it in a def with named arguments"
            ) from error
        parameters = self._signature.parameters
        self._keyword_name = next((n for n, p in parameters.items() if p.kind is p.VAR_KEYWORD), None)
        plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())
        self._flat_names = tuple(parameters) if plain else None
        self._flat_defaults = tuple(p.default for p in parameters.values())
        self.inputs = dict(inputs)
        self.symbols = tuple(
            dict.fromkeys(parse_dim(d)[1] for declared in inputs.values() for d in declared.dims.values())
        )
        if not self.symbols:
            raise ConfigError(
                "no dynamic dimension: declare one, such as inputs={'x': Input(dims={0: 'tokens'})}"
            )
        for name in inputs:
            top = name.partition("[")[0]
            if top not in parameters and self._keyword_name is None:
                raise ConfigError(f"inputs names {name!r}, but the arguments are {', '.join(parameters)}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._signature.parameters)

    def flat_leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """The leaves of a call none of whose arguments are nested, without the machinery of ``flatten``; None
        where only that can tell."""
        names = self._flat_names
        if names is None or len(args) > len(names):
            return None
        leaves = list(args)
        used = 0
        for name, default in zip(names[len(args) :], self._flat_defaults[len(args) :], strict=True):
            if name in kwargs:
                used += 1
                leaves.append(kwargs[name])
            elif default is inspect.Parameter.empty:
                return None
            else:
                leaves.append(default)
        return leaves if used == len(kwargs) else None

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
        """All leaves of a call in the order of the signature, defaults included."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        if self._keyword_name is not None:
            arguments[self._keyword_name] = dict(sorted(arguments[self._keyword_name].items()))
        return pytree.tree_flatten(dict(arguments))

    def paths(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
        """The name of every leaf, in the order of ``flatten``."""
        leaves, structure = self.flatten(args, kwargs)
        with_paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(leaves, structure))
        return [self._path_name(path) for path, _ in with_paths]

    def declared(self, path: str) -> Input | None:
        """What was declared for a leaf: under its own name, or for the whole argument."""
        return self.inputs.get(self.declared_name(path))

    def declared_name(self, path: str) -> str:
        """The name in ``inputs`` that would cover a leaf."""
        return path if path in self.inputs else path.partition("[")[0].partition(".")[0]

    def unflatten(
        self, leaves: list[Any], structure: pytree.TreeSpec
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The ``args`` and ``kwargs`` of a call with these leaves."""
        arguments = pytree.tree_unflatten(leaves, structure)
        bound = inspect.BoundArguments(self._signature, arguments)
        return bound.args, bound.kwargs

    def _path_name(self, path: tuple[Any, ...]) -> str:
        first, rest = path[0].key, path[1:]
        if first == self._keyword_name:
            first, rest = rest[0].key, rest[1:]
        return f"{first}{pytree.keystr(rest)}"


class Ambient(NamedTuple):
    """State of the process that a capture freezes besides its arguments."""

    training: bool | None
    """Of a module; None for other callables."""
    autocast: torch.dtype | None
    """None where autocast is off."""

    @classmethod
    def now(cls, fn: object, device_type: str) -> Ambient:
        enabled = torch.is_autocast_enabled(device_type)
        return cls(
            getattr(fn, "training", None) if isinstance(fn, torch.nn.Module) else None,
            torch.get_autocast_dtype(device_type) if enabled else None,
        )

    def check(self, fn: object, device_type: str) -> None:
        """Raise ``GraphError`` if it is another one now."""
        now = Ambient.now(fn, device_type)
        if now != self:
            raise GraphError(f"the graphs were captured with {self} and are called with {now}; recapture()")

"""From a function's annotations to an operator: its signature, its schema, and what its result looks like.

Everything that cannot become an operator is refused here, by name and with advice. The result of an op is
described by a rule that makes the fake result while tracing and holds every real one against it. Read
``ops.py`` for the registration.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gapless.errors import ConfigError, GraphError

NAMESPACE = "gapless"
"""Every op is ``torch.ops.gapless.<name>.default``; ``split_ops`` and reports call it ``gapless::<name>``."""

_PLAIN_FUNCTION = "a custom op must be a plain function (no self, no cls)"


def refuse_methods(fn: Callable[..., Any]) -> None:
    if isinstance(fn, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        raise ConfigError(f"{fn} is an operator already; there is nothing to register")
    if isinstance(fn, staticmethod | classmethod) or inspect.ismethod(fn):
        raise ConfigError(
            f"{where_defined(fn)} is a method; a custom op must be a plain function (no self, no cls), or be "
            "decorated with register_custom_op_method in the body of its class"
        )
    if not callable(fn):
        raise ConfigError(f"{fn!r} is not callable; {_PLAIN_FUNCTION}")


def resolved_signature(fn: Callable[..., Any], name: str, annotations: dict[str, Any]) -> inspect.Signature:
    """The signature with annotations as objects (not strings) and positional-only parameters made
    ordinary."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"custom op {NAMESPACE}::{name}: Python cannot tell the signature of {where_defined(fn)}; "
            "wrap it in an annotated function and register that"
        ) from error
    first = next(iter(signature.parameters.values()), None)
    if first is not None and first.name in ("self", "cls"):
        raise ConfigError(
            f"{where_defined(fn)} is a method; a custom op must be a plain function (no self, no cls), or be "
            "decorated with register_custom_op_method in the body of its class"
        )
    try:
        hints = {**typing.get_type_hints(fn), **annotations}
    except Exception as error:
        hints = dict(annotations)
        missing = (set(signature.parameters) | {"return"}) - hints.keys()
        if missing:
            raise ConfigError(
                f"custom op {NAMESPACE}::{name}: an annotation cannot be read: {error}"
            ) from error
    unknown = annotations.keys() - signature.parameters.keys() - {"return"}
    if unknown:
        raise ConfigError(
            f"custom op {NAMESPACE}::{name}: annotations name {sorted(unknown)}, "
            f"but its parameters are {list(signature.parameters)}"
        )
    if "return" not in hints:
        raise ConfigError(f"custom op {NAMESPACE}::{name}: annotate the result (-> None or -> torch.Tensor)")
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise ConfigError(
                f"custom op {NAMESPACE}::{name}: *{parameter.name} has no place in an operator schema; "
                "wrap the function in one with a fixed parameter list"
            )
        if parameter.name not in hints:
            raise ConfigError(
                f"custom op {NAMESPACE}::{name}: parameter {parameter.name!r} has no annotation"
            )
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            parameter = parameter.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters.append(parameter.replace(annotation=hints[parameter.name]))
    result = None if hints["return"] is type(None) else hints["return"]
    return signature.replace(parameters=parameters, return_annotation=result)


def derive_schema(
    fn: Callable[..., Any], name: str, signature: inspect.Signature, mutates_args: tuple[str, ...]
) -> str:
    # ``infer_schema`` wants a function: a body-less twin carries the resolved signature.
    twin = types.FunctionType(returns_nothing.__code__, {})
    twin.__signature__ = signature  # type: ignore[attr-defined]
    try:
        return torch.library.infer_schema(twin, mutates_args=mutates_args)
    except ValueError as error:
        raise ConfigError(f"custom op {NAMESPACE}::{name} ({where_defined(fn)}): {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class LikeArgument:
    """The result looks like one of the arguments; ``check`` holds a real result against that."""

    name: str
    argument: str
    index: int | None
    """Its place among the positional arguments; None for a keyword-only one."""
    dtype: torch.dtype | None

    def make(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.empty_like(self.find(args, kwargs), dtype=self.dtype)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if self.index is not None and self.index < len(args):
            like = args[self.index]
        else:
            like = kwargs.get(self.argument)
        if like is None:
            raise GraphError(
                f"custom op {NAMESPACE}::{self.name}: out_shape={self.argument!r} is None in this call, "
                "so the shape of the result is unknown"
            )
        return like

    def check(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        like = self.find(args, kwargs)
        dtype = self.dtype or like.dtype
        if result.shape != like.shape or result.dtype != dtype or result.device != like.device:
            raise GraphError(
                f"custom op {NAMESPACE}::{self.name} returned {tuple(result.shape)} {result.dtype} on "
                f"{result.device}, but was registered to return {tuple(like.shape)} {dtype} on {like.device} "
                f"(out_shape={self.argument!r}); fix out_shape/out_dtype or pass fake=..."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnRule:
    """The result is described by a user's fake implementation, which only tracing can compare."""

    make: Callable[..., Any]

    def check(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        return None


def output_rule(
    name: str,
    signature: inspect.Signature,
    out_shape: int | str | None,
    out_dtype: torch.dtype | None,
    fake: Callable[..., Any] | None,
) -> LikeArgument | OwnRule:
    if fake is not None:
        if out_shape is not None or out_dtype is not None:
            raise ConfigError(
                f"custom op {NAMESPACE}::{name}: give fake=... or out_shape/out_dtype, not both"
            )
        return OwnRule(make=fake)
    parameters = list(signature.parameters.values())
    if signature.return_annotation is not Tensor or out_shape is None:
        raise ConfigError(
            f"custom op {NAMESPACE}::{name} returns {signature.return_annotation}: pass out_shape=<argument> "
            "if it is one tensor shaped like an argument, else fake=<function that returns empty tensors of "
            "the right shape>"
        )
    names = [p.name for p in parameters]
    in_range = out_shape in names if isinstance(out_shape, str) else 0 <= out_shape < len(names)
    if not in_range:
        raise ConfigError(f"custom op {NAMESPACE}::{name}: out_shape={out_shape!r} is not one of {names}")
    index = names.index(out_shape) if isinstance(out_shape, str) else out_shape
    if parameters[index].annotation not in (Tensor, Tensor | None):
        raise ConfigError(
            f"custom op {NAMESPACE}::{name}: out_shape={out_shape!r} is {parameters[index].annotation}, "
            "not a tensor"
        )
    is_positional = parameters[index].kind is not inspect.Parameter.KEYWORD_ONLY
    return LikeArgument(
        name=name, argument=names[index], index=index if is_positional else None, dtype=out_dtype
    )


def returns_nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def where_defined(fn: Any) -> str:
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", repr(fn))
    return f"{module}.{qualname}" if module else qualname

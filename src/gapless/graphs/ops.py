"""Custom ops: a kernel, or a library's function, becomes one opaque node for tracing, recording and replay.

``register_custom_op`` reads a function's annotations and derives from them the operator schema and the fake
implementation (what the outputs look like without computing them), so that neither can disagree with the
code. The op is opaque: ``torch.compile`` never looks inside, and a ``TorchDispatchMode`` sees a single call.

Invariant: the result of an op never aliases an argument. PyTorch's tracers rely on that; a function that
returns an argument it has mutated (``return x.add_(y)``) therefore gives back a *copy*, with one warning per
op. Prefer ops that mutate and return nothing.

Ops go through ``torch.library.Library.define``/``impl``, not ``torch.library.custom_op``: the latter wraps
every call for autograd, which costs about 25 us a call on a CPU against 2.4 us (a decode step makes 60 of
these calls). No gradient formula is registered. ``direct`` spares even these where nothing would see the
call. Used by ``attention/`` and ``kernels/``; ``device/emulated.py`` calls ``implementation_of`` at replay.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gapless.errors import ConfigError
from gapless.graphs.op_schema import (
    NAMESPACE,
    LikeArgument,
    OwnRule,
    derive_schema,
    output_rule,
    refuse_methods,
    resolved_signature,
    returns_nothing,
    where_defined,
)


def register_custom_op(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mutates_args: Iterable[str] = (),
    out_shape: int | str | None = None,
    out_dtype: torch.dtype | None = None,
    name: str | None = None,
    fake: Callable[..., Any] | None = None,
    is_fresh: bool = False,
) -> Any:
    """Turn an annotated function into an opaque op; a decorator, with or without arguments.

    ``mutates_args`` names every argument written in place. A function that returns ``None`` needs nothing
    else. One that returns a tensor needs ``out_shape`` (index or name of the tensor argument whose shape,
    strides and device the result has; ``out_dtype`` if its dtype differs), or ``fake``, a function with the
    same parameters that returns tensors of the right shape without computing. A call whose result has another
    shape or dtype raises.

    ``is_fresh`` is the author's promise that results are new tensors of the declared shape in every call.
    They are then looked at no further, which is most of what a call costs.

    Annotations may be tensors, optional tensors, lists of (optional) tensors, int, float, bool, str, dtype,
    device, lists of numbers, and any of these ``| None``; keyword-only parameters and defaults are kept.
    For methods there is ``method_ops.py``.

    Returns the ``torch._ops.OpOverload``. Registering the same function again under the same name returns the
    existing op; another function under a taken name, or other options, raise ``ConfigError``.
    """

    def register(function: Callable[..., Any]) -> Any:
        return _register(
            function,
            mutates_args=tuple(mutates_args),
            out_shape=out_shape,
            out_dtype=out_dtype,
            name=name,
            fake=fake,
            annotations={},
            is_fresh=is_fresh,
        )

    if isinstance(mutates_args, str):
        raise ConfigError(
            f"mutates_args={mutates_args!r}: give a list of argument names, as [{mutates_args!r}]"
        )
    return register if fn is None else register(fn)


def register_custom_op_from_extern(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mutates_args: Iterable[str] = (),
    out_shape: int | str | None = None,
    out_dtype: torch.dtype | None = None,
    name: str | None = None,
    fake: Callable[..., Any] | None = None,
    annotations: Mapping[str, Any] | None = None,
) -> Any:
    """The same for a function of another library, which is not ours to annotate.

    ``annotations`` adds to, or replaces, those the function has (``{"x": Tensor, "return": None}``). ``name``
    defaults to the function's module and name joined by ``_``, so that ``flash.add`` and ``fused.add`` do not
    collide. The library's own function is left as it is: call the returned op instead. Raises ``ConfigError``
    as ``register_custom_op`` does.
    """

    def register(function: Callable[..., Any]) -> Any:
        return _register(
            function,
            mutates_args=tuple(mutates_args),
            out_shape=out_shape,
            out_dtype=out_dtype,
            name=name or _extern_name(function),
            fake=fake,
            annotations=dict(annotations or {}),
            is_fresh=False,
        )

    if isinstance(mutates_args, str):
        raise ConfigError(
            f"mutates_args={mutates_args!r}: give a list of argument names, as [{mutates_args!r}]"
        )
    return register if fn is None else register(fn)


def implementation_of(overload: Any) -> Callable[..., Any] | None:
    """The Python function behind one of our ops (same arguments, same copy-on-alias result), or None for
    others.

    Calling it skips the dispatcher: right for a replay, which has decided already that the real thing should
    run.
    """
    op = _by_overload.get(overload)
    return op.implementation if op is not None else None


def is_built_in(overload: Any) -> bool:
    """Whether it is an op that this package itself has registered."""
    op = _by_overload.get(overload)
    return op is not None and op.fn.__module__.startswith("gapless.")


def direct(overload: Any) -> Callable[..., Any]:
    """A function that does what one of our ops does, past the dispatcher where that makes no difference.

    For call sites that run many times a step. The op itself is called whenever somebody may want to see or
    change the call: while compiling, tracing, profiling or differentiating, under a dispatch or function
    mode (recording on the emulated device, an ``OpLog``, fake tensors), inside ``vmap`` and its like, with
    meta tensors, tensor subclasses, keyword arguments, or arguments that the dispatcher would convert.
    Raises ``ConfigError`` for an op that is not ours.
    """
    op = _by_overload.get(overload)
    if op is None:
        raise ConfigError(f"{overload} was not registered by register_custom_op; call it as it is")
    implementation, first_tensor = op.implementation, op.first_tensor
    accepted: set[tuple[type, ...]] = set()

    @functools.wraps(op.fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or kwargs
            or torch._C._len_torch_dispatch_stack()
            or torch._C._len_torch_function_stack()
            or torch.is_grad_enabled()
            or torch._C._autograd._profiler_enabled()
            or torch._C._functorch.peek_interpreter_stack() is not None
            or torch._C._get_tracing_state() is not None
        ):
            return overload(*args, **kwargs)
        types = (*map(type, args),)
        if types not in accepted:
            if not _takes_as_they_are(op.annotations, types):
                return overload(*args)
            accepted.add(types)
        if first_tensor is not None and args[first_tensor].is_meta:
            return overload(*args)
        return implementation(*args)

    return call


@dataclass(frozen=True, kw_only=True, slots=True)
class _RegisteredOp:
    fn: Callable[..., Any]
    implementation: Callable[..., Any]
    overload: Any
    annotations: tuple[Any, ...]
    """Of all parameters, in order."""
    first_tensor: int | None
    """The first parameter that is always a tensor."""
    is_fresh: bool
    options: tuple[Any, ...]
    """By which a second registration is told from another one."""


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_by_name: dict[str, _RegisteredOp] = {}
_by_overload: dict[Any, _RegisteredOp] = {}


def _register(
    fn: Callable[..., Any],
    *,
    mutates_args: tuple[str, ...],
    out_shape: int | str | None,
    out_dtype: torch.dtype | None,
    name: str | None,
    fake: Callable[..., Any] | None,
    annotations: dict[str, Any],
    is_fresh: bool,
) -> Any:
    refuse_methods(fn)
    name = name or str(getattr(fn, "__name__", ""))
    if not name.isidentifier():
        raise ConfigError(f"name={name!r} of a custom op is not an identifier; pass name=...")
    existing = _by_name.get(name)
    options = (mutates_args, out_shape, out_dtype, is_fresh)
    if existing is not None:
        if existing.fn is fn and existing.options == options:
            return existing.overload
        if existing.fn is fn:
            raise ConfigError(
                f"custom op {NAMESPACE}::{name} is already registered with other options: (mutates_args, "
                f"out_shape, out_dtype, is_fresh) were {existing.options} and are {options} now"
            )
        raise ConfigError(
            f"custom op {NAMESPACE}::{name} is already registered by {where_defined(existing.fn)}; "
            f"register {where_defined(fn)} under another name=..."
        )
    signature = resolved_signature(fn, name, annotations)
    schema = derive_schema(fn, name, signature, mutates_args)
    implementation = fn
    if signature.return_annotation is not None:
        output = output_rule(name, signature, out_shape, out_dtype, fake)
        if not is_fresh:
            implementation = _copying_aliases(fn, name, signature, output)
        fake_fn = fake or output.make
    elif out_shape is not None or out_dtype is not None:
        raise ConfigError(
            f"custom op {NAMESPACE}::{name} returns nothing (it is annotated -> None), "
            "so out_shape and out_dtype have no meaning; annotate -> torch.Tensor or drop them"
        )
    elif is_fresh:
        raise ConfigError(
            f"custom op {NAMESPACE}::{name} returns nothing, so is_fresh has no meaning; drop it"
        )
    else:
        fake_fn = fake or returns_nothing
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake_fn, lib=_library)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    parameter_types = tuple(parameter.annotation for parameter in signature.parameters.values())
    op = _RegisteredOp(
        fn=fn,
        implementation=implementation,
        overload=overload,
        annotations=parameter_types,
        first_tensor=parameter_types.index(Tensor) if Tensor in parameter_types else None,
        is_fresh=is_fresh,
        options=options,
    )
    _by_name[name] = _by_overload[overload] = op
    return overload


_TENSOR_TYPES = (Tensor, torch.nn.Parameter)
_ACCEPTED_TYPES: dict[Any, tuple[type, ...]] = {
    Tensor: _TENSOR_TYPES,
    Tensor | None: (*_TENSOR_TYPES, type(None)),
    int: (int,),
    int | None: (int, type(None)),
    float: (float,),
    float | None: (float, type(None)),
    bool: (bool,),
    str: (str,),
}
"""By annotation, what the dispatcher hands on as it is. It makes lists of tuples and floats of integers."""


def _takes_as_they_are(annotations: tuple[Any, ...], types: tuple[type, ...]) -> bool:
    """Whether arguments of these types, one for each parameter, reach the function unchanged."""
    return len(types) == len(annotations) and all(
        kind in _ACCEPTED_TYPES.get(annotation, ())
        for annotation, kind in zip(annotations, types, strict=True)
    )


def _copying_aliases(
    fn: Callable[..., Any], name: str, signature: inspect.Signature, output: LikeArgument | OwnRule
) -> Callable[..., Any]:
    single = signature.return_annotation is Tensor
    warned = False

    def own(result: Tensor, tensors: list[Tensor]) -> Tensor:
        nonlocal warned
        if not any(_shares_memory(result, tensor) for tensor in tensors):
            return result
        if not warned:
            warned = True
            warnings.warn(
                f"custom op {NAMESPACE}::{name} returns one of its arguments (or a view of it): an opaque op "
                "must not, so callers get a copy. Return None and use the mutated argument to avoid it.",
                stacklevel=3,
            )
        return result.clone()

    def implementation(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        tensors = [a for a in _flatten(args) if isinstance(a, Tensor)]
        if kwargs:
            tensors += [a for a in _flatten(kwargs.values()) if isinstance(a, Tensor)]
        if single:
            output.check(result, args, kwargs)
            return own(result, tensors)
        results: list[Tensor] = []
        for item in result:
            results.append(own(item, tensors + results))
        return type(result)(results)

    return implementation


def _shares_memory(a: Tensor, b: Tensor) -> bool:
    return bool(torch._C._is_alias_of(a, b))  # type: ignore[attr-defined]


def _flatten(values: Iterable[Any]) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple):
            flat.extend(value)
        else:
            flat.append(value)
    return flat


def _extern_name(fn: Any) -> str:
    module = getattr(fn, "__module__", None) or "extern"
    return f"{module}_{getattr(fn, '__name__', '')}".replace(".", "_")

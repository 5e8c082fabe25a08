"""Custom ops that are methods: what they see of their object is a number.

An op takes tensors and numbers, so an object cannot be its argument. ``register_custom_op_method`` makes an
op whose first argument is a *handle*, a number that stands for the object for as long as it lives; the method
that stays in the class fills it in. Traced code and graphs freeze the number, and with it the object, as they
freeze any other; a call whose object has gone is an error, never another object's method.

An object gets its handle when it is made. A copy is never taken for what it was copied from: it gets a handle
of its own at its first call, which for traced code must come before the trace.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import weakref
from collections.abc import Callable
from typing import Any

import torch

from gapless.errors import ConfigError, GraphError
from gapless.graphs.op_schema import where_defined
from gapless.graphs.ops import register_custom_op

_ATTRIBUTE = "_gapless_handle"
_numbers = itertools.count(1)
_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register_custom_op_method(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    out_shape: int | str | None = None,
    name: str | None = None,
    fake: Callable[..., Any] | None = None,
    **options: Any,
) -> Any:
    """``register_custom_op`` for a method, in the body of its class; a decorator, with or without arguments.

    Everything is as there, the other ``options`` too. An index ``out_shape`` does not count ``self``;
    ``fake`` is called with ``self``. What the method writes into its object is not seen: tensors that it
    changes must be arguments named by ``mutates_args``. ``name`` defaults to those of module, class and
    method joined by ``_``. Objects need a ``__dict__`` and weak references. Raises ``ConfigError`` as
    ``register_custom_op`` does, and for a method that is called while compiling on an object without a
    handle; ``GraphError`` where the object has gone.
    """

    def register(function: Callable[..., Any]) -> Any:
        if not inspect.isfunction(function) or not inspect.signature(function).parameters:
            raise ConfigError(f"{function!r} is no method; decorate a function in the body of a class")
        op = register_custom_op(
            _on_objects(function),
            out_shape=out_shape + 1 if isinstance(out_shape, int) else out_shape,
            name=name or re.sub(r"\W+", "_", f"{function.__module__}_{function.__qualname__}"),
            fake=None if fake is None else _on_objects(fake),
            **options,
        )
        return _InClassBody(function, op)

    return register if fn is None else register(fn)


class _Handle:
    """What an object knows itself by. Where an object is copied deeply or pickled, it becomes nobody's."""

    def __init__(self, owner: object = None) -> None:
        self.number = next(_numbers)
        self.owner_id = id(owner)
        if owner is not None:
            _objects[self.number] = owner

    def __deepcopy__(self, memo: dict[int, Any]) -> _Handle:
        return _Handle()

    def __reduce__(self) -> tuple[type[_Handle], tuple[()]]:
        return _Handle, ()


class _InClassBody:
    """Stands in the body of a class until the class is made, and then gives its place to a method."""

    def __init__(self, fn: Callable[..., Any], op: Any) -> None:
        self._fn, self._op = fn, op

    def __set_name__(self, owner: type, name: str) -> None:
        op = self._op

        @functools.wraps(self._fn)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return op(_number_of(self), *args, **kwargs)

        method.op = op  # type: ignore[attr-defined]
        setattr(owner, name, method)
        if not hasattr(owner.__init__, _ATTRIBUTE):  # type: ignore[misc]
            _give_handles(owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            f"{where_defined(self._fn)} was not registered in the body of a class, so it is no method of any"
        )


def _on_objects(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` of a handle instead of ``self``."""

    @functools.wraps(fn)
    def plain(handle: int, *args: Any, **kwargs: Any) -> Any:
        owner = _objects.get(handle)
        if owner is None:
            raise GraphError(
                f"the object whose method {where_defined(fn)} is called has gone; whoever holds traced code "
                "or graphs of it must hold it too"
            )
        return fn(owner, *args, **kwargs)

    signature = inspect.signature(fn)
    (own_name, _), *others = signature.parameters.items()
    parameters = [
        inspect.Parameter("handle", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=int),
        *(parameter for _, parameter in others),
    ]
    plain.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    annotations = {key: kind for key, kind in fn.__annotations__.items() if key != own_name}
    plain.__annotations__ = {"handle": int, **annotations}
    return plain


def _give_handles(owner: type) -> None:
    """Objects of ``owner`` and of what is derived from it have theirs before ``__init__`` begins."""
    made = owner.__init__  # type: ignore[misc]

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _new_handle(self)
        made(self, *args, **kwargs)

    setattr(init, _ATTRIBUTE, True)
    owner.__init__ = init  # type: ignore[misc]


def _number_of(owner: Any) -> int:
    handle = getattr(owner, _ATTRIBUTE, None)
    if torch.compiler.is_compiling():
        if handle is None or handle.owner_id != id(owner):
            raise ConfigError("call the method once before it is compiled: this object has no handle yet")
        return handle.number
    if handle is None or _objects.get(handle.number) is not owner:
        handle = _new_handle(owner)
    return handle.number


def _new_handle(owner: Any) -> _Handle:
    try:
        handle = _Handle(owner)
        object.__setattr__(owner, _ATTRIBUTE, handle)  # past a module's own, which looks at every value
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"a method of {type(owner).__qualname__} is a custom op, so its objects need a __dict__ and weak "
            f"references: {error}"
        ) from error
    return handle

"""Triton's interpreter without the work it repeats: kernels run more than twice as fast and compute the same.

What it does anew at every launch, in every function that a kernel calls or for every value, and what never
changes: the lists of the language's builtins, which it replaces; a table of types; shapes as constants; and a
check for overflow whose outcome is asserted only with ``debug``, which the interpreter never has. Made for
Triton 3.6; ``triton_interpreter.py`` imports it there.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter


@cache
def _builtins_of(package: Any) -> list[tuple[str, Any]]:
    return [pair for pair in inspect.getmembers(package) if tl.core.is_builtin(pair[1])]


def _patch_once(_kernel: Any) -> Any:
    """The whole language for a launch, and nothing more in the functions that its kernel calls."""
    scope = interpreter._LangPatchScope()
    if not tl.core.is_builtin(tl.load):
        return scope
    for package in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        for name, member in _builtins_of(package):
            interpreter._patch_attr(package, name, member, interpreter.interpreter_builder, scope)
    interpreter._patch_lang_tensor(tl.tensor, scope)
    for language in (tl, tl.core):
        interpreter._patch_lang_core(language, scope)
    return scope


_look_up = cache(interpreter._get_np_dtype)


def _np_dtype(of: Any) -> Any:
    """A block's by what it holds: types of blocks have no hash."""
    return np.dtype(np.uint64) if of.scalar.is_ptr() else _look_up(of.scalar)


@cache
def _as_constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.constexpr(math.prod(shape)), tl.core.tuple([tl.constexpr(size) for size in shape])


def _init_tensor(self: Any, handle: Any, of: Any) -> None:
    self.handle, self.type, self.dtype = handle, of, of.scalar
    self.numel, self.shape = _as_constants(of.shape if of.is_block() else ())


interpreter._patch_lang = _patch_once
interpreter._get_np_dtype = _np_dtype
tl.tensor.__init__ = _init_tensor
interpreter.interpreter_builder.options = replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)

"""The forward context: what the code below a step may know about the step it runs in.

Wrappers read the runtime mode and the descriptor here and trust them; break bodies and attention read the
live batch here, never from captured arguments. It is a ``ContextVar``, so threads and tasks do not see each
other's step.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from gapless.graphs.batch import BatchDescriptor
from gapless.graphs.modes import RuntimeMode


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardContext:
    """``batch`` is opaque here: for language models it is an ``AttentionMetadata``."""

    mode: RuntimeMode = RuntimeMode.NONE
    descriptor: BatchDescriptor | None = None
    batch: Any = None
    use_compiled: bool = False
    """A *piecewise context*: a forward with a compiled path takes it, in whatever mode the step runs."""
    is_short_warm_up: bool = False
    """Nobody reads what this run computes: it is there so that each kernel of a size has run once, in that
    size. A forward of many equal layers may run one layer of each kind."""


_current: ContextVar[ForwardContext | None] = ContextVar("gapless_forward_context", default=None)


def get_forward_context() -> ForwardContext:
    """The context of the running step. Raises ``RuntimeError`` outside a step."""
    context = _current.get()
    if context is None:
        raise RuntimeError("no forward context: run the model inside `use_forward_context(...)`")
    return context


def in_piecewise_context() -> bool:
    """Whether the running step wants the compiled path; False outside a step."""
    context = _current.get()
    return context is not None and context.use_compiled


def in_short_warm_up() -> bool:
    """Whether one layer of each kind is enough (``ForwardContext.is_short_warm_up``); False outside a step
    and in code that is being traced, which serves other runs too."""
    if torch.compiler.is_compiling():
        return False
    context = _current.get()
    return context is not None and context.is_short_warm_up


class use_forward_context:
    """Make ``context`` current for the block and restore the previous one after it, also on an exception.

    A class, because a generator takes three times as long to enter and leave, in every step.
    """

    __slots__ = ("_context", "_token")

    def __init__(self, context: ForwardContext) -> None:
        self._context = context

    def __enter__(self) -> ForwardContext:
        self._token: Token[ForwardContext | None] = _current.set(self._context)
        return self._context

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _current.reset(self._token)

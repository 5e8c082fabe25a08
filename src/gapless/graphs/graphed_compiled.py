"""``tc_piecewise`` for library callables: trace once, cut at the user's split ops, capture pieces per size.

The traced forward stands in for the callable wherever a bucket runs; the plain one serves eager calls. A
trace knows one dynamic dimension per argument, so this strategy takes callables with one, and it needs split
ops: without a cut the whole is one piece, which ``full`` captures without a compiler. Read
``piecewise/compile.py`` for the trace, ``generation.py`` for who uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gapless.errors import ConfigError
from gapless.graphs.buckets import Buckets
from gapless.graphs.call_template import CallTemplate
from gapless.graphs.capabilities import TcCompiler
from gapless.graphs.context import ForwardContext, use_forward_context
from gapless.graphs.device.base import GraphDevice
from gapless.graphs.modes import Strategy
from gapless.graphs.piecewise import PiecewiseConfig, PiecewiseForward
from gapless.graphs.piecewise.compile import MIN_TRACE_ROWS
from gapless.graphs.real_sizes import RealSizes

EAGER_TRACE_ROWS = 8
"""Rows of the traced call where nothing is tuned to them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileOptions:
    """``split_ops``: where to cut, as ``namespace::op``. ``compiler``: of the pieces."""

    split_ops: tuple[str, ...] = ()
    compiler: TcCompiler = "eager"

    def check(self, strategy: Strategy | None, symbols: tuple[str, ...]) -> None:
        """Raise ``ConfigError`` for options that make no sense together."""
        if strategy is not Strategy.TC_PIECEWISE:
            if self.split_ops or self.compiler != "eager":
                raise ConfigError("split_ops and compiler belong to strategy='tc_piecewise'")
            return
        if self.compiler not in ("eager", "inductor"):
            raise ConfigError(f"compiler={self.compiler!r}: choose eager or inductor")
        if not self.split_ops:
            raise ConfigError(
                "strategy='tc_piecewise' needs split_ops=('namespace::op', ...): the ops that must stay "
                "eager. With nothing to cut at, use strategy='full'"
            )
        if len(symbols) > 1:
            raise ConfigError(f"tc_piecewise takes one dynamic dimension; there are {', '.join(symbols)}")


def make_compiled(
    fn: Callable[..., Any],
    options: CompileOptions,
    *,
    template: CallTemplate,
    device: GraphDevice,
    buckets: Buckets,
) -> PiecewiseForward:
    """The traced stand-in of ``fn``, not yet traced. Raises ``ConfigError`` for ops that do not exist."""
    dims: dict[str, int | None] = {}
    for name, declared in template.arguments.inputs.items():
        if "[" in name or len(declared.dims) != 1:
            raise ConfigError(
                f"tc_piecewise takes whole arguments with one dynamic dimension; {name!r} is not one"
            )
        dims[name] = next(iter(declared.dims))
    if max(buckets.max_sizes.values()) < MIN_TRACE_ROWS:
        dims = dict.fromkeys(dims)
    return PiecewiseForward(
        fn.forward if isinstance(fn, torch.nn.Module) else fn,
        config=PiecewiseConfig(
            split_ops=options.split_ops,
            compiler=options.compiler,
            off_switch="strategy='breakable', 'full' or 'disabled'",
        ),
        device=device,
        dynamic_dims=dims,
        default_dim=None,
    )


def trace_rows(options: CompileOptions, largest: int) -> int:
    """Inductor tunes its code to the traced size, so it gets the largest."""
    return largest if options.compiler == "inductor" else min(largest, EAGER_TRACE_ROWS)


def trace(
    compiled: PiecewiseForward,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    sizes: Mapping[str, int],
    device: GraphDevice,
) -> None:
    """The first call in a piecewise context. Raises ``CompileError`` where tracing fails."""
    batch = RealSizes(tuple(sizes), sizes=sizes, device=device.torch_device)
    with (
        torch.no_grad(),
        device.stream_scope(),
        use_forward_context(ForwardContext(batch=batch, use_compiled=True)),
    ):
        compiled(*call[0], **call[1])

"""``graphed``: any PyTorch callable whose batch size changes from call to call, run as graphs.

The user says which arguments change and in which dimensions; the result is a callable that pads them to a
captured size, replays its graph and returns the real rows. What no graph serves runs eagerly, and is counted
with its reason. Captures happen by ``capture`` or at the first call; after that the set of graphs is sealed.
Invariants: every argument is either copied in at each call or checked against what was captured; everything a
graph may read is kept alive until it is released; results are the caller's own unless he asks for the static
memory itself. Read ``graphed_callable.py`` (a call),
``call_template.py`` (arguments), ``probe.py`` (what is learned before a capture) and ``generation.py`` (one
set of graphs).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from gapless.errors import ConfigError
from gapless.graphs.arguments import Input
from gapless.graphs.buckets import Sizes
from gapless.graphs.capabilities import TcCompiler
from gapless.graphs.graphed_callable import Graphed
from gapless.graphs.graphed_compiled import CompileOptions
from gapless.graphs.graphed_options import Audit, Fallback, GraphedOptions, State
from gapless.graphs.modes import Strategy
from gapless.graphs.outputs import OutputDims
from gapless.graphs.samples import MakeInputs
from gapless.graphs.store import SharedPool

__all__ = ["Fallback", "Graphed", "Input", "SharedPool", "State", "graphed"]

StrategyName = Literal["auto", "full", "breakable", "tc_piecewise", "disabled"]


def graphed(
    fn: Callable[..., Any] | None = None,
    *,
    inputs: Mapping[str, Input],
    strategy: StrategyName = "auto",
    sizes: Sizes | Mapping[str, Sizes] | None = None,
    outputs: Sequence[OutputDims] | None = None,
    copy_outputs: bool = True,
    make_inputs: MakeInputs | None = None,
    split_ops: Sequence[str] = (),
    compiler: TcCompiler = "eager",
    pool: SharedPool | None = None,
    check_padding: bool = True,
    audit: Audit = "first",
) -> Any:
    """Make a callable that runs ``fn`` as graphs; a decorator when ``fn`` is left out.

    ``inputs``: the arguments that change, by name, with their dynamic dimensions and pad values. All others
    are checked at every call: a tensor must be the same memory, a value must be equal.
    ``strategy``: ``full`` is one graph, ``breakable`` is cut at functions marked with ``eager_break``,
    ``auto`` is breakable if there are any, else full. ``tc_piecewise`` traces with ``torch.compile`` and cuts
    at ``split_ops`` (names of registered ops); ``compiler`` compiles the pieces: ``eager`` or ``inductor``.
    ``sizes``: the largest size (a ladder of sizes ends there) or a list of sizes; with two dynamic dimensions
    one of these for each. Left out, the example's size is the largest.
    ``outputs``: the dynamic dimensions of each result tensor; found by running two sizes when left out.
    ``copy_outputs``: False returns static memory, valid until the next call of this object.
    ``make_inputs(sizes, generator)``: makes the declared arguments for warm-up, capture and ``verify``;
    without it data is made from the first call's.
    ``pool``: graph memory shared with other graphed callables that never run at the same time.
    ``check_padding``: refuse at capture if padding changes real rows (skipped for random results).
    ``audit``: check the addresses of everything graphs read at the first replay of each size, at every call,
    or never.

    No gradients flow through a graphed callable. Raises ``ConfigError`` for options that make no sense.
    """
    options = GraphedOptions(
        strategy=_strategy_of(strategy),
        sizes=sizes,
        outputs=outputs,
        copy_outputs=copy_outputs,
        make_inputs=make_inputs,
        compile=CompileOptions(split_ops=tuple(split_ops), compiler=compiler),
        pool=pool,
        checks_padding=check_padding,
        audit=audit,
    )
    if fn is None:
        return lambda function: Graphed(function, inputs=inputs, options=options)
    return Graphed(fn, inputs=inputs, options=options)


def _strategy_of(name: str) -> Strategy | None:
    """The strategy of a name; None for ``auto``. Raises ``ConfigError`` for a name that does not exist."""
    if name == "auto":
        return None
    try:
        return Strategy(name)
    except ValueError:
        known = ", ".join(["auto", *Strategy])
        raise ConfigError(f"strategy={name!r} does not exist; choose from {known}") from None

"""How a recorded op is run again: one prebuilt call without arguments, writing into the recorded output.

Where PyTorch has an ``out`` overload with the same arguments, it is that overload; copies and casts become
``copy_``; otherwise the op runs and its result is copied. All of these run the kernel that eager execution
runs, so results are bit-equal. The frequent ops are called through PyTorch's generated Python bindings, which
parse arguments in half the time of the schema-driven entry (0.9 against 1.8 us a call).
Invariant: a bound call holds addresses (aliases) only, never an owner of pool memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from gapless.graphs.ops import implementation_of, is_built_in

Call = Callable[[], object]

_aten = torch.ops.aten


def bind_mutation(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """A call of an op that writes into its arguments and returns nothing new."""
    method = _FAST_METHODS.get(op)
    if method is not None:
        return functools.partial(getattr(args[0], method), *args[1:], **kwargs)
    return functools.partial(_entry(op), *args, **kwargs)


def bind_functional(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[Tensor | None]
) -> Call:
    """A call that leaves the op's results in ``outs``, in order; None where a result is not to be kept."""
    if op in _COPIES and outs[0] is not None:
        return functools.partial(outs[0].copy_, args[0])
    variant = out_variant(op)
    if variant is not None and all(out is not None for out in outs):
        kept = {name: value for name, value in kwargs.items() if name in variant.inputs}
        kept.update(zip(variant.outputs, outs, strict=True))
        return functools.partial(_FAST_FUNCTIONS.get(op) or variant.op._op, *args, **kept)
    call = functools.partial(_entry(op), *args, **kwargs)
    if len(outs) == 1 and outs[0] is not None and _returns_one_tensor(op):
        return functools.partial(_run_and_copy_one, call, outs[0].copy_)
    return functools.partial(_run_and_copy, call, tuple(outs))


class OutVariant:
    """An overload that writes the results of another one into given tensors."""

    def __init__(self, op: torch._ops.OpOverload) -> None:
        arguments = op._schema.arguments
        self.op = op
        self.outputs = tuple(argument.name for argument in arguments if argument.is_out)
        self.inputs = {argument.name for argument in arguments if not argument.is_out}


@functools.cache
def out_variant(op: torch._ops.OpOverload) -> OutVariant | None:
    """The ``out`` overload of an aten op that takes exactly its arguments; None if there is none.

    Arguments that describe the output (``dtype``, ``device``, ...) may be missing: the output exists already.
    """
    if op.namespace != "aten":
        return None
    returns = [str(result.type) for result in op._schema.returns]
    if set(returns) != {"Tensor"}:
        return None
    given = [(argument.name, str(argument.type)) for argument in op._schema.arguments]
    acceptable = (
        [pair for pair in given if pair[0] not in _TENSOR_OPTIONS],
        [pair for pair in given if pair[0] not in _TENSOR_OPTIONS - {"dtype"}],
    )
    for name in op.overloadpacket.overloads():
        candidate = getattr(op.overloadpacket, name)
        arguments = candidate._schema.arguments
        inputs = [argument for argument in arguments if not argument.is_out]
        outputs = [argument for argument in arguments if argument.is_out]
        if [str(argument.type) for argument in outputs] != returns:
            continue
        if any(argument.alias_info is not None for argument in inputs):
            continue
        if [(argument.name, str(argument.type)) for argument in inputs] in acceptable:
            return OutVariant(candidate)
    return None


_TENSOR_OPTIONS = {"dtype", "layout", "device", "pin_memory", "memory_format"}

_COPIES = {_aten.clone.default, _aten._to_copy.default, _aten.lift.default}

# Python bindings with the same arguments as the overload's ``out`` variant.
_FAST_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: torch.add,
    _aten.sub.Tensor: torch.sub,
    _aten.mul.Tensor: torch.mul,
    _aten.div.Tensor: torch.div,
    _aten.mm.default: torch.mm,
    _aten.bmm.default: torch.bmm,
    _aten.addmm.default: torch.addmm,
    _aten.addcdiv.default: torch.addcdiv,
    _aten.addcmul.default: torch.addcmul,
    _aten.baddbmm.default: torch.baddbmm,
    _aten.cat.default: torch.cat,
    _aten.neg.default: torch.neg,
    _aten.cos.default: torch.cos,
    _aten.sin.default: torch.sin,
    _aten.exp.default: torch.exp,
    _aten.rsqrt.default: torch.rsqrt,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.tanh.default: torch.tanh,
    _aten.pow.Tensor_Scalar: torch.pow,
    _aten.mean.dim: torch.mean,
    _aten.sum.dim_IntList: torch.sum,
    _aten.maximum.default: torch.maximum,
    _aten.minimum.default: torch.minimum,
    _aten.index_select.default: torch.index_select,
    _aten.silu.default: torch._C._nn.silu,
    _aten.gelu.default: torch._C._nn.gelu,
}

_FAST_METHODS: dict[Any, str] = {
    _aten.copy_.default: "copy_",
    _aten.zero_.default: "zero_",
    _aten.fill_.Scalar: "fill_",
    _aten.add_.Tensor: "add_",
    _aten.add_.Scalar: "add_",
    _aten.sub_.Tensor: "sub_",
    _aten.mul_.Tensor: "mul_",
    _aten.div_.Tensor: "div_",
    _aten.index_copy_.default: "index_copy_",
}


def _entry(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The cheapest callable that runs the op on a CPU: our own ops directly, others past ``OpOverload``.
    Ops that are neither PyTorch's nor of this package may be Python that differentiates."""
    entry = implementation_of(op) or op._op
    return entry if op.namespace == "aten" or is_built_in(op) else with_autograd(entry)


_AUTOGRAD_KEYS = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradOther)
)


def past_autograd() -> AbstractContextManager[object]:
    """Autograd is told nothing of the calls of a replay, as on CUDA: nobody reads what it records of each
    operation, view and version."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOGRAD_KEYS)


def with_autograd(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, inside of which autograd works as usual even where a replay goes past it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled():  # goes past it anyway
            return call(*args, **kwargs)
        included = torch._C._dispatch_tls_local_include_set()
        excluded = torch._C._dispatch_tls_local_exclude_set() - _AUTOGRAD_KEYS
        with torch._C._ForceDispatchKeyGuard(included, excluded):
            return call(*args, **kwargs)

    return run


def _returns_one_tensor(op: torch._ops.OpOverload) -> bool:
    return len(op._schema.returns) == 1 and str(op._schema.returns[0].type) == "Tensor"


def _run_and_copy_one(call: Call, copy: Callable[[Any], object]) -> None:
    copy(call())


def _run_and_copy(call: Callable[[], Any], outs: tuple[Tensor | None, ...]) -> None:
    results = call()
    if isinstance(results, Tensor):
        results = (results,)
    for out, result in zip(outs, results, strict=True):
        if out is not None:
            out.copy_(result)

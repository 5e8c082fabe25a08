"""How a recorded op is run again: one prebuilt call without arguments, writing into the recorded output.

Where PyTorch has an ``out`` overload with the same arguments the call is that overload; copies and casts become
``copy_``; otherwise the op runs and its result is copied. All three run the kernel that eager execution runs, so
results are bit-equal. Invariant: a bound call holds addresses (aliases) only, never an owner of pool memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gapless.graphs.ops import implementation_of

Call = Callable[[], object]

_aten = torch.ops.aten


def bind_mutation(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    if op is _aten.copy_.default and not kwargs:
        return functools.partial(args[0].copy_, *args[1:])
    return functools.partial(_entry(op), *args, **kwargs)


def bind_functional(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[Tensor | None]
) -> Call:
    """``outs``: the recorded outputs in order; None for a result that is not a tensor."""
    if op in _COPIES:
        assert outs[0] is not None
        return functools.partial(outs[0].copy_, args[0])
    names = out_names(op)
    if names is not None and all(out is not None for out in outs):
        out_op, names = names
        kept = {name: value for name, value in kwargs.items() if name not in _TENSOR_OPTIONS}
        if "dtype" in kwargs and _takes(out_op, "dtype"):
            kept["dtype"] = kwargs["dtype"]
        return functools.partial(out_op._op, *args, **kept, **dict(zip(names, outs, strict=True)))
    call = functools.partial(_entry(op), *args, **kwargs)
    if len(outs) == 1 and len(op._schema.returns) == 1 and outs[0] is not None and _returns_tensor(op):
        return functools.partial(_run_and_copy_one, call, outs[0].copy_)
    return functools.partial(_run_and_copy, call, tuple(outs))


@functools.cache
def out_names(op: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload, tuple[str, ...]] | None:
    """The ``out`` overload with exactly ``op``'s arguments, and the names of its outputs; None if there is none."""
    if op.namespace != "aten":
        return None
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in _TENSOR_OPTIONS]
    wanted_dtype = [
        (a.name, str(a.type)) for a in op._schema.arguments if a.name not in _TENSOR_OPTIONS - {"dtype"}
    ]
    packet = op.overloadpacket
    for overload_name in packet.overloads():
        candidate = getattr(packet, overload_name)
        if torch.Tag.out_variant not in candidate.tags and not candidate._schema.is_mutable:
            continue
        inputs = [a for a in candidate._schema.arguments if not _is_out(a)]
        outputs = [a.name for a in candidate._schema.arguments if _is_out(a)]
        signature = [(a.name, str(a.type)) for a in inputs]
        has_writes = any(a.alias_info is not None for a in inputs)
        if has_writes or len(outputs) != len(op._schema.returns) or not outputs:
            continue
        if signature in (wanted, wanted_dtype) and all(str(a.type) == "Tensor" for a in _outs(candidate)):
            return candidate, tuple(outputs)
    return None


# Their ``dtype`` and the like describe the output, which exists already.
_TENSOR_OPTIONS = {"dtype", "layout", "device", "pin_memory", "memory_format"}

_COPIES = {_aten.clone.default, _aten._to_copy.default, _aten.lift.default}


def _entry(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The cheapest callable that runs the op on a CPU: one of our ops directly, else past Python's ``OpOverload``."""
    return implementation_of(op) or op._op


def _takes(op: torch._ops.OpOverload, name: str) -> bool:
    return any(argument.name == name for argument in op._schema.arguments)


def _is_out(argument: Any) -> bool:
    return argument.kwarg_only and argument.alias_info is not None and argument.alias_info.is_write


def _outs(op: torch._ops.OpOverload) -> list[Any]:
    return [argument for argument in op._schema.arguments if _is_out(argument)]


def _returns_tensor(op: torch._ops.OpOverload) -> bool:
    return str(op._schema.returns[0].type) == "Tensor"


def _run_and_copy_one(call: Call, copy: Callable[[Any], object]) -> None:
    copy(call())


def _run_and_copy(call: Callable[[], Any], outs: tuple[Tensor | None, ...]) -> None:
    results = call()
    if isinstance(results, Tensor):
        results = (results,)
    for out, result in zip(outs, results, strict=True):
        if out is not None:
            out.copy_(result)

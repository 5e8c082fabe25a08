"""Samples: legal batches of any size, made from one example.

Warm-up and capture need data that takes the branches of real data, and verification needs fresh data. Without
a ``make_inputs`` of the user's own both come from the example: its rows repeated, or values drawn like its
values (floating point with its mean and spread, everything else from the values that occur in it). That keeps
token ids inside the vocabulary and masks 0 or 1 without anyone saying so. Offsets (``pad="last"``) keep the
example's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gapless.errors import ConfigError
from gapless.graphs.arguments import Arguments, Input
from gapless.graphs.call_template import CallTemplate

MakeInputs = Callable[[Mapping[str, int], torch.Generator], Mapping[str, Any]]
"""``sizes`` and a CPU generator to the declared arguments by name."""


class Samples:
    """Makes batches like ``example``, the tensors of one real call by leaf name."""

    def __init__(
        self,
        template: CallTemplate,
        example: Mapping[str, Tensor],
        *,
        make_inputs: MakeInputs | None = None,
    ) -> None:
        self._template, self._make_inputs = template, make_inputs
        # On the host: this copy lives as long as the graphs do.
        self._example = {name: tensor.detach().to("cpu", copy=True) for name, tensor in example.items()}

    def repeated(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """The example's rows, repeated or cut to ``sizes``: what warm-up and capture see."""
        if self._make_inputs is not None:
            return self._made(sizes, torch.Generator().manual_seed(0))
        return {
            field.name: self._on_device(
                _resize(self._example[field.name], field.shape(sizes), field.pad == "last")
            )
            for field in self._template.fields
        }

    def fresh(self, sizes: Mapping[str, int], generator: torch.Generator) -> dict[str, Tensor]:
        """New random data of ``sizes``."""
        if self._make_inputs is not None:
            return self._made(sizes, generator)
        values = {}
        for field in self._template.fields:
            example, shape = self._example[field.name], field.shape(sizes)
            declared = self._template.arguments.declared(field.name)
            assert declared is not None
            if field.pad == "last":
                drawn = _resize(example, shape, True)
            else:
                drawn = _draw(example, shape, declared, generator)
            values[field.name] = self._on_device(drawn)
        return values

    def _made(self, sizes: Mapping[str, int], generator: torch.Generator) -> dict[str, Tensor]:
        assert self._make_inputs is not None
        made = flatten_inputs(self._template.arguments, self._make_inputs(dict(sizes), generator))
        values = {}
        for field in self._template.fields:
            tensor = made.get(field.name)
            if tensor is None or tuple(tensor.shape) != field.shape(sizes) or tensor.dtype != field.dtype:
                have = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
                raise ConfigError(
                    f"make_inputs({dict(sizes)}) gave {have} for {field.name!r}; it must be a tensor "
                    f"{field.shape(sizes)} {field.dtype}"
                )
            values[field.name] = self._on_device(tensor)
        return values

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._template.device)


def flatten_inputs(arguments: Arguments, made: Mapping[str, Any]) -> dict[str, Tensor]:
    """Declared arguments by name to tensors by leaf name."""
    found: dict[str, Tensor] = {}
    for name, value in made.items():
        found.update(_leaves(name, value))
    return found


def smaller_than(sizes: Mapping[str, int]) -> dict[str, int]:
    """About two thirds of every size: there is padding, and size 1, which shapes often treat specially, is
    avoided."""
    return {symbol: max(1, min(size - 1, max(2, 2 * size // 3))) for symbol, size in sizes.items()}


def _leaves(name: str, value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {name: value}
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    found: dict[str, Tensor] = {}
    for key, item in items:
        found.update(_leaves(f"{name}[{key!r}]", item))
    return found


def _resize(example: Tensor, shape: tuple[int, ...], repeats_last: bool) -> Tensor:
    for dim, size in enumerate(shape):
        have = example.shape[dim]
        if have == size:
            continue
        if have == 0:
            example = example.new_zeros((*example.shape[:dim], size, *example.shape[dim + 1 :]))
            continue
        index = torch.arange(size)
        index = index.clamp(max=have - 1) if repeats_last else index % have
        example = example.index_select(dim, index)
    return example


def _draw(example: Tensor, shape: tuple[int, ...], declared: Input, generator: torch.Generator) -> Tensor:
    dtype = example.dtype
    if declared.low is not None and declared.high is not None:
        if dtype.is_floating_point:
            span = declared.high - declared.low
            return (torch.rand(shape, generator=generator) * span + declared.low).to(dtype)
        return torch.randint(int(declared.low), int(declared.high), shape, generator=generator, dtype=dtype)
    if dtype.is_floating_point and example.numel():
        values = example.double()
        spread = values.std(correction=0) if values.numel() > 1 else values.abs().max()
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * spread + values.mean()
        if bool(drawn.isfinite().all()):
            return drawn.to(dtype)
    if not example.numel():
        return torch.zeros(shape, dtype=dtype)
    index = torch.randint(example.numel(), shape, generator=generator)
    return example.flatten()[index]

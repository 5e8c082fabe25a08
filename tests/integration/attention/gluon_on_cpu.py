"""Plays Gluon on CPU tensors, which has no interpreter of its own: memory, products, arithmetic.

Products happen as late as they may: they read their operands when they are waited for. So a kernel that waits
too little, or that writes a buffer too early, is found. Layouts do not exist here. ``roles_on_cpu.py`` adds
roles, barriers and the copy engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.language import constexpr

from gapless.attention import hopper_kernel, hopper_producer, hopper_tiles


class Pointer:
    def __init__(self, elements: Tensor, offset: Any = 0) -> None:
        self.elements, self.offset = elements, offset
        self.dtype = SimpleNamespace(element_ty=elements.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.elements, self.offset + offset)

    def read(self, shape: tuple[int, ...], mask: Any, other: float) -> Tensor:
        offset = torch.as_tensor(self.offset).expand(shape)
        is_read = torch.ones(shape, dtype=torch.bool) if mask is None else torch.as_tensor(mask).expand(shape)
        inside = (offset >= 0) & (offset < self.elements.numel())
        assert inside[is_read].all(), "read outside of a tensor"
        other_value = torch.tensor(other, dtype=self.elements.dtype)
        return torch.where(is_read, self.elements[torch.where(is_read, offset, 0)], other_value)


class Buffer:
    """Shared memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.dtype = tensor, tensor.dtype

    def index(self, stage: int) -> Buffer:
        assert 0 <= stage < self.tensor.shape[0]
        return Buffer(self.tensor[stage])

    def permute(self, order: tuple[int, int]) -> Buffer:
        return Buffer(self.tensor.permute(order))

    def store(self, value: Tensor) -> None:
        self.tensor.copy_(value)

    def load(self, layout: None) -> Tensor:
        return self.tensor.clone()


class Product:
    def __init__(self, run: Callable[[], Tensor]) -> None:
        self.run = run
        self.result: Tensor | None = None


class Machine:
    """One program at a time: ``_program`` is its place in the grid, ``_flying`` are products in flight."""

    _program: tuple[int, ...]
    _flying: deque[Product]

    modules: tuple[ModuleType, ...] = (hopper_tiles, hopper_producer, hopper_kernel)

    def __init__(self, *grid: int) -> None:
        self._grid = grid
        modules: dict[str, Any] = {}
        for module in self.modules:
            modules |= vars(module)
        self._globals = modules | self._builtins()
        for name, value in modules.items():
            if hasattr(value, "is_gluon"):
                code = value.fn
                self._globals[name] = FunctionType(code.__code__, self._globals, name, code.__defaults__)
            elif isinstance(value, constexpr):
                self._globals[name] = value.value

    def _builtins(self) -> dict[str, Any]:
        return {
            "gl": self._language(),
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._wait_for_products,
        }

    def function(self, name: str) -> Callable[..., None]:
        return self._globals[name]

    def _multiply(self, a: Any, b: Buffer, acc: Tensor, *, use_acc: bool = True, is_async: bool) -> Product:
        assert is_async

        def run() -> Tensor:
            left = a.tensor if isinstance(a, Buffer) else a
            return left.float() @ b.tensor.float() + (acc if use_acc else 0.0)

        self._flying.append(Product(run))
        return self._flying[-1]

    def _wait_for_products(self, num_outstanding: int, deps: list[Product]) -> Tensor:
        while len(self._flying) > num_outstanding:
            flying = self._flying.popleft()
            flying.result = flying.run()
        assert deps[0].result is not None, "used before it is waited for"
        return deps[0].result

    def _language(self) -> SimpleNamespace:
        def plain(value: Any) -> Any:
            return torch.as_tensor(value)

        def load(pointer: Pointer, mask: Any = None, other: int = 0) -> Any:
            read = pointer.read(tuple(torch.as_tensor(pointer.offset).shape), mask, other)
            return read if read.ndim else read.item()

        def store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
            is_written = mask.expand(value.shape)
            pointer.elements[pointer.offset.expand(value.shape)[is_written]] = value[is_written]

        def no_layout(*args: Any) -> SimpleNamespace:
            return SimpleNamespace()

        names = (
            "BlockedLayout",
            "SliceLayout",
            "NVMMADistributedLayout",
            "DotOperandLayout",
            "NVMMASharedLayout",
        )
        return SimpleNamespace(
            **dict.fromkeys(names, no_layout),
            int32=torch.int32,
            int64=torch.int64,
            float32=torch.float32,
            load=load,
            store=store,
            program_id=lambda axis: self._program[axis],
            num_programs=lambda axis: self._grid[axis],
            arange=lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),  # wraps as there
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            allocate_shared_memory=lambda dtype, shape, layout: Buffer(
                torch.full(shape, float("nan"), dtype=dtype)
            ),
            sum=lambda value, axis: value.sum(axis) if value.ndim > 1 else int(value.sum()),
            max=lambda value, axis: value.amax(axis),
            minimum=min,
            maximum=torch.maximum,
            where=lambda condition, a, b: torch.where(condition, plain(a), plain(b)),
            exp2=torch.exp2,
            cdiv=lambda a, b: -(-a // b),
            static_range=range,
            convert_layout=lambda value, layout: value,
            thread_barrier=lambda: None,
        )

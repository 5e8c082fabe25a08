"""Runs the Gluon kernel for Hopper as Python on CPU tensors; Gluon has no interpreter of its own.

Copies and products happen as late as they may: a copy fills its buffer with NaN when it is started and with
data when its group is waited for; a product reads its operands when it is waited for. So a kernel that waits
too little, or that writes a buffer too early, gives NaN. Layouts, barriers and warps do not exist here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import product
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.language import constexpr

from gapless.attention import hopper_kernels, hopper_tiles
from ragged_batches import RaggedBatch


def run_kernel(
    batch: RaggedBatch,
    *,
    scale: float,
    rows: int,
    block_n: int,
    num_stages: int,
    num_programs: int | None = None,
) -> None:
    """Writes ``batch.out``. ``rows`` of a tile of queries; ``num_programs`` for each pack of heads."""
    metadata = batch.metadata
    num_tokens, num_heads, head_size = batch.query.shape
    group = num_heads // batch.k_cache.shape[2]
    pack = min(group & -group, rows)
    num_reqs = metadata.seq_lens.shape[0]
    tensors = (batch.query, batch.k_cache, batch.v_cache, batch.out)
    table = metadata.block_table
    pointers = [Pointer(t.view(-1)) for t in (*tensors, metadata.query_start_loc, metadata.seq_lens, table)]
    machine = Machine(num_heads // pack, num_programs or -(-num_tokens // (rows // pack)) + min(num_reqs, 16))
    for _ in machine.programs():
        machine.function("hopper_prefill_kernel")(
            *pointers,
            num_reqs,
            num_tokens,
            scale,
            *batch.query.stride()[:2],
            *batch.out.stride()[:2],
            batch.k_cache.stride(2),
            *table.stride(),
            HEAD_SIZE=head_size,
            GROUP=group,
            PACK=pack,
            BLOCK_SIZE=batch.k_cache.shape[1],
            CACHE_STRIDE_S=batch.k_cache.stride(1),
            BLOCK_Q=rows // pack,
            BLOCK_N=block_n,
            STAGES=num_stages,
            WARPS=4,
            EARLY=False,
        )


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
    def __init__(self, run: Callable[[], Tensor] | None = None, result: Tensor | None = None) -> None:
        self.run, self.result = run, result


class Machine:
    """One program at a time."""

    modules: tuple[ModuleType, ...] = (hopper_tiles, hopper_kernels)

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
            "async_copy": SimpleNamespace(
                async_copy_global_to_shared=self._copy,
                commit_group=self._commit_group,
                wait_group=self._wait_for_groups,
            ),
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._wait_for_products,
            "warpgroup_mma_init": lambda value: Product(result=value),
        }

    def programs(self) -> Iterator[None]:
        for program in product(*map(range, self._grid)):
            self._program = program
            self._groups: deque[list[tuple[Tensor, Tensor]]] = deque()
            self._flying: deque[Product] = deque()
            self._copies: list[tuple[Tensor, Tensor]] = []
            yield
            assert not self._flying, "a product is never waited for"

    def function(self, name: str) -> Callable[..., None]:
        return self._globals[name]

    def _commit_group(self) -> None:
        self._groups.append(self._copies)
        self._copies = []

    def _copy(self, buffer: Buffer, pointer: Pointer, mask: Any = None) -> None:
        data = pointer.read(tuple(buffer.tensor.shape), mask, 0.0)
        buffer.tensor.fill_(float("nan"))
        self._copies.append((buffer.tensor, data))

    def _wait_for_groups(self, num_outstanding: int) -> None:
        while len(self._groups) > num_outstanding:
            for tensor, data in self._groups.popleft():
                tensor.copy_(data)

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
            assert flying.run is not None
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

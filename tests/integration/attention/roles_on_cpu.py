"""Runs the Gluon kernel for Hopper on the CPU: every role is a thread, barriers hold it up.

As in ``gluon_on_cpu.py`` what is asynchronous happens as late as it may: a copy fills its place with NaN when
it starts and with data when somebody waits for its barrier. Barriers are as the hardware's: they know the
parity of their phase and nothing more. Roles that wait for each other forever are an error after ``PATIENCE``
seconds, and so is a barrier on which somebody arrives too often.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from gluon_on_cpu import Buffer, Machine, Pointer, Product
from torch import Tensor

from gapless.attention.hopper_prefill import kernel_constants
from gapless.attention.tile_rules import HOPPER_CONSUMER_ROWS, hopper_tile
from ragged_batches import RaggedBatch

PATIENCE = 60.0


def run_kernel(
    batch: RaggedBatch,
    *,
    scale: float,
    num_programs: int | None = None,
    consumers: int = 2,
    block_n: int = 128,
    stages: int = 2,
) -> None:
    """Writes ``batch.out``. ``num_programs`` for each pack of heads."""
    metadata = batch.metadata
    num_tokens, num_heads, head_size = batch.query.shape
    group, block_size = num_heads // batch.k_cache.shape[2], batch.k_cache.shape[1]
    tile = hopper_tile(
        num_heads=num_heads,
        group=group,
        head_size=head_size,
        itemsize=2,
        num_tokens=4096,
        block_size=block_size,
        window=0,
    )
    assert tile is not None
    block_q = HOPPER_CONSUMER_ROWS * consumers // tile.pack
    tile = replace(tile, block_q=block_q, block_n=block_n, num_stages=stages)
    constants = dict(kernel_constants(tile, group, head_size, block_size, torch.device("cpu")))
    del constants["num_warps"]
    num_reqs, table = metadata.seq_lens.shape[0], metadata.block_table
    query, out, *lookups = (
        Pointer(t.view(-1))
        for t in (batch.query, batch.out, metadata.query_start_loc, metadata.seq_lens, table)
    )
    caches = [
        Descriptor(cache.flatten(2).flatten(0, 1), constants["PAGE_ROWS"])
        for cache in (batch.k_cache, batch.v_cache)
    ]
    most_programs = -(-num_tokens // tile.block_q) + min(num_reqs, 16)
    machine = RoleMachine(num_heads // tile.pack, num_programs or most_programs)
    for _ in machine.programs():
        machine.function("hopper_prefill_kernel")(
            query,
            *caches,
            out,
            *lookups,
            num_reqs,
            num_tokens,
            scale,
            *batch.query.stride()[:2],
            *batch.out.stride()[:2],
            batch.k_cache.stride(2),
            *table.stride(),
            **constants,
        )


class Descriptor:
    """A cache as the copy engine sees it: rows outside of it are zeros."""

    def __init__(self, rows_SC: Tensor, box_rows: int) -> None:
        self.rows_SC, self.box_rows = rows_SC, box_rows

    def read(self, row: int, column: int) -> Tensor:
        assert column >= 0
        assert column + 64 <= self.rows_SC.shape[1]
        box = torch.zeros(self.box_rows, 64, dtype=self.rows_SC.dtype)
        if 0 <= row < self.rows_SC.shape[0]:
            assert row % self.box_rows == 0
            box.copy_(self.rows_SC[row : row + self.box_rows, column : column + 64])
        else:
            assert row + self.box_rows <= 0
        return box


class Barrier:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = self.missing_bytes = self.num_phases = 0
        self.copies: list[tuple[Tensor, Tensor, int]] = []

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def arrive(self, count: int, num_bytes: int = 0) -> None:
        with self.changed:
            assert 0 < count <= self.missing, "more arrivals than the barrier was made for"
            self.missing -= count
            self.missing_bytes += num_bytes
            self._end_phase()

    def copy(self, target: Tensor, data: Tensor, num_bytes: int) -> None:
        with self.changed:
            target.fill_(torch.nan)
            self.copies.append((target, data, num_bytes))
            self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            while self.num_phases & 1 == parity:
                before = self.num_phases
                self._deliver()
                if self.num_phases == before and not self.changed.wait(PATIENCE):
                    raise TimeoutError("a role waits for a barrier that nobody completes")

    def _deliver(self) -> None:
        for target, data, num_bytes in self.copies:
            target.copy_(data)
            self.missing_bytes -= num_bytes
        self.copies = []
        self._end_phase()

    def _end_phase(self) -> None:
        if self.missing == 0 and self.missing_bytes == 0:
            self.num_phases += 1
            self.missing = self.count
        self.changed.notify_all()


class Pieces:
    """A tile as the copy engine writes it: panels of 64 columns, each in pieces of a page's rows."""

    def __init__(self, tensor_ND: Tensor, page_rows: int) -> None:
        num_keys, head_size = tensor_ND.shape
        self._pieces = tensor_ND.view(num_keys // page_rows, page_rows, head_size // 64, 64)

    def index(self, piece: int) -> Buffer:
        panel, page = divmod(piece, self._pieces.shape[0])
        return Buffer(self._pieces[page, :, panel])


class RoleBuffer(Buffer):
    def index(self, stage: int) -> RoleBuffer:
        return RoleBuffer(super().index(stage).tensor)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: None) -> Pieces:
        assert shape[0] * shape[1] * shape[2] == self.tensor.numel()
        return Pieces(self.tensor, shape[1])


class RoleMachine(Machine):
    def programs(self) -> Iterator[None]:
        for program in product(*map(range, self._grid)):
            self._program = program
            self._own = threading.local()
            yield

    @property
    def _flying(self) -> deque[Product]:  # type: ignore[override]
        """What a role has in flight is its own."""
        if not hasattr(self._own, "flying"):
            self._own.flying = deque()
        return self._own.flying

    def _builtins(self) -> dict[str, Any]:
        return super()._builtins() | {
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: None,
                init=lambda barrier, count: barrier.init(count),
                wait=lambda barrier, phase: barrier.wait(phase),
                arrive=lambda barrier, count: barrier.arrive(count),
                expect=lambda barrier, num_bytes: barrier.arrive(1, num_bytes),
            ),
            "tma": SimpleNamespace(async_copy_global_to_shared=self._copy_box),
            "fence_async_shared": lambda: None,
        }

    def _language(self) -> SimpleNamespace:
        language = super()._language()
        language.int64 = torch.int64
        language.allocate_shared_memory = allocate
        language.warp_specialize = self._run_roles
        language.constexpr = int
        where = language.where
        language.where = lambda condition, a, b: (
            (a if condition else b) if isinstance(condition, bool) else where(condition, a, b)
        )
        language.maximum = lambda a, b: max(a, b) if isinstance(a, int) else torch.maximum(a, b)
        return language

    def _copy_box(self, box: Descriptor, place: list[int], barrier: Barrier, result: Buffer) -> None:
        data = box.read(*place)
        # Bytes of the kernel's own type: the CPU runs it in fp32.
        barrier.copy(result.tensor, data, data.numel() * 2)

    def _run_roles(self, roles: list[Any], num_warps: list[int], num_registers: list[int]) -> None:
        assert len(roles) == len(num_warps) + 1 == len(num_registers) + 1
        failures: list[BaseException] = []

        def run(function: Any, arguments: Any) -> None:
            try:
                function(*arguments)
                assert not self._flying, "a product is never waited for"
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=role, daemon=True) for role in roles]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not failures:
            for thread in threads:
                thread.join(0.01)
        if failures:
            raise failures[0]


def allocate(dtype: torch.dtype, shape: list[int], layout: None) -> Any:
    if dtype != torch.int64:
        return RoleBuffer(torch.full(shape, torch.nan, dtype=dtype))
    if shape == [1]:
        return Barrier()
    barriers = [Barrier() for _ in range(shape[0])]
    return SimpleNamespace(index=lambda stage: barriers[stage])

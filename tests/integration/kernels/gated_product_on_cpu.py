"""Runs the gated product's Gluon kernel as Python on CPU tensors; Gluon has no interpreter of its own.

The three groups of warps are threads, of which one runs at a time; who is next, at every wait and every
arrival, is drawn at random. Copies and products happen as late as they may: a copy fills its buffer with NaN
when it is started and with data when its barrier completes, a product reads its operands when it is waited
for, a store to memory reads its buffer when that is waited for. So a kernel that waits too little or fills a
buffer too early gives NaN or other numbers, one whose waits never end is reported, and so is a barrier that
is given more arrivals than it expects. Layouts and registers do not exist here; where the compiler would not
do what Python does (``loop_bounds.py``), nothing runs.
"""

from __future__ import annotations

import functools
import inspect
import random
import threading
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gapless.kernels import gated_product_jit
from gapless.kernels.linear_tiles import GatedTiles
from loop_bounds import frozen_bounds


def run_kernel(
    x_TI: Tensor, weight_OI: Tensor, out_TO: Tensor, tiles: GatedTiles, *, num_programs: int, seed: int = 0
) -> None:
    """Writes ``out_TO``."""
    num_tokens, num_out = out_TO.shape
    for program in range(num_programs):
        activations = Descriptor(x_TI, (tiles.block_t, tiles.block_i))
        machine = Machine(program, num_programs, activations, random.Random(seed + program))
        machine.functions["gated_product_kernel"](
            activations,
            Descriptor(weight_OI, (tiles.block_o, tiles.block_i)),
            Descriptor(out_TO, (tiles.block_t // 2, tiles.block_o)),
            num_tokens,
            num_out,
            NUM_IN=x_TI.shape[1],
            SHARED_BY=tiles.shared_by,
            STAGES=tiles.num_stages,
            SKEW=tiles.skew,
            EARLY=True,
        )
        assert machine.has_waited, "results of the kernel ahead are read without a wait"


@functools.cache
def _frozen_bounds() -> list[str]:
    return frozen_bounds(inspect.getsource(gated_product_jit))


class Descriptor:
    """A tensor in memory. Outside of it are zeros, and what is written there is lost."""

    layout = None

    def __init__(self, tensor: Tensor, block_shape: tuple[int, int]) -> None:
        self.tensor, self.block_shape, self.dtype = tensor, block_shape, tensor.dtype

    def _inside(self, coord: list[int]) -> tuple[slice, slice]:
        assert all(first >= 0 for first in coord)
        first, second = (slice(c, c + size) for c, size in zip(coord, self.block_shape, strict=True))
        return first, second

    def read(self, coord: list[int]) -> Tensor:
        block = torch.zeros(self.block_shape, dtype=self.dtype)
        inside = self.tensor[self._inside(coord)]
        block[: inside.shape[0], : inside.shape[1]] = inside
        return block

    def write(self, coord: list[int], block: Tensor) -> None:
        inside = self.tensor[self._inside(coord)]
        inside.copy_(block[: inside.shape[0], : inside.shape[1]])


class Buffer:
    """Shared memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.dtype, self.shape = tensor, tensor.dtype, tuple(tensor.shape)

    def index(self, index: int) -> Buffer:
        assert 0 <= index < self.shape[0]
        return Buffer(self.tensor[index])

    def slice(self, start: int, length: int) -> Buffer:
        return Buffer(self.tensor[start : start + length])

    def permute(self, order: list[int]) -> Buffer:
        return Buffer(self.tensor.permute(order))

    def store(self, value: Tensor) -> None:
        self.tensor.copy_(value)


class Barrier:
    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0
        self.copies: list[tuple[Tensor, Tensor]] = []

    def change(self, *, arrivals: int = 0, num_bytes: int = 0) -> None:
        self.pending -= arrivals
        self.bytes += num_bytes
        assert self.count > 0, "used before it is initialised"
        assert self.pending >= 0, "more arrivals than it expects"
        if self.pending == 0 and self.bytes == 0:
            for buffer, data in self.copies:
                buffer.copy_(data)
            self.copies, self.pending = [], self.count
            self.phase ^= 1


class Barriers:
    def __init__(self, num: int) -> None:
        self.shape = (num, 1)
        self._barriers = [Barrier() for _ in range(num)]

    def index(self, index: int) -> Barrier:
        assert 0 <= index < self.shape[0]
        return self._barriers[index]


class Product:
    def __init__(self, run: Callable[[], Tensor]) -> None:
        self.run = run
        self.is_done = False
        self.result: Tensor | None = None


class Sum:
    """What a wait gives: the numbers are there once the product is done, which a later wait may see to."""

    def __init__(self, product: Product) -> None:
        self.product = product


class Machine:
    """One program."""

    def __init__(
        self, program: int, num_programs: int, activations: Descriptor, order: random.Random
    ) -> None:
        self.has_waited, self._activations = False, activations
        self._program, self._num_programs, self._order = program, num_programs, order
        self._turn = threading.Condition()
        self._running: int | None = None
        self._ready: dict[int, Callable[[], bool]] = {}
        self._error: BaseException | None = None
        self._local = threading.local()
        self._begin_group()
        assert not _frozen_bounds(), f"the compiler never updates {_frozen_bounds()}"
        module = vars(gated_product_jit)
        self.functions: dict[str, Any] = module | {
            "gl": self._language(),
            "tl": SimpleNamespace(
                extra=SimpleNamespace(
                    cuda=SimpleNamespace(gdc_launch_dependents=lambda: None, gdc_wait=self._wait_for_ahead)
                )
            ),
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: "barriers",
                init=self._init,
                expect=self._expect,
                arrive=self._arrive,
                wait=self._wait,
            ),
            "tma": SimpleNamespace(
                async_copy_global_to_shared=self._bring,
                async_copy_shared_to_global=self._send,
                store_wait=self._wait_for_stores,
            ),
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._wait_for_products,
            "fence_async_shared": self._fence,
        }
        for name, value in module.items():
            if hasattr(value, "is_gluon"):
                code = value.fn
                made = FunctionType(code.__code__, self.functions, name, code.__defaults__)
                self.functions[name] = made
        self.functions["rounded"] = lambda value, dtype: value.to(dtype).float()

    def _begin_group(self) -> None:
        self._local.flying, self._local.stores, self._local.is_fenced = [], [], False

    def _specialize(self, parts: list[Any], num_warps: list[int], num_registers: list[int]) -> None:
        assert len(num_warps) == len(num_registers) == len(parts) - 1
        threads = [
            threading.Thread(target=self._run, args=(index, *part), daemon=True)
            for index, part in enumerate(parts)
        ]
        self._ready = {index: lambda: True for index in range(len(parts))}
        for thread in threads:
            thread.start()
        with self._turn:
            self._choose()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, index: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._local.index = index
        self._begin_group()
        with self._turn:
            try:
                self._turn.wait_for(lambda: self._running == index or self._error)
                if self._error is None:
                    function(*args)
                    assert not self._local.stores, "ends before its stores have read their buffers"
                    assert not self._local.flying, "a product is never waited for"
            except BaseException as error:
                self._error = self._error or error
            self._ready.pop(index, None)
            self._choose()

    def _choose(self) -> None:
        able = [index for index, is_ready in self._ready.items() if is_ready()]
        if self._ready and not able and self._error is None:
            self._error = AssertionError("every group waits for another")
        self._running = self._order.choice(able) if able else None
        self._turn.notify_all()

    def _pause(self, is_ready: Callable[[], bool] = lambda: True) -> None:
        """Lets any group go on, this one as soon as it is ready."""
        index = getattr(self._local, "index", None)
        if index is None:  # before the groups part
            return
        self._ready[index] = is_ready
        self._choose()
        self._turn.wait_for(lambda: self._running == index or self._error)
        if self._error is not None:
            raise AssertionError("another group has failed") from self._error

    def _wait_for_ahead(self) -> None:
        self.has_waited = True

    def _init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count

    def _expect(self, barrier: Barrier, num_bytes: int, pred: bool = True) -> None:
        if pred:
            # The bytes first: they belong to the phase that the arrival may end.
            barrier.bytes += num_bytes
            barrier.change(arrivals=1)
            self._pause()

    def _arrive(self, barrier: Barrier) -> None:
        barrier.change(arrivals=1)
        self._pause()

    def _wait(self, barrier: Barrier, phase: int) -> None:
        self._pause(lambda: barrier.phase != phase)

    def _bring(
        self, source: Descriptor, coord: list[int], barrier: Barrier, buffer: Buffer, pred: bool = True
    ) -> None:
        if not pred:
            return
        assert self.has_waited or source is not self._activations, "activations are read too early"
        data = source.read(coord)
        assert buffer.shape == data.shape
        buffer.tensor.fill_(float("nan"))
        barrier.copies.append((buffer.tensor, data))
        barrier.change(num_bytes=-data.numel() * data.element_size())
        self._pause()

    def _send(self, target: Descriptor, coord: list[int], buffer: Buffer) -> None:
        assert self._local.is_fenced, "the copy engine may not see what was stored"
        self._local.is_fenced = False
        self._local.stores.append((target, coord, buffer))

    def _fence(self) -> None:
        self._local.is_fenced = True

    def _wait_for_stores(self, num_outstanding: int) -> None:
        while len(self._local.stores) > num_outstanding:
            target, coord, buffer = self._local.stores.pop(0)
            target.write(coord, buffer.tensor)
        self._pause()

    def _multiply(
        self, a: Buffer, b: Buffer, acc: Tensor | Sum, *, use_acc: bool = True, is_async: bool
    ) -> Product:
        assert is_async

        def run() -> Tensor:
            before = acc.product.result if isinstance(acc, Sum) else acc
            assert before is not None
            return a.tensor.float() @ b.tensor.float() + (before if use_acc else 0.0)

        self._local.flying.append(Product(run))
        self._pause()
        return self._local.flying[-1]

    def _wait_for_products(self, num_outstanding: int, deps: list[Product | Sum]) -> Any:
        while len(self._local.flying) > num_outstanding:
            product = self._local.flying.pop(0)
            product.result = product.run()
        self._pause()
        product = deps[0].product if isinstance(deps[0], Sum) else deps[0]
        return Sum(product) if num_outstanding else product.result

    def _language(self) -> SimpleNamespace:
        def no_layout(*args: Any) -> None:
            return None

        def allocate(dtype: torch.dtype, shape: list[int], layout: object) -> Buffer | Barriers:
            if layout == "barriers":
                return Barriers(shape[0])
            return Buffer(torch.full(shape, float("nan"), dtype=dtype))

        def program_id(axis: int) -> int:
            return self._program

        return SimpleNamespace(
            NVMMADistributedLayout=no_layout,
            int64=torch.int64,
            float32=torch.float32,
            allocate_shared_memory=allocate,
            program_id=program_id,
            num_programs=lambda axis: self._num_programs,
            warp_specialize=self._specialize,
            zeros=lambda shape, dtype, layout: torch.full(shape, float("nan"), dtype=dtype),  # not used
            reshape=torch.reshape,
            permute=torch.permute,
            split=lambda value: value.unbind(-1),
            exp=torch.exp,
            minimum=min,
            where=lambda condition, value, other: value if condition else other,
            cdiv=lambda a, b: -(-a // b),
            static_range=range,
        )

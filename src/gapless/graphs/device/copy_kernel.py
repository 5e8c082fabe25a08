"""A kernel that copies between pinned host memory and the device, for the few kilobytes of a step.

A copy engine is another engine than the one that runs kernels: between two steps of 32 requests an H200
waited 21 us for tokens on their way out and inputs on their way in, though copying takes 4 (*lead*,
``docs/log.md``).
A kernel reads and writes pinned memory itself. It is PTX for the reasons that ``fill_kernel.py`` has.

``SmallCopy`` holds a launch with its arguments: what changes from copy to copy is written into the objects it
was made of, so that a launch is one call.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int, c_size_t, c_void_p
from typing import Any

import torch

from gapless.graphs.device.driver import load_driver

MAX_BYTES = 4 << 10
"""Above, copy engines are quicker (*lead*): they ask for more at a time."""
WORD = 8
"""Bytes that a thread copies at once: those of a token."""

_BLOCK = 256
_MAX_THREADS = 0
_FUNCTIONS = ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncGetAttribute", "cuLaunchKernel")

NAME = b"gapless_copy"
PTX = b"""\
.version 6.0
.target sm_50
.address_size 64

.visible .entry gapless_copy(
    .param .u64 p_dst,
    .param .u64 p_src,
    .param .u64 p_size
)
{
    .reg .pred %done;
    .reg .b32 %block, %blocks, %thread, %threads, %index, %count, %a, %b;
    .reg .b64 %dst, %src, %size, %offset, %step, %last, %to, %from;

    ld.param.u64 %dst, [p_dst];
    ld.param.u64 %src, [p_src];
    ld.param.u64 %size, [p_size];

    mov.u32 %block, %ctaid.x;
    mov.u32 %blocks, %nctaid.x;
    mov.u32 %thread, %tid.x;
    mov.u32 %threads, %ntid.x;
    mad.lo.u32 %index, %block, %threads, %thread;
    mul.lo.u32 %count, %blocks, %threads;
    mul.wide.u32 %step, %count, 8;
    mul.wide.u32 %offset, %index, 8;
    and.b64 %last, %size, -8;

WORD:
    setp.ge.u64 %done, %offset, %last;
    @%done bra BEHIND;
    add.u64 %from, %src, %offset;
    add.u64 %to, %dst, %offset;
    ld.global.v2.u32 {%a, %b}, [%from];
    st.global.v2.u32 [%to], {%a, %b};
    add.u64 %offset, %offset, %step;
    bra WORD;

BEHIND:
    cvt.u64.u32 %offset, %index;
    add.u64 %offset, %offset, %last;
    setp.ge.u64 %done, %offset, %size;
    @%done bra END;
    add.u64 %from, %src, %offset;
    add.u64 %to, %dst, %offset;
    ld.global.u8 %a, [%from];
    st.global.u8 [%to], %a;

END:
    ret;
}
"""


class CopyKernel:
    """The kernel on one device. Made by ``load_copy_kernel``."""

    def __init__(self, driver: Any, function: int) -> None:
        self.launch = driver.cuLaunchKernel
        self.function = c_void_p(function)


class SmallCopy:
    """Copies of ``size`` bytes from ``source`` to ``target`` as these objects say when it is called."""

    __slots__ = ("_args", "_block", "_function", "_grids", "_launch", "_one", "_sources", "_zero")

    def __init__(self, kernel: CopyKernel, target: c_void_p, source: c_void_p, size: c_size_t) -> None:
        self._sources = (target, source, size)  # whose addresses are the arguments
        self._args = (c_void_p * 3)(*map(ctypes.addressof, self._sources))
        self._launch, self._function = kernel.launch, kernel.function
        most = -(-MAX_BYTES // (WORD * _BLOCK))
        self._grids = [c_int(blocks) for blocks in range(most + 1)]
        self._one, self._zero, self._block = c_int(1), c_int(0), c_int(_BLOCK)

    def __call__(self, num_bytes: int, stream: c_void_p) -> int:
        """Queue a copy of ``num_bytes``, which ``size`` says too, on ``stream``. Returns the driver's error,
        0 for none; with an error nothing was queued."""
        one, zero = self._one, self._zero
        grid = self._grids[-(-num_bytes // (WORD * _BLOCK)) or 1]
        return self._launch(
            self._function, grid, one, one, self._block, one, one, zero, stream, self._args, None
        )


def can_copy(num_bytes: int, *addresses: int) -> bool:
    """Whether the kernel takes a copy between ``addresses``."""
    return num_bytes <= MAX_BYTES and not any(address % WORD for address in addresses)


@functools.cache
def load_copy_kernel(torch_device: torch.device) -> CopyKernel | None:
    """None where the driver cannot load it; copy engines serve then. Loaded once per device and never
    unloaded."""
    driver = load_driver(_FUNCTIONS)
    if driver is None:
        return None
    module, function, max_threads = c_void_p(), c_void_p(), c_int()
    with torch.cuda.device(torch_device):
        torch.cuda.current_stream().query()  # a context is current from here on
        failed = (
            driver.cuModuleLoadData(ctypes.byref(module), PTX)
            or driver.cuModuleGetFunction(ctypes.byref(function), module, NAME)
            # A driver that loads lazily compiles it now, where a failure does no harm.
            or driver.cuFuncGetAttribute(ctypes.byref(max_threads), _MAX_THREADS, function)
        )
    if failed or not function.value or max_threads.value < _BLOCK:
        return None
    return CopyKernel(driver, function.value)

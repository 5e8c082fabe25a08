"""Two Gluon kernels with roles for ``benchmarks/sanitize.py``: what compute-sanitizer's racecheck makes of
them tells what its word on our kernels with roles is worth.

``hand_over_kernel`` has roles and no shared memory of its own: a race that is reported there is one of
Triton's hand-over to the roles. In ``racing_kernel`` one role writes what the other reads and nothing orders
them: a tool that does not report that sees nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WARPS = gl.constexpr(4)
ROLE = gl.constexpr(128)
"""Threads of a role, and elements that each role writes."""

# mypy: allow-untyped-defs


@gluon.jit
def hand_over_kernel(out_TR):
    """``out_TR`` [2 * programs, 128] int32: the default role's rows become 1, the other's 2."""
    row = gl.program_id(0) * 2
    gl.warp_specialize([(write_row, (out_TR, row, 1)), (write_row, (out_TR, row + 1, 2))], [WARPS], [64])


@gluon.jit
def racing_kernel(out_TR):
    """``out_TR`` [programs, 128] int64: what a role finds in shared memory while the other writes there: 1
    before and 2 after."""
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    shared = gl.allocate_shared_memory(gl.int64, [ROLE], SHARED)
    shared.store(gl.full([ROLE], 1, gl.int64, LAYOUT))
    gl.thread_barrier()
    gl.warp_specialize([(write_shared, (shared,)), (read_shared, (shared, out_TR))], [WARPS], [64])


@gluon.jit
def write_row(out_TR, row, VALUE: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    column = gl.arange(0, ROLE, LAYOUT)
    gl.store(out_TR + row * ROLE + column, gl.full([ROLE], VALUE, gl.int32, LAYOUT))


@gluon.jit
def write_shared(shared):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    shared.store(gl.full([ROLE], 2, gl.int64, LAYOUT))


@gluon.jit
def read_shared(shared, out_TR):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    column = gl.arange(0, ROLE, LAYOUT)
    gl.store(out_TR + gl.program_id(0) * ROLE + column, shared.load(LAYOUT))

"""The gated product of many tokens, for Hopper, in Gluon: ``silu(x @ gate.T) * (x @ up.T)`` in one kernel.

A program takes one tile of tokens and output features after another. One warp brings activations and weights
into a ring of buffers (the tensor memory engine); two groups of warps multiply, each half of the tokens, and
end with the activation: gate and up never leave the registers. A buffer of weights holds ``BLOCK_O`` rows of
gate and the same rows of up below them, so that one instruction multiplies both.

The groups share the ring and do not wait for each other: while one computes its activation the other has the
tensor cores to itself. ``SKEW``: so many steps after the first group the second begins; with 0 both would end
every tile at once. Sums are float32 and no two programs share one: a token's results depend on its own data
alone. A third group would leave each too few registers, of which the assembler gives all groups the same.

Weights are constant, so those of the first steps are under way before ``gdc_wait``. What lies outside of a
tensor is read as zeros and never written. Invariant: a buffer is filled again only after both groups
have said that their products of it are done. There is no interpreter for Gluon:
``tests/integration/kernels/gated_product_on_cpu.py`` plays one.

``T`` tokens, ``I`` input features, ``O`` output features, ``S`` buffers of the ring.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# mypy: allow-untyped-defs


@gluon.jit(do_not_specialize=["num_tokens"])
def gated_product_kernel(
    x_TI,
    weight_OI,
    out_TO,
    num_tokens,
    num_out,
    NUM_IN: gl.constexpr,
    SHARED_BY: gl.constexpr,
    STAGES: gl.constexpr,
    SKEW: gl.constexpr,
    EARLY: gl.constexpr,
):
    """No more programs than tiles, of 4 warps (the compiler adds the others).

    The tensors are descriptors, with blocks ``[BLOCK_T, BLOCK_I]``, ``[BLOCK_O, BLOCK_I]`` and
    ``[BLOCK_T / 2, BLOCK_O]``. ``SHARED_BY`` tiles of tokens in a row take the same weights. A tile has
    ``STAGES`` steps or more; ``SKEW`` is less than ``STAGES``.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    BLOCK_T: gl.constexpr = x_TI.block_shape[0]
    BLOCK_I: gl.constexpr = x_TI.block_shape[1]
    BLOCK_O: gl.constexpr = weight_OI.block_shape[0]
    x_STI = gl.allocate_shared_memory(x_TI.dtype, [STAGES, BLOCK_T, BLOCK_I], x_TI.layout)
    weight_SOI = gl.allocate_shared_memory(x_TI.dtype, [STAGES, 2 * BLOCK_O, BLOCK_I], weight_OI.layout)
    out_2TO = gl.allocate_shared_memory(x_TI.dtype, [2, BLOCK_T // 2, BLOCK_O], out_TO.layout)
    full_S = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free_2S = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_S.index(stage), count=1)
    for stage in gl.static_range(2 * STAGES):
        mbarrier.init(free_2S.index(stage), count=1)
    fence_async_shared()
    ring = (x_STI, weight_SOI, full_S, free_2S)
    sizes = (num_tokens, num_out)
    UPPER: gl.constexpr = 0
    LOWER: gl.constexpr = 1
    gl.warp_specialize(
        [
            (multiply, (ring, sizes, out_TO, out_2TO, UPPER, NUM_IN, SHARED_BY, SKEW)),
            (multiply, (ring, sizes, out_TO, out_2TO, LOWER, NUM_IN, SHARED_BY, SKEW)),
            (bring, (ring, sizes, x_TI, weight_OI, NUM_IN, SHARED_BY, EARLY)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def bring(
    ring,
    sizes,
    x_TI,
    weight_OI,
    NUM_IN: gl.constexpr,
    SHARED_BY: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Fills the ring, for all tiles of the program."""
    x_STI, weight_SOI, full_S, free_2S = ring
    num_tokens, num_out = sizes
    STAGES: gl.constexpr = full_S.shape[0]
    BLOCK_T: gl.constexpr = x_STI.shape[1]
    BLOCK_I: gl.constexpr = x_STI.shape[2]
    BLOCK_O: gl.constexpr = weight_SOI.shape[1] // 2
    BYTES: gl.constexpr = (BLOCK_T + 2 * BLOCK_O) * BLOCK_I * 2
    num_tiles = gl.cdiv(num_tokens, BLOCK_T) * gl.cdiv(num_out, BLOCK_O)
    program = gl.program_id(0)
    first_t, first_o = place(program, num_tokens, num_out, BLOCK_T, BLOCK_O, SHARED_BY)
    for early in gl.static_range(STAGES):
        full = full_S.index(early)
        mbarrier.expect(full, BYTES)
        bring_weights(weight_OI, weight_SOI.index(early), full, first_o, num_out, early * BLOCK_I)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for early in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            x_TI, [first_t, early * BLOCK_I], full_S.index(early), x_STI.index(early)
        )
    turn = STAGES
    for tile in range(program, num_tiles, gl.num_programs(0)):
        first_t, first_o = place(tile, num_tokens, num_out, BLOCK_T, BLOCK_O, SHARED_BY)
        # Not a variable that is set to 0 after the first tile: what only bounds an inner loop, Triton 3.6
        # takes for dead and never updates (``loop_bounds.py`` of the tests).
        first_column = gl.where(tile == program, STAGES * BLOCK_I, 0)
        for column in range(first_column, NUM_IN, BLOCK_I):
            stage = turn % STAGES
            full = full_S.index(stage)
            mbarrier.wait(free_2S.index(stage), (turn // STAGES + 1) & 1)
            mbarrier.wait(free_2S.index(STAGES + stage), (turn // STAGES + 1) & 1)
            mbarrier.expect(full, BYTES)
            tma.async_copy_global_to_shared(x_TI, [first_t, column], full, x_STI.index(stage))
            bring_weights(weight_OI, weight_SOI.index(stage), full, first_o, num_out, column)
            turn += 1


@gluon.jit
def bring_weights(weight_OI, buffer, full, first_o, num_out, column):
    BLOCK_O: gl.constexpr = buffer.shape[0] // 2
    gate, up = buffer.slice(0, BLOCK_O), buffer.slice(BLOCK_O, BLOCK_O)
    tma.async_copy_global_to_shared(weight_OI, [first_o, column], full, gate)
    tma.async_copy_global_to_shared(weight_OI, [num_out + first_o, column], full, up)


@gluon.jit
def multiply(
    ring,
    sizes,
    out_TO,
    out_2TO,
    HALF: gl.constexpr,
    NUM_IN: gl.constexpr,
    SHARED_BY: gl.constexpr,
    SKEW: gl.constexpr,
):
    """Products and activation of one half of the tokens of every tile of the program."""
    x_STI, weight_SOI, full_S, free_2S = ring
    num_tokens, num_out = sizes
    STAGES: gl.constexpr = full_S.shape[0]
    BLOCK_T: gl.constexpr = x_STI.shape[1]
    BLOCK_I: gl.constexpr = x_STI.shape[2]
    BLOCK_O: gl.constexpr = weight_SOI.shape[1] // 2
    M: gl.constexpr = BLOCK_T // 2
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BLOCK_O, 16])
    dtype: gl.constexpr = out_2TO.dtype
    out = out_2TO.index(HALF)
    num_tiles = gl.cdiv(num_tokens, BLOCK_T) * gl.cdiv(num_out, BLOCK_O)
    program = gl.program_id(0)
    if HALF > 0 and SKEW > 0:
        mbarrier.wait(free_2S.index(SKEW - 1), 0)
    turn = 0
    for tile in range(program, num_tiles, gl.num_programs(0)):
        first_t, first_o = place(tile, num_tokens, num_out, BLOCK_T, BLOCK_O, SHARED_BY)
        stage = turn % STAGES
        mbarrier.wait(full_S.index(stage), turn // STAGES & 1)
        started = warpgroup_mma(
            x_STI.index(stage).slice(HALF * M, M),
            weight_SOI.index(stage).permute([1, 0]),
            gl.zeros([M, 2 * BLOCK_O], gl.float32, SUM),
            use_acc=False,
            is_async=True,
        )
        sum_TO = warpgroup_mma_wait(1, deps=[started])
        for _ in range(BLOCK_I, NUM_IN, BLOCK_I):
            before = stage
            turn += 1
            stage = turn % STAGES
            mbarrier.wait(full_S.index(stage), turn // STAGES & 1)
            started = warpgroup_mma(
                x_STI.index(stage).slice(HALF * M, M),
                weight_SOI.index(stage).permute([1, 0]),
                sum_TO,
                is_async=True,
            )
            sum_TO = warpgroup_mma_wait(1, deps=[started])
            mbarrier.arrive(free_2S.index(HALF * STAGES + before))
        turn += 1
        sum_TO = warpgroup_mma_wait(0, deps=[sum_TO])
        mbarrier.arrive(free_2S.index(HALF * STAGES + stage))
        # Gate and up are rounded first, silu before its product: as in separate steps.
        gate, up = gl.split(gl.permute(gl.reshape(sum_TO, [M, 2, BLOCK_O]), (0, 2, 1)))
        gate = rounded(gate, dtype)
        silu = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
        result = (silu * up.to(dtype).to(gl.float32)).to(dtype)
        tma.store_wait(0)
        out.store(result)
        fence_async_shared()
        tma.async_copy_shared_to_global(out_TO, [first_t + HALF * M, first_o], out)
    tma.store_wait(0)


@gluon.jit
def rounded(value, dtype: gl.constexpr):
    """``value`` as ``dtype`` would hold it. The compiler would take numbers one by one here, and as slowly as
    exponentials."""
    if dtype == gl.bfloat16:
        result = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $1, $3, $2; shl.b32 $0, $1, 16; and.b32 $1, $1, 0xffff0000;",
            "=&r,=&r,r,r",
            [value],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        result = gl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.f16x2.f32 $1, $3, $2; mov.b32 {low, high}, $1;"
            "cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=&r,=&r,r,r",
            [value],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    return result


@gluon.jit
def place(
    tile,
    num_tokens,
    num_out,
    BLOCK_T: gl.constexpr,
    BLOCK_O: gl.constexpr,
    SHARED_BY: gl.constexpr,
):
    """The first token and output feature of a tile: ``SHARED_BY`` tiles of tokens, then the next features."""
    per_band = SHARED_BY * gl.cdiv(num_out, BLOCK_O)
    first = tile // per_band * SHARED_BY
    height = gl.minimum(gl.cdiv(num_tokens, BLOCK_T) - first, SHARED_BY)
    inside = tile % per_band
    return (first + inside % height) * BLOCK_T, inside // height * BLOCK_O

"""A kernel that writes what a memset writes, as text that the driver compiles for the GPU at hand.

It is PTX and not Triton because a node of a graph needs a function and arguments and nothing else, and
because a library of any version loads it. Rows are filled from their first address that is divisible by 16
in words of 16 bytes, what lies before and behind byte by byte. Invariant: every byte of ``height`` rows is
written once and none beside them; which byte of the pattern an address gets depends on the address alone,
so rows must begin where a whole element does (``memset_nodes.py`` sees to that).
"""

from __future__ import annotations

from dataclasses import dataclass

NAME = b"gapless_fill"
BLOCK = 256
"""Threads of a block; at least 16, for the bytes before and behind the words of a row."""
MAX_BLOCKS = 1024
"""Threads take several words each from there on: enough of them to keep the memory of large GPUs busy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fill:
    """Arguments of the kernel: ``height`` rows of ``width`` bytes, ``pitch`` bytes apart, from address
    ``dst``. ``pattern`` is the element, repeated to 4 bytes."""

    dst: int
    pitch: int
    width: int
    height: int
    pattern: int

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of ``BLOCK`` threads: as many as there are words, within ``MAX_BLOCKS``; the kernel loops
        over what is left."""
        columns = min(-(-self.width // (16 * BLOCK)), MAX_BLOCKS)
        return columns, min(self.height, MAX_BLOCKS // columns), 1


PTX = b"""\
.version 6.0
.target sm_50
.address_size 64

.visible .entry gapless_fill(
    .param .u64 p_dst,
    .param .u64 p_pitch,
    .param .u64 p_width,
    .param .u64 p_height,
    .param .u32 p_pattern
)
{
    .reg .pred %done;
    .reg .b32 %pattern, %byte, %shift, %block, %blocks, %thread, %threads, %index, %count;
    .reg .b64 %dst, %pitch, %width, %height, %row, %rows, %start, %end, %first, %last;
    .reg .b64 %at, %offset, %step;

    ld.param.u64 %dst, [p_dst];
    ld.param.u64 %pitch, [p_pitch];
    ld.param.u64 %width, [p_width];
    ld.param.u64 %height, [p_height];
    ld.param.u32 %pattern, [p_pattern];

    mov.u32 %block, %ctaid.x;
    mov.u32 %blocks, %nctaid.x;
    mov.u32 %thread, %tid.x;
    mov.u32 %threads, %ntid.x;
    mad.lo.u32 %index, %block, %threads, %thread;
    mul.lo.u32 %count, %blocks, %threads;
    mul.wide.u32 %step, %count, 16;
    mov.u32 %block, %ctaid.y;
    cvt.u64.u32 %row, %block;
    mov.u32 %blocks, %nctaid.y;
    cvt.u64.u32 %rows, %blocks;

ROW:
    setp.ge.u64 %done, %row, %height;
    @%done bra END;
    mul.lo.u64 %offset, %row, %pitch;
    add.u64 %start, %dst, %offset;
    add.u64 %end, %start, %width;
    add.u64 %first, %start, 15;
    and.b64 %first, %first, -16;
    min.u64 %first, %first, %end;
    and.b64 %last, %end, -16;
    max.u64 %last, %last, %first;
    cvt.u64.u32 %offset, %index;

    add.u64 %at, %start, %offset;
    setp.ge.u64 %done, %at, %first;
    @%done bra BEHIND;
    cvt.u32.u64 %shift, %at;
    and.b32 %shift, %shift, 3;
    shl.b32 %shift, %shift, 3;
    shr.u32 %byte, %pattern, %shift;
    st.global.u8 [%at], %byte;

BEHIND:
    add.u64 %at, %last, %offset;
    setp.ge.u64 %done, %at, %end;
    @%done bra WORDS;
    cvt.u32.u64 %shift, %at;
    and.b32 %shift, %shift, 3;
    shl.b32 %shift, %shift, 3;
    shr.u32 %byte, %pattern, %shift;
    st.global.u8 [%at], %byte;

WORDS:
    shl.b64 %offset, %offset, 4;
    add.u64 %at, %first, %offset;

WORD:
    setp.ge.u64 %done, %at, %last;
    @%done bra NEXT;
    st.global.v4.u32 [%at], {%pattern, %pattern, %pattern, %pattern};
    add.u64 %at, %at, %step;
    bra WORD;

NEXT:
    add.u64 %row, %row, %rows;
    bra ROW;

END:
    ret;
}
"""

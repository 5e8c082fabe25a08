"""The reader of assembler output: it finds registers that nothing has written, and nothing else."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from sass import unwritten_registers

GOOD = """
        /*0010*/                   ULDC.64 UR32, c[0x0][0x208] ;
        /*0020*/                   UMOV UR26, 0x40000040 ;
        /*0030*/                   UIADD3 UR46, UP0, UR26, 0x20, URZ ;
        /*0040*/                   UMOV UR47, UR46 ;
.L_x_1:
        /*0050*/               @P1 LDG.E.U16 R43, desc[UR32][R26.64] ;
        /*0060*/                   HGMMA.64x16x16.F32.BF16 R88, R28, gdesc[UR44].tnspB, R88 ;
        /*0070*/                   REDUX.SUM.S32 UR17, R8 ;
        /*0080*/                   IMAD.U32 R6, RZ, RZ, UR17 ;
"""


def test_registers_that_are_written_first_are_in_order() -> None:
    assert unwritten_registers(GOOD) == []


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("UIADD3 UR46, UP0, UR26, 0x20, URZ ;", "UIADD3 UR46, UP0, UR46, 0x20, URZ ;"),
        (
            "HGMMA.64x16x16.F32.BF16 R88, R28, gdesc[UR44].tnspB, R88 ;",
            "HGMMA.64x16x16.F32.BF16 R88, R28, gdesc[UR46].tnspB, R88 ;",
        ),
        ("@P1 LDG.E.U16 R43, desc[UR32][R26.64] ;", "@P1 LDG.E.U16 R43, desc[UR34][R26.64] ;"),
    ],
    ids=["adds to itself", "descriptor", "address"],
)
def test_a_register_that_nothing_has_written_is_found(line: str, instead: str) -> None:
    assert line in GOOD
    assert unwritten_registers(GOOD.replace(line, instead)) == [instead]

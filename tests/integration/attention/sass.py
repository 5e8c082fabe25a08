"""Reads what the assembler made of a kernel, for a mistake of it that no test on a CPU can see.

ptxas 12.8, which Triton 3.6 brings, at times loses the first write of a uniform register: the descriptor of
a matrix product then comes from whatever lay there (``UIADD3 UR46, UP0, UR46, 0x20``, and no line above it
writes ``UR46``), and the product is wrong or reads outside of shared memory.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from triton import knobs

_WRITERS = ("U", "R2UR", "S2UR", "VOTE", "REDUX", "CREDUX")
_LINE = re.compile(r"(?:@!?U?P\w+\s+)?(?P<op>[A-Z][\w.]*)\s*(?P<operands>[^;]*);")
_REGISTER = re.compile(r"\bUR(\d+)\b")


def disassemble(cubin: bytes, folder: Path) -> str:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [knobs.nvidia.nvdisasm.path, "-c", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def unwritten_registers(sass: str) -> list[str]:
    """Instructions that read a uniform register which no earlier line writes. Blocks are laid out in an order
    in which a value's first write comes before its uses."""
    written: set[int] = set()
    found = []
    for line in sass.splitlines():
        instruction = _LINE.search(re.sub(r"/\*.*?\*/", "", line))
        if instruction is None:
            continue
        op, operands = instruction["op"], instruction["operands"].split(",")
        target = _REGISTER.fullmatch(operands[0].strip()) if op.startswith(_WRITERS) else None
        sources = operands[1:] if target else operands
        if any(not written.issuperset(_registers(source)) for source in sources):
            found.append(instruction[0])
        if target:
            first = int(target[1])
            written |= {first, first + 1} if ".64" in op or ".WIDE" in op else {first}
    return found


def _registers(operand: str) -> set[int]:
    registers = {int(number) for number in _REGISTER.findall(operand)}
    if "gdesc" in operand:  # four in a row; the descriptor of the second factor is in the last two
        return {number + offset for number in registers for offset in (2, 3)}
    return registers

"""Runs the few PTX instructions that the fill kernel is made of, one thread after the other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product

Registers = dict[str, int]


class PtxMachine:
    """``memory`` holds what was stored, a byte per address; ``writes`` how often."""

    def __init__(self, text: str) -> None:
        body = re.sub(r"//.*", "", text[text.index("{") + 1 : text.rindex("}")])
        self.code: list[str] = []
        self.labels: dict[str, int] = {}
        for part in body.replace(":", ":;").split(";"):
            line = " ".join(part.split())
            if line.endswith(":"):
                self.labels[line[:-1]] = len(self.code)
            elif line and not line.startswith(".reg"):
                self.code.append(line)
        self.memory: dict[int, int] = {}
        self.writes: dict[int, int] = {}

    def launch(
        self, grid: tuple[int, int, int], block: int, params: Mapping[str, int], *, limit: int = 10_000
    ) -> None:
        """``limit`` instructions a thread, so that a loop without end is a failure."""
        for x, y, thread in product(range(grid[0]), range(grid[1]), range(block)):
            special = {
                "%ctaid.x": x,
                "%ctaid.y": y,
                "%nctaid.x": grid[0],
                "%nctaid.y": grid[1],
                "%tid.x": thread,
                "%ntid.x": block,
            }
            self._run(special, params, limit)

    def _run(self, registers: Registers, params: Mapping[str, int], limit: int) -> None:
        at = 0
        for _ in range(limit):
            guard, _, line = self.code[at].rpartition("@")[2].partition(" ") if self.code[at][0] == "@" else (
                "", "", self.code[at],
            )  # fmt: skip
            at += 1
            if guard and not registers[guard]:
                continue
            op, _, rest = line.partition(" ")
            if op == "ret":
                return
            if op == "bra":
                at = self.labels[rest]
            else:
                self._step(op.split("."), rest, registers, params)
        raise AssertionError("a thread does not end")

    def _step(self, op: list[str], rest: str, registers: Registers, params: Mapping[str, int]) -> None:
        if op[0] == "st":
            self._store(op, rest, registers)
            return
        target, *sources = [part.strip() for part in rest.split(",")]
        if op[0] == "ld":
            registers[target] = params[sources[0].strip("[]")]
            return
        a, b, c = [*(self._value(source, registers) for source in sources), 0, 0, 0][:3]
        mask = (1 << int(op[-1][1:])) - 1
        if op[0] == "cvt":
            mask = (1 << int(op[1][1:])) - 1
        elif op[:2] == ["mul", "wide"]:
            mask = (1 << 64) - 1
        a, b = a & ((1 << 64) - 1), b & ((1 << 64) - 1)
        results = {
            "mov": lambda: a,
            "cvt": lambda: a,
            "add": lambda: a + b,
            "mul": lambda: a * b,
            "mad": lambda: a * b + c,
            "and": lambda: a & b,
            "shl": lambda: a << b,
            "shr": lambda: a >> b,
            "min": lambda: min(a, b),
            "max": lambda: max(a, b),
            "setp": lambda: int({"ge": a >= b}[op[1]]),
        }
        registers[target] = results[op[0]]() & mask

    def _store(self, op: list[str], rest: str, registers: Registers) -> None:
        place, _, values = rest.partition(",")
        address = registers[place.strip("[] ")]
        size = {"u8": 1, "u32": 4}[op[-1]]
        names = [name.strip() for name in values.strip(" {}").split(",")]
        assert address % (size * len(names)) == 0, "a store that is not aligned faults"
        for index, name in enumerate(names):
            value = registers[name] & ((1 << 8 * size) - 1)
            for offset, byte in enumerate(value.to_bytes(size, "little")):
                place_of_byte = address + index * size + offset
                self.memory[place_of_byte] = byte
                self.writes[place_of_byte] = self.writes.get(place_of_byte, 0) + 1

    @staticmethod
    def _value(text: str, registers: Registers) -> int:
        return registers[text] if text.startswith("%") else int(text)

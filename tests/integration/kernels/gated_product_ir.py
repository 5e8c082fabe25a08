"""Runs what Triton's compiler made of the gated product: its intermediate code, up to where layouts begin.

``gated_product_on_cpu.py`` runs the kernel as Python and so sees what was written; the compiler may make
something else of it (``loop_bounds.py`` has such a case, which hung on a GPU). Here the scalar code, the
barriers and the copies of every role are run as compiled, with numbers left out: a buffer holds where its
data comes from. Each product of the two halves is noted with what it reads, each store with what it sums.
Who is next is drawn at random; a wait that never ends, an operand that has not arrived and one that is
overwritten before its product is done are errors.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

_SSA = re.compile(r"%[\w.]+(?:#\d+)?")
_FOR = re.compile(
    r"(?:(%\w+)(?::\d+)? = )?scf\.for (%\w+) = (\S+) to (\S+) step (\S+?)"
    r"(?: iter_args\((.*?)\) -> .*)?\s*(?: : \w+)? \{"
)
_SCALARS: dict[str, Callable[..., int]] = {
    "addi": lambda a, b: a + b,
    "subi": lambda a, b: a - b,
    "muli": lambda a, b: a * b,
    "divsi": lambda a, b: int(a / b),
    "remsi": lambda a, b: a - int(a / b) * b,
    "minsi": min,
    "maxsi": max,
    "andi": lambda a, b: a & b,
    "select": lambda condition, a, b: a if condition else b,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "slt": lambda a, b: a < b,
    "sle": lambda a, b: a <= b,
    "sgt": lambda a, b: a > b,
    "sge": lambda a, b: a >= b,
}
Place = tuple[Any, ...]


@dataclass
class Barrier:
    count: int
    pending: int
    num_bytes: int = 0
    phase: int = 0
    copies: list[tuple[Place, Place]] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """A product: where its activations and the two halves of its weights come from."""

    activations: Place
    gate: Place
    up: Place


@dataclass(frozen=True)
class Stored:
    target: Place
    steps: tuple[Step, ...]


def run_program(
    ttgir: str, *, program: int, num_programs: int, num_tokens: int, num_out: int, seed: int = 0
) -> list[Stored]:
    """What one program stores."""
    machine = Machine(random.Random(seed), program, num_programs)
    lines = [re.sub(r" loc\(.*?\)+$", "", line.strip()) for line in ttgir.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("tt.func"))
    values: dict[str, Any] = {"%num_tokens": num_tokens, "%num_out": num_out}
    values |= {"%x_TI": "x", "%weight_OI": "weight", "%out_TO": "out"}
    split = next(i for i, line in enumerate(lines) if "ttg.warp_specialize(" in line)
    for _ in Role(machine, lines[start + 1 : split], dict(values)).run(values):
        raise AssertionError("a wait before the roles part")
    captured = [values[name] for name in _SSA.findall(lines[split].partition(") attributes")[0])]
    roles = []
    for index in range(split + 1, len(lines)):
        line = lines[index]
        if line.startswith("default {"):
            own = dict(values)
        elif line.startswith("partition"):
            names = re.findall(r"(%\w+): ", line)
            own = dict(zip(names, captured, strict=True))
        else:
            continue
        end = next(i for i in range(index, len(lines)) if re.match(r"ttg\.warp_(yield|return)", lines[i]))
        roles.append(Role(machine, lines[index + 1 : end], own))
    machine.run(roles)
    return machine.stored


class Machine:
    def __init__(self, order: random.Random, program: int, num_programs: int) -> None:
        self.order, self.program, self.num_programs = order, program, num_programs
        self.barriers: dict[Place, Barrier] = {}
        self.buffers: dict[Place, Place | None] = {}
        self.stored: list[Stored] = []

    def run(self, roles: list[Role]) -> None:
        waiting: dict[int, Callable[[], bool]] = {index: lambda: True for index in range(len(roles))}
        running = [role.run(role.values) for role in roles]
        while waiting:
            able = [index for index, is_ready in waiting.items() if is_ready()]
            assert able, "every role waits for another"
            index = self.order.choice(able)
            try:
                waiting[index] = next(running[index])
            except StopIteration:
                del waiting[index]

    def change(self, barrier: Barrier, *, arrivals: int = 0, num_bytes: int = 0) -> None:
        barrier.pending -= arrivals
        barrier.num_bytes += num_bytes
        assert barrier.pending >= 0, "more arrivals than a barrier expects"
        if barrier.pending == 0 and barrier.num_bytes == 0:
            self.buffers.update(barrier.copies)
            barrier.copies, barrier.pending = [], barrier.count
            barrier.phase ^= 1


class Role:
    """One group of warps."""

    def __init__(self, machine: Machine, lines: list[str], values: dict[str, Any]) -> None:
        self.machine, self.lines, self.values = machine, lines, values
        self.flying: list[tuple[Step, list[tuple[Place, Place]]]] = []
        self.steps: list[Step] = []

    def run(self, values: dict[str, Any]) -> Iterator[Callable[[], bool]]:
        self.values = values
        yield from self._run(0, len(self.lines))
        assert not self.flying, "a product is never waited for"

    def _run(self, start: int, end: int) -> Iterator[Callable[[], bool]]:
        index = start
        while index < end:
            line = self.lines[index]
            if loop := _FOR.match(line):
                last = self._end_of(index)
                yield from self._loop(loop, index + 1, last)
                index = last
            else:
                assert not line.endswith("{"), line
                yield from self._one(line)
            index += 1

    def _end_of(self, index: int) -> int:
        depth = 0
        for last in range(index, len(self.lines)):
            depth += self.lines[last].endswith("{") - self.lines[last].startswith("}")
            if depth == 0:
                return last
        raise AssertionError("no end")

    def _loop(self, loop: re.Match[str], start: int, end: int) -> Iterator[Callable[[], bool]]:
        result, variable, *bounds, carried = loop.groups()
        pairs = re.findall(r"(%\w+) = (%\w+(?:#\d+)?)", carried or "")
        state = [self.values[initial] for _, initial in pairs]
        for value in range(*(self.values[bound] for bound in bounds)):
            self.values[variable] = value
            self.values.update(zip((name for name, _ in pairs), state, strict=True))
            has_yield = self.lines[end - 1].startswith("scf.yield")
            yield from self._run(start, end - has_yield)
            if has_yield:
                state = [self.values[name] for name in _SSA.findall(self.lines[end - 1].partition(" : ")[0])]
        if len(state) == 1:
            self.values[result] = state[0]
        self.values.update({f"{result}#{place}": value for place, value in enumerate(state)})

    def _one(self, line: str) -> Iterator[Callable[[], bool]]:
        target, text = (line.split(" = ", 1)) if line.startswith("%") else ("", line)
        name = re.split(r"[ (]", text, maxsplit=1)[0]
        operands = [self.values.get(operand) for operand in _SSA.findall(text.partition(" : ")[0])]
        machine, result = self.machine, None
        kind = name.partition(".")[2]
        if name == "arith.constant":
            number = re.match(r"arith\.constant (-?\d+|true|false)\b", text)
            result = {"true": 1, "false": 0}.get(number[1]) if number else None
            result = int(number[1]) if number and result is None else result
        elif name == "arith.cmpi":
            compare = _COMPARISONS[text.split()[1].rstrip(",")]
            result = None if None in operands else compare(*operands)
        elif name.startswith("arith.") and kind in _SCALARS:
            result = None if None in operands else _SCALARS[kind](*operands)
        elif kind in ("get_program_id", "get_num_programs"):
            result = machine.program if kind == "get_program_id" else machine.num_programs
        elif kind == "local_alloc":
            result = (target,)
        elif kind == "memdesc_index":
            result = (*operands[0], operands[1])
        elif kind == "memdesc_subslice":
            result = (*operands[0], "rows", int(re.search(r"\[(\d+), 0\]", text)[1]))  # type: ignore[index]
        elif kind == "memdesc_trans":
            result = operands[0]
        elif kind == "init_barrier":
            count = int(text.partition(", ")[2].split()[0])
            machine.barriers[operands[0]] = Barrier(count, count)
        elif kind == "wait_barrier":
            barrier, phase = machine.barriers[operands[0]], operands[1]
            yield lambda: barrier.phase != phase
        elif kind in ("arrive_barrier", "barrier_expect"):
            number = int(text.partition(", ")[2].split(",")[0])
            is_expect = kind == "barrier_expect"
            barrier = machine.barriers[operands[0]]
            machine.change(barrier, num_bytes=number if is_expect else 0)
            machine.change(barrier, arrivals=1 if is_expect else number)
            yield lambda: True
        elif kind == "async_tma_copy_global_to_local":
            source, first, second, buffer, bar, _ = operands
            machine.buffers[buffer] = None
            barrier = machine.barriers[bar]
            barrier.copies.append((buffer, (source, first, second)))
            machine.change(barrier, num_bytes=-2 * _num_elements(text))
            yield lambda: True
        elif kind == "warp_group_dot":
            self._start(operands[0], operands[1])
            yield lambda: True
        elif kind == "warp_group_dot_wait":
            self._finish(int(re.search(r"pendings = (\d+)", text)[1]))  # type: ignore[index]
            yield lambda: True
        elif kind == "async_tma_copy_local_to_global":
            machine.stored.append(Stored(tuple(operands[:3]), tuple(self.steps)))
            self.steps = []
        self.values[target.split(",")[0]] = result

    def _start(self, x: Place, weight: Place) -> None:
        """A buffer of weights is filled in two pieces; one of activations at once: each role reads half."""
        half = {
            place: source for place, source in self.machine.buffers.items() if place[: len(weight)] == weight
        }
        pieces = [half[place] for place in sorted(half, key=lambda place: place[-1])]
        whole = self.machine.buffers[x[:-2]]
        assert len(pieces) == 2
        assert None not in (*pieces, whole), "a product reads what has not arrived"
        source, row, column = whole  # type: ignore[misc]
        reads = [(x[:-2], whole), *half.items()]
        self.flying.append((Step((source, row + x[-1], column), *pieces), reads))  # type: ignore[arg-type]

    def _finish(self, num_outstanding: int) -> None:
        while len(self.flying) > num_outstanding:
            step, reads = self.flying.pop(0)
            assert all(self.machine.buffers[place] == source for place, source in reads), (
                "overwritten too early"
            )
            self.steps.append(step)


def _num_elements(text: str) -> int:
    rows, columns = re.findall(r"-> !ttg\.memdesc<(\d+)x(\d+)x", text)[0]
    return int(rows) * int(columns)

"""Which races that compute-sanitizer's racecheck reports are none: the machine code orders the accesses.

A kernel with roles (Gluon's ``warp_specialize``) hands over through shared memory: the first role's warps
write a byte for each other warp that says what it shall run, and what the roles are given; all warps meet at
named barrier 1; then the others read. Racecheck reports those accesses although the barrier orders them.

A report names a kernel and offsets of instructions. ``barrier_phases`` walks over all paths of the code that
ran and counts how often barrier 1, which every thread of the block takes part in, was passed before each
access. Accesses that never come after equally many passes have a barrier between them, so they are no race,
whatever their addresses. What cannot be shown to be ordered stays a finding. Copies and matrix products that
run on by themselves are not ordered by where they start: a report on those is never put aside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

PERIOD = 3
"""A hand-over passes the barrier three times: the roles are named, their arguments read, their work done.
Passes are counted modulo that, so that the walk over a loop ends; what differs modulo three differs."""

_BANNER = "========="
_HEAD = re.compile(r"========= (?P<level>Error|Warning|Info): (?P<what>.*)")
_ACCESS = re.compile(r"(?:Read|Write|Atomic)\w* access at (?P<where>.+?)(?: \[\d+ hazards?\])?$")
_PLACE = re.compile(r"(?P<kernel>[^\s+]+)\+0x(?P<offset>[0-9a-f]+)(?: in .*)?$")
_LINE = re.compile(
    r"^\s*/\*(?P<offset>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?(?P<op>[A-Z][\w.]*)\s*(?P<rest>[^;]*);(?P<note>.*)$"
)
_LABEL = re.compile(r"^(\.L_\w+):")
_TARGET = re.compile(r"\.L_\w+")
_BLOCKING = ("LDS", "STS", "LDSM", "STSM")
_UNKNOWN = ("CALL", "RET", "JMP", "JMX", "BRXU", "RPCMOV", "WARPSYNC.COLLECTIVE")


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """One report. ``offsets`` of the first access and of those it is said to race with; None where the report
    is not one of accesses at known instructions."""

    kernel: str
    offsets: tuple[int, ...] | None
    text: str


def read_races(output: str) -> list[Race]:
    """Everything that the tool reports as an error, a warning or a remark."""
    # Tests print dots, so a report may begin in the middle of a line.
    lines = [line[line.index(_BANNER) :].rstrip() for line in output.splitlines() if _BANNER in line]
    races = []
    for index, line in enumerate(lines):
        head = _HEAD.match(line)
        if head is None:
            continue
        accesses = [head["what"].removeprefix("Race reported between ")]
        for follower in lines[index + 1 :]:
            if not follower.startswith(f"{_BANNER}     and "):
                break
            accesses.append(follower.removeprefix(f"{_BANNER}     and "))
        places = [_place(access) for access in accesses]
        kernels = {place[0] for place in places if place is not None}
        is_known = len(accesses) > 1 and None not in places and len(kernels) == 1
        races.append(
            Race(
                kernel=kernels.pop() if kernels else "?",
                offsets=tuple(place[1] for place in places if place is not None) if is_known else None,
                text=" and ".join([f"{head['level']}: {accesses[0]}", *accesses[1:]]),
            )
        )
    return races


def is_ordered(race: Race, codes: Iterable[str]) -> bool:
    """Whether one of ``codes``, the assembler text of every variant of the kernel, orders all that ``race``
    names and no other has accesses at the same offsets that it does not order."""
    if race.offsets is None:
        return False
    is_explained = False
    for code in codes:
        try:
            phases = barrier_phases(code)
        except ValueError:
            return False
        if not all(offset in phases for offset in race.offsets):
            continue
        first, *others = (phases[offset] for offset in race.offsets)
        if not first or any(not other or first & other for other in others):
            return False
        is_explained = True
    return is_explained


def barrier_phases(code: str) -> dict[int, frozenset[int]]:
    """After how many passes of barrier 1, modulo ``PERIOD``, each access to shared memory can come, by its
    offset; empty for one that runs on by itself or is never reached.

    Raises ``ValueError`` for code with calls, jumps through tables without a list of targets, threads that
    meet elsewhere than they go on, or other uses of barrier 1.
    """
    instructions, labels = _parse(code)
    phases: dict[int, set[int]] = {
        each.offset: set() for each in instructions if each.op.startswith((*_BLOCKING, "ATOMS", "LDGSTS"))
    }
    seen: set[tuple[int, int, frozenset[str]]] = set()
    todo: list[tuple[int, int, frozenset[str]]] = [(0, 0, frozenset())]
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        index, phase, known = state
        if index >= len(instructions):
            continue
        here = instructions[index]
        if here.op.split(".")[0] in _BLOCKING:
            phases[here.offset].add(phase)
        if here.is_labelled:
            known = frozenset()  # other ways lead here, on which other things are known
        todo += _successors(here, index, phase, known, labels)
    return {offset: frozenset(found) for offset, found in phases.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Instruction:
    offset: int
    guard: str
    op: str
    operands: str
    targets: tuple[str, ...]
    is_labelled: bool


def _parse(code: str) -> tuple[list[_Instruction], dict[str, int]]:
    if code.count("\n.text.") != 1:
        raise ValueError("not the code of one function")
    instructions: list[_Instruction] = []
    labels: dict[str, int] = {}
    is_labelled = False
    for line in code.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
            is_labelled = True
        elif found := _LINE.match(line):
            op, operands = found["op"], found["rest"] + found["note"]
            if op.startswith(_UNKNOWN):
                raise ValueError(f"{op} is not followed")
            targets = tuple(_TARGET.findall(operands))
            instructions.append(
                _Instruction(
                    offset=int(found["offset"], 16),
                    guard=found["guard"] or "",
                    op=op,
                    operands=operands.strip(),
                    targets=targets,
                    is_labelled=is_labelled,
                )
            )
            is_labelled = False
    meetings = {
        (each.operands.partition(",")[0], labels[target])
        for each in instructions
        if each.op.startswith("BSSY")
        for target in each.targets
    }
    for index, each in enumerate(instructions):
        # Threads that have met go on where their BSSY says, which is always the next instruction.
        if each.op.startswith("BSYNC") and (each.operands, index + 1) not in meetings:
            raise ValueError(f"{each.op} {each.operands} goes on elsewhere")
    return instructions, labels


def _successors(
    here: _Instruction, index: int, phase: int, known: frozenset[str], labels: dict[str, int]
) -> list[tuple[int, int, frozenset[str]]]:
    """What may come next: index, phase, and guards that hold since the last label."""
    op = here.op.split(".")[0]
    if op not in ("BRA", "BRX", "BAR", "EXIT", "BSSY"):
        # Reading a predicate changes nothing, but to forget it is safe and needs no table of operands.
        kept = frozenset(g for g in known if not re.search(rf"\b{g.lstrip('!')}\b|\bU?PR\b", here.operands))
        return [(index + 1, phase, kept)]
    opposite = here.guard.removeprefix("!") if here.guard.startswith("!") else f"!{here.guard}"
    may_run = not here.guard or opposite not in known
    may_skip = bool(here.guard) and here.guard not in known
    # What a run of this instruction says of its guard, and what a skip does.
    runs = known | {here.guard} if here.guard else known
    following = [(index + 1, phase, known | {opposite})] if may_skip else []
    if not may_run:
        return following
    if op == "BAR":
        following.append((index + 1, _passed(here, phase), runs))
    elif op == "BSSY":
        following += [(index + 1, phase, runs), *((labels[t], phase, runs) for t in here.targets)]
    elif op in ("BRA", "BRX"):
        if not here.targets:
            raise ValueError(f"{here.op} {here.operands} has no known target")
        following += [(labels[target], phase, runs) for target in here.targets]
        if op == "BRA" and "," in here.operands:  # a condition among its operands
            following.append((index + 1, phase, runs))
    return following


def _passed(here: _Instruction, phase: int) -> int:
    if re.fullmatch(r"SYNC(\.DEFER_BLOCKING)?", here.op.partition(".")[2]):
        if here.operands == "0x1":
            return (phase + 1) % PERIOD
        if re.fullmatch(r"0x(?!1\b)[0-9a-f]+(, 0x[0-9a-f]+)?", here.operands):
            return phase  # a barrier of one role
    raise ValueError(f"{here.op} {here.operands} is not followed")


def _place(access: str) -> tuple[str, int] | None:
    found = _ACCESS.match(access)
    place = _PLACE.match(found["where"]) if found else None
    return (place["kernel"], int(place["offset"], 16)) if place else None

"""Triton's hand-over to the roles of a kernel is ordered by a barrier in the machine code, and what is not
ordered is not taken for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from races import barrier_phases
from sanitize import codes_of, judge


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_roles.py")
    subprocess.run(
        [sys.executable, str(script)],
        check=True,
        env={**environment, "TRITON_CACHE_DIR": str(folder)},
        timeout=200,
    )
    return folder


@pytest.fixture(autouse=True)
def _in_that_folder(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiled))


def hand_over(code: str) -> list[int]:
    """Offsets of the read of what a warp shall run, and of the two writes."""
    barrier = r"\s+/\*\w+\*/\s+BAR\.SYNC\.DEFER_BLOCKING 0x1 ;"
    read = re.findall(r"/\*(\w+)\*/\s+LDS\.U8 ", code)
    writes = re.findall(rf"/\*(\w+)\*/\s+STS[.\d]* [^\n]*;{barrier}", code)
    assert (len(read), len(writes)) == (1, 2)
    return [int(offset, 16) for offset in (*read, *writes)]


def report(kernel: str, offsets: list[int]) -> str:
    read, *writes = (f"access at {kernel}+{offset:#x} in kernels.py:57" for offset in offsets)
    others = "".join(f"\n=========     and Write {write} [82 hazards]" for write in writes)
    return (
        f"a.py ..========= Error: Race reported between Read {read}{others}\n========= \n"
        ".\n3 passed in 1s\n========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    )


@pytest.mark.parametrize("kernel", ["hopper_prefill_kernel", "hand_over_kernel"])
def test_the_hand_over_is_ordered(kernel: str) -> None:
    (code,) = codes_of(kernel)
    output = report(kernel, hand_over(code))
    assert judge("racecheck", 9, output, may_put_aside=True)["outcome"] == "clean but for what is put aside"
    assert judge("racecheck", None, output, may_put_aside=True)["outcome"] == "timed out"
    # Where racecheck reports none of a kernel that does nothing else this is something else.
    assert judge("racecheck", 9, output, may_put_aside=False)["outcome"] == "findings"


def test_a_race_between_roles_stays_a_finding() -> None:
    (code,) = codes_of("racing_kernel")
    (read,) = re.findall(r"/\*(\w+)\*/\s+LDS\.64 ", code)
    phases = barrier_phases(code)
    writes = [int(offset, 16) for offset in re.findall(r"/\*(\w+)\*/\s+STS\.64 ", code)]
    racing = [offset for offset in writes if phases[offset] == phases[int(read, 16)]]
    assert len(racing) == 1
    found = judge("racecheck", 9, report("racing_kernel", [int(read, 16), *racing]), may_put_aside=True)
    assert found["outcome"] == "findings"
    assert found["found"]
    assert found["hand_overs"] == []


def test_without_the_barrier_before_the_read_it_is_a_race() -> None:
    (code,) = codes_of("hopper_prefill_kernel")
    offsets = hand_over(code)
    line = next(
        line
        for line in reversed(code[: code.index(f"/*{offsets[0]:04x}*/")].splitlines())
        if "BAR.SYNC.DEFER_BLOCKING 0x1 ;" in line
    )
    changed = barrier_phases(code.replace(line, line.replace("BAR.SYNC.DEFER_BLOCKING 0x1", "NOP"), 1))
    assert any(changed[offsets[0]] & changed[write] for write in offsets[1:])


def test_every_access_of_the_prefill_kernel_is_followed() -> None:
    (code,) = codes_of("hopper_prefill_kernel")
    assert all(len(found) == 1 for found in barrier_phases(code).values())

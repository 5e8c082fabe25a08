"""Which cases ``benchmarks/sanitize.py`` runs, and how it reads what the sanitizer says."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from races import Race, barrier_phases, is_ordered, read_races
from sanitize import execute, judge, outcome_of, reports, select

REPORTS = """a.py ..========= Error: Race reported between Read access at attend+0x20 in a.py:57
=========     and Write access at attend+0x60 in a.py:57 [82 hazards]
=========     and Write access at attend+0xa0 in a.py:140 [117 hazards]
========= 
.========= Error: Race reported between Write access at void cub::Do<float>(T1 (&)[1])+0xa70 in /b.cuh:80
=========     and Read access at void cub::Do<float>(T1 (&)[1])+0xb00 in /b.cuh:81 [4 hazards]
========= 
========= Warning: Potential RAW hazard detected at __shared__ 0x10 in block (0,0,0) :
=========     Write Thread (0,0,0) at 0x148 in c.cu:38:k(int*)
========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)
"""
CODE = """
.text.attend:
        /*0000*/              @!P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0020*/                   LDS.U8 R0, [R0+UR56+0x8] ;
        /*0030*/              @!P1 EXIT ;
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0058*/                   BRA `(.L_x_1) ;
.L_x_0:
        /*0060*/                   STS.64 [UR4+0xc], R2 ;
        /*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0078*/                   BAR.SYNC.DEFER_BLOCKING 0x0, 0x80 ;
        /*0080*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0088*/                   STS [UR4+0x40], R2 ;
        /*0090*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*00a0*/                   STS.64 [UR4+0xc], R4 ;
        /*00b0*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*00c0*/                   EXIT ;
"""


def race(*offsets: int) -> Race:
    return Race(kernel="attend", offsets=offsets, text="")


@pytest.mark.parametrize(
    ("per_test", "numbers"),
    [(1, [1]), (2, [1, 5]), (3, [1, 2, 5])],
)
def test_the_first_cases_and_the_last_of_each_test_are_run(per_test: int, numbers: list[int]) -> None:
    node_ids = [*(f"f::a[{i}]" for i in range(1, 6)), "f::b", "f::test_graphs_equal", "f::a[4096]"]
    assert select(node_ids, per_test=per_test) == [*(f"f::a[{i}]" for i in numbers), "f::b"]


@pytest.mark.parametrize(
    ("code", "output", "outcome"),
    [
        (0, "3 passed in 1s\n========= ERROR SUMMARY: 0 errors", "clean"),
        (0, "3 passed in 1s\n========= RACECHECK SUMMARY: 0 hazards displayed", "clean"),
        (9, "3 passed in 1s\n========= ERROR SUMMARY: 2 errors", "findings"),
        (0, "3 passed in 1s\n========= RACECHECK SUMMARY: 4 hazards displayed", "findings"),
        (1, "1 failed\n========= ERROR SUMMARY: 0 errors", "tests failed"),
        (0, "3 skipped in 1s\n========= ERROR SUMMARY: 0 errors", "tests failed"),
        (0, "3 passed in 1s", "tests failed"),
    ],
)
def test_nothing_but_passed_tests_without_findings_is_clean(code: int, output: str, outcome: str) -> None:
    assert outcome_of(code, output) == outcome


def test_every_report_is_read_whole_also_behind_the_dots_of_tests() -> None:
    first, second, third = read_races(REPORTS)
    assert (first.kernel, first.offsets) == ("attend", (0x20, 0x60, 0xA0))
    assert second.offsets is None
    assert third.offsets is None
    assert reports([first, first]) == [
        "2 x Error: Read access at attend+0x20 in a.py:57 and Write access at attend+0x60 in a.py:57"
        " and Write access at attend+0xa0 in a.py:140"
    ]


def test_accesses_of_two_kernels_are_no_known_race() -> None:
    (found,) = read_races(REPORTS[: REPORTS.index("attend+0xa0")].replace("attend+0x60", "other+0x60"))
    assert found.offsets is None


def test_accesses_count_the_barriers_before_them() -> None:
    assert barrier_phases(CODE) == {0x20: {1}, 0x60: {0}, 0x88: {2}, 0xA0: {0}}


def test_a_barrier_between_orders_what_is_read_with_what_is_written() -> None:
    assert is_ordered(race(0x20, 0x60, 0xA0), [CODE])
    assert not is_ordered(race(0x60, 0xA0), [CODE]), "one phase in two rounds may be the same"
    assert not is_ordered(race(0x20, 0x64), [CODE]), "no access lies there"
    assert not is_ordered(race(0x20, 0x60), [])
    assert not is_ordered(Race(kernel="attend", offsets=None, text=""), [CODE])


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("/*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x1", "/*0010*/ NOP"),
        ("/*0060*/", "/*0061*/ BAR.SYNC.DEFER_BLOCKING 0x1 ;\n        /*0060*/"),
        ("/*0088*/                   STS [UR4+0x40], R2", "/*0088*/ @P3 BAR.SYNC.DEFER_BLOCKING 0x1"),
        ("/*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x1", "/*0070*/ BAR.ARV 0x1, 0x180"),
        (
            "/*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x1",
            "/*0010*/ BAR.SYNC.DEFER_BLOCKING 0x1, 0x80",
        ),
        ("/*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x1", "/*0050*/ CALL.REL.NOINC `(.L_x_0)"),
        ("LDS.U8 R0, [R0+UR56+0x8]", "LDGSTS.E [R0], desc[UR4][R2.64]"),
    ],
    ids=[
        "none before the read",
        "none after the write",
        "at times",
        "no wait",
        "of some threads",
        "calls",
        "runs on",
    ],
)
def test_what_no_barrier_of_all_threads_orders_stays_a_race(line: str, instead: str) -> None:
    assert line in CODE
    changed = CODE.replace(line, instead)
    assert not is_ordered(race(0x20, 0x60, 0xA0), [changed])
    assert not is_ordered(race(0x20, 0x60, 0xA0), [CODE, changed]), "it may be the variant that ran"


def test_where_threads_that_have_met_go_on_is_known() -> None:
    """A barrier may lie between where they part and where they meet."""
    part, meet = "        /*0008*/ BSSY B0, `(.L_x_2) ;\n", "        /*0018*/ BSYNC B0 ;\n"
    code = CODE.replace("        /*0010*/", f"{part}        /*0010*/")
    near = code.replace("        /*0020*/", f"{meet}.L_x_2:\n        /*0020*/")
    assert 1 in barrier_phases(near)[0x20]
    far = code.replace("        /*0020*/", f"{meet}        /*0020*/")
    far = far.replace("        /*0088*/", ".L_x_2:\n        /*0088*/")
    for changed in (far, near.replace("BSYNC B0", "BSYNC B1")):
        with pytest.raises(ValueError, match="goes on elsewhere"):
            barrier_phases(changed)


def test_guards_that_hold_together_are_taken_together() -> None:
    code = CODE.replace("@!P1 EXIT", "NOP")
    for line in ("/*0040*/", "/*0050*/", "/*0058*/"):
        code = code.replace(f"{line}                  ", f"{line} @P1 ")
    code = code.replace("BRA `(.L_x_1) ;", "BRA `(.L_x_1) ;\n        /*0059*/ EXIT ;")
    assert barrier_phases(code) == barrier_phases(CODE)
    written = code.replace("/*0050*/", "/*004c*/ ISETP.NE.U32.AND P1, PT, R0, RZ, PT ;\n        /*0050*/")
    assert barrier_phases(written)[0x20] == {0, 1, 2}, "what was known of a guard is forgotten"


def test_what_is_put_aside_is_not_a_finding_and_hides_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sanitize.codes_of", lambda kernel: [CODE] if kernel == "attend" else [])
    ordered = REPORTS[: REPORTS.index(".========= Error: Race reported between Write")]
    end = "3 passed in 1s\n========= RACECHECK SUMMARY: {} hazards displayed (1 error, 0 warnings)"
    aside = judge("racecheck", 9, ordered + end.format(1), may_put_aside=True)
    assert aside["outcome"] == "clean but for what is put aside"
    assert len(aside["hand_overs"]) == 1
    assert aside["found"] == []
    all_of_them = judge("racecheck", 9, REPORTS + "3 passed in 1s", may_put_aside=True)
    assert all_of_them["outcome"] == "findings"
    assert len(all_of_them["found"]) == 2
    not_read = judge("racecheck", 9, ordered + end.format(2), may_put_aside=True)
    assert not_read["outcome"] == "findings"
    failed = judge("racecheck", 9, ordered + "1 failed, " + end.format(1), may_put_aside=True)
    assert failed["outcome"] == "tests failed"


def test_kernels_of_libraries_are_listed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours have code that Triton has compiled in this run."""
    monkeypatch.setattr("sanitize.codes_of", lambda kernel: [CODE] if kernel == "attend" else [])
    output = (
        "..========= Error: Race reported between Read access at nvjet_64x8+0xaf0\n"
        "=========     and Write access at nvjet_64x8+0x27e0 [4 hazards]\n"
        "2 passed in 1s\n========= RACECHECK SUMMARY: 1 hazards displayed (1 error, 0 warnings)"
    )
    theirs = judge("racecheck", 9, output, may_put_aside=False)
    assert theirs["outcome"] == "clean but for what is put aside"
    assert (len(theirs["of_others"]), theirs["found"]) == (1, [])
    ours = judge("racecheck", 9, output.replace("nvjet_64x8", "attend"), may_put_aside=False)
    assert ours["outcome"] == "findings"
    assert (ours["of_others"], len(ours["found"])) == ([], 1)


@pytest.mark.parametrize(
    ("output", "outcome"),
    [
        ("========= COMPUTE-SANITIZER\n..", "timed out"),
        ("========= COMPUTE-SANITIZER\n============ test session starts ============\n..", "timed out"),
        (
            "========= COMPUTE-SANITIZER\n..========= Invalid __global__ read of size 4",
            "timed out with findings",
        ),
        (REPORTS, "timed out with findings"),
    ],
)
def test_a_run_that_is_ended_says_what_it_had_found(output: str, outcome: str) -> None:
    assert outcome_of(None, output) == outcome


def test_output_of_a_run_that_is_ended_is_text(tmp_path: Path) -> None:
    sanitizer = tmp_path / "sanitizer"
    sanitizer.write_text("#!/bin/sh\nprintf '..========= Error: \\303\\251\\n'\nsleep 60 & sleep 60\n")
    sanitizer.chmod(sanitizer.stat().st_mode | stat.S_IXUSR)
    code, output = execute(str(sanitizer), "racecheck", [], timeout=0.5)
    assert code is None
    assert output == "..========= Error: é\n"

"""What the interpreter cannot show of the kernel that sums over ranks: what is sent goes out at system scope,
what is waited for never comes out of a cache, and both in accesses of 16 bytes."""

from __future__ import annotations

from typing import Any

import pytest
from compiled_reports import reports_of

pytest.importorskip("triton")

SEND, RECEIVE, ASK = "STG.E.128.STRONG.SYS", "LDG.E.128.STRONG.SYS", "LDG.E.STRONG.SYS"


FORMS = {
    (f"torch.{dtype}", num_ranks, has_norm)
    for dtype, num_ranks in (("bfloat16", 2), ("float16", 8), ("bfloat16", 4), ("float32", 2))
    for has_norm in (False, True)
}


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return reports_of("compile_rank_sum.py")


def test_sums_of_many_rows_compile_and_two_programs_fit_a_multiprocessor() -> None:
    """All programs of a call have to run at once. What is sent lies ahead of the flag's fence."""
    reports = reports_of("compile_bulk_sum.py")
    assert {(r["dtype"], r["num_ranks"], r["has_norm"]) for r in reports} == FORMS
    for report in reports:
        names = report["instructions"]
        assert report["variants_by"] == ["residual_stride_t"], "start-up tries one number of rows for all"
        assert 2 * report["registers"] * 32 * report["num_warps"] <= 64 * 1024, report
        assert sum(name.startswith("STL") for name in names) <= (8 if report["num_ranks"] == 8 else 0), report
        assert not any(name.startswith("STG") for name in names[: names.index("ACQBULK")]), report
        fence = names.index("MEMBAR.ALL.SYS")
        last_send = max(i for i, name in enumerate(names[:fence]) if name.startswith("STG.E.128"))
        assert any(name.startswith("BAR") for name in names[last_send:fence]), report
        assert "ATOMG.E.EXCH.STRONG.SYS" in names[fence:], report
        asked = max(i for i, name in enumerate(names) if name == "ATOMG.E.OR.STRONG.SYS")
        received = names.index("LDG.E.128.STRONG.GPU")
        assert asked < received, "what has come is read past the first-level cache, behind its flag"
        assert any(name.startswith("BAR") for name in names[asked:received]), report


def test_all_forms_compile_and_fit_a_multiprocessor(reports: list[dict[str, Any]]) -> None:
    assert {(r["dtype"], r["num_ranks"], r["has_norm"]) for r in reports} == FORMS
    for report in reports:
        assert report["registers"] * 32 * report["num_warps"] <= 64 * 1024, report
        assert sum(name.startswith("STL") for name in report["instructions"]) <= 1, report


def test_values_are_sent_behind_the_wait_and_the_epoch_is_written_behind_a_barrier(
    reports: list[dict[str, Any]],
) -> None:
    for report in reports:
        names = report["instructions"]
        start = names.index("ACQBULK")
        assert not any(name.startswith("STG") or "STRONG" in name for name in names[:start]), report
        assert report["has_norm"] == any(name.startswith("LDG") for name in names[:start]), report
        assert names.index("PREEXIT") < start
        stores = [i for i, name in enumerate(names) if name.startswith("STG")]
        epoch = next(i for i in stores if names[i] != SEND)
        assert names[epoch] == "STG.E"
        last_send = max(i for i in stores if names[i] == SEND)
        assert any(name.startswith("BAR") for name in names[last_send:epoch]), report


def test_what_is_waited_for_is_read_past_the_cache(reports: list[dict[str, Any]]) -> None:
    """Each look at the words is one round of loads; looks after the first ask for the release too."""
    for report in reports:
        names = report["instructions"]
        first = names.index(RECEIVE)
        assert not any(name.startswith("LDG") and "STRONG" not in name for name in names[first:]), report
        assert ASK in names[first:], report
        # No fence waits for what was sent.
        assert not any(name.startswith(("MEMBAR", "ATOM")) for name in names), report

"""What verification found: one result per check and subject, as a table for people and as JSON for programs.

A result is ``ok``, ``failed``, ``skipped`` (it could not be asked here, and says why) or ``note`` (worth
knowing, no fault). A report is good when nothing failed. Read ``check.py`` for the checks.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gapless.errors import GraphError
from gapless.graphs.op_log import FrozenValue

_MAX_DETAILS = 8
"""Lines of one check that the table shows; JSON has all."""


class Status(enum.StrEnum):
    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"
    NOTE = "note"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """``target`` is what was checked (a phase), ``subject`` which size or name of it."""

    check: str
    target: str
    subject: str
    status: Status
    detail: str = ""


@dataclass(kw_only=True, slots=True)
class CheckReport:
    """``frozen_arguments``: what calls may not change. ``frozen_values``: host values inside captured ops.
    ``frozen_attributes``: plain values that the callable can reach, as they were at the capture."""

    name: str
    results: list[CheckResult] = field(default_factory=list)
    frozen_arguments: dict[str, str] = field(default_factory=dict)
    frozen_values: dict[str, list[FrozenValue]] = field(default_factory=dict)
    frozen_attributes: dict[str, str] = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> list[CheckResult]:
        return [result for result in self.results if result.status is Status.FAILED]

    def add(
        self, check: str, target: str, subject: str, detail: str | None, *, skipped: bool = False
    ) -> None:
        """No detail means that it is fine."""
        status = Status.OK if detail is None else Status.SKIPPED if skipped else Status.FAILED
        self.results.append(
            CheckResult(check=check, target=target, subject=subject, status=status, detail=detail or "")
        )

    def note(self, check: str, target: str, subject: str, detail: str) -> None:
        self.results.append(
            CheckResult(check=check, target=target, subject=subject, status=Status.NOTE, detail=detail)
        )

    def raise_if_failed(self) -> None:
        """Raises ``GraphError`` with every failure."""
        if not self.is_ok:
            raise GraphError(f"verification of {self.name} failed:\n" + "\n".join(map(_line, self.failures)))

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ok": self.is_ok,
            "results": [{**asdict(result), "status": str(result.status)} for result in self.results],
            "frozen": {
                "arguments": dict(self.frozen_arguments),
                "attributes": dict(self.frozen_attributes),
                "values": {
                    name: [asdict(value) for value in found] for name, found in self.frozen_values.items()
                },
            },
        }

    def __str__(self) -> str:
        """One line per target and check, failures and notes below it."""
        lines = []
        width = max((len(f"{r.target}: {r.check}") for r in self.results), default=0)
        for (target, check), results in self._groups().items():
            label = f"{target}: {check}"
            lines.append(f"{label:<{width}}  {_summary(results)}")
            details = _details(results)
            lines += [f"    {detail}" for detail in details[:_MAX_DETAILS]]
            if len(details) > _MAX_DETAILS:
                lines.append(f"    … and {len(details) - _MAX_DETAILS} more")
        for name, value in self.frozen_arguments.items():
            lines.append(f"frozen argument {name} = {value}")
        for name, values in self.frozen_values.items():
            lines.append(
                f"{name}: {len(values)} distinct host values are frozen in its ops (listed in the JSON)"
            )
        if self.frozen_attributes:
            lines.append(f"{len(self.frozen_attributes)} plain values are reachable (listed in the JSON)")
        num_failed = len(self.failures)
        verdict = (
            "all checks passed" if not num_failed else f"{num_failed} of {len(self.results)} checks FAILED"
        )
        return "\n".join([*lines, f"{self.name}: {verdict}"])

    def _groups(self) -> dict[tuple[str, str], list[CheckResult]]:
        groups: dict[tuple[str, str], list[CheckResult]] = {}
        for result in self.results:
            groups.setdefault((result.target, result.check), []).append(result)
        return groups


def merge(name: str, reports: Iterable[CheckReport]) -> CheckReport:
    """One report of several."""
    merged = CheckReport(name=name)
    for report in reports:
        merged.results += report.results
        merged.frozen_arguments |= report.frozen_arguments
        merged.frozen_values |= report.frozen_values
        merged.frozen_attributes |= report.frozen_attributes
    return merged


def sizes_text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{symbol}={size}" for symbol, size in sizes.items())


def _summary(results: list[CheckResult]) -> str:
    counts = {status: sum(r.status is status for r in results) for status in Status}
    if counts[Status.FAILED]:
        return f"FAILED {counts[Status.FAILED]} of {len(results)}"
    if counts[Status.OK]:
        return f"ok ({counts[Status.OK]})"
    return "skipped" if counts[Status.SKIPPED] else "note"


def _details(results: list[CheckResult]) -> list[str]:
    """What is not simply fine; a reason for skipping once, however many sizes it holds for."""
    lines = [_line(r) for r in results if r.status in (Status.FAILED, Status.NOTE)]
    return lines + [
        f"skipped: {why}" for why in dict.fromkeys(r.detail for r in results if r.status is Status.SKIPPED)
    ]


def _line(result: CheckResult) -> str:
    subject = f"{result.subject}: " if result.subject else ""
    return f"{result.status} {subject}{result.detail}"

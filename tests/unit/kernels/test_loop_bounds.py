"""No kernel has a variable that Triton's compiler would not update; what such a one looks like."""

from __future__ import annotations

from pathlib import Path

import pytest

import gapless
from loop_bounds import frozen_bounds

SOURCES = sorted(
    path
    for path in Path(gapless.__file__).parent.rglob("*.py")
    if "triton" in path.read_text().split("def ")[0]
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_kernel_has_a_bound_that_is_never_updated(path: Path) -> None:
    assert frozen_bounds(path.read_text()) == []


def kernel(body: str) -> str:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return f"@triton.jit\ndef kernel(x, n, first):\n{lines}"


@pytest.mark.parametrize(
    "body",
    [
        "first = 4\nfor t in range(n):\n    for c in range(first, n):\n        use(c)\n    first = 0",
        "for t in range(n):\n    b = first + 1\n    for c in range(0, b):\n        use(c)\n    first += 1",
    ],
)
def test_a_variable_that_only_bounds_a_loop_inside_is_found(body: str) -> None:
    assert frozen_bounds(kernel(body)) == ["kernel: first"]


@pytest.mark.parametrize(
    "body",
    [
        "for t in range(n):\n    first = tl.where(t == 0, 4, 0)\n    y = first\n    for c in range(y, n):\n"
        "        use(c, first)",
        "for t in range(n):\n    for c in range(first, n):\n        use(c, first)\n    first = 0",
        "for t in tl.static_range(n):\n    for c in range(first, n):\n        use(c)\n    first = 0",
        "for t in range(n):\n    for c in range(first, n):\n        use(c)\n    first = 0\nuse(first)",
        "for t in range(n):\n    for c in range(first, n):\n        use(c)\n    first = use(x, first)",
    ],
)
def test_one_that_something_uses_is_none(body: str) -> None:
    assert frozen_bounds(kernel(body)) == []

"""Without a GPU the Triton kernels of this folder run under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import triton_interpreter  # noqa: F401
from gapless.kernels.linear_choice import forget_stored_choices


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Timings of matrix products in a store of this test's own, empty at first."""
    pytest.importorskip("triton")
    monkeypatch.setenv("GAPLESS_CACHE_DIR", str(tmp_path / "store"))
    forget_stored_choices()
    yield
    forget_stored_choices()

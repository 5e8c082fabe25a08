"""The long version of the engine's random life; the unit tests run a short one."""

from __future__ import annotations

import pytest
from engine_soak import run_soak

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("seed", range(5))
def test_two_thousand_random_requests_with_aborts_and_failures_leak_nothing(seed):
    summary = run_soak(num_requests=2000, seed=seed)
    assert summary.num_finished == 2000
    assert min(summary.num_aborted, summary.num_errors, summary.num_refused, summary.num_preemptions) > 50

"""The long version of random image sets on encoder graphs; ``tests/integration`` has a short one."""

from __future__ import annotations

import pytest

from encoder_cases import CONFIGS, check_random_sets, runner_of, tiny_tower
from gapless.graphs.device import get_device

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("mode", ["budget", "exact"])
@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_ten_thousand_random_image_sets_equal_their_oracle(model_type: str, mode: str) -> None:
    device = get_device("cpu")
    runner = runner_of(tiny_tower(model_type, device=device), mode, device=device)
    check_random_sets(runner, count=2500, seed=3)
    assert not runner.report()["failures"]

"""The kernels by which ``benchmarks/sanitize.py`` judges racecheck do what they say."""

from __future__ import annotations

import pytest
import torch

from gapless.kernels.select import is_hopper

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    if not is_hopper(DEVICE):
        pytest.skip("roles with registers of their own are compiled for compute capability 9.0")


def test_each_role_writes_its_rows() -> None:
    from racecheck_kernels import hand_over_kernel

    out_TR = torch.zeros(8, 128, dtype=torch.int32, device=DEVICE)
    hand_over_kernel[(4,)](out_TR, num_warps=4)
    assert out_TR.T.tolist() == [[1, 2] * 4] * 128


def test_a_role_reads_what_the_other_writes_before_or_after() -> None:
    from racecheck_kernels import racing_kernel

    out_TR = torch.zeros(4, 128, dtype=torch.int64, device=DEVICE)
    racing_kernel[(4,)](out_TR, num_warps=4)
    assert set(out_TR.flatten().tolist()) <= {1, 2}

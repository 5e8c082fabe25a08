"""What tests of the CUDA device itself start from."""

from __future__ import annotations

import pytest

from gapless.graphs.device import get_device
from gapless.graphs.device.cuda import CudaDevice


@pytest.fixture
def cuda() -> CudaDevice:
    device = get_device("cuda")
    assert isinstance(device, CudaDevice)
    return device


@pytest.fixture
def pool(cuda):
    return cuda.new_pool()

"""Launches of compiled kernels past Triton's Python equal launches through it, bit for bit, also captured."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gapless.kernels import launch as launch_module
from gapless.kernels.launch import CachedLauncher, launch
from gapless.kernels.norm import fused_add_rms_norm
from gapless.kernels.select import kernels, launch_options

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def rows(num_rows: int, size: int, *, stride: int, offset: int, dtype: torch.dtype) -> Tensor:
    """Random rows at any alignment and distance."""
    memory = torch.randn(offset + num_rows * stride + size, device=DEVICE).to(dtype)
    return memory[offset:].as_strided((num_rows, size), (stride, 1))


def a_launch(choice: random.Random) -> tuple[Any, tuple[int, ...], list[Any], dict[str, Any], list[Tensor]]:
    """A kernel, its grid, arguments and constants, and what it writes."""
    dtype = choice.choice([torch.bfloat16, torch.float16, torch.float32])
    num_rows, size = choice.choice([1, 2, 7, 64]), choice.choice([1, 16, 130, 1024])
    strides = [max(2 * size, choice.choice([1, 16, 33, 2048])) for _ in range(2)]
    offsets = [choice.choice([0, 0, 1, 3, 8]) for _ in range(3)]
    out = [rows(num_rows, size, stride=size, offset=offsets[2], dtype=dtype) for _ in range(2)]
    options = {**launch_options(DEVICE), "num_warps": choice.choice([1, 4])}
    if choice.random() < 0.5:
        gate_up = rows(num_rows, 2 * size, stride=strides[0], offset=offsets[0], dtype=dtype)
        tile = choice.choice([64, 1024])
        constants = {"SIZE": size, "TILE": tile, **options}
        args: list[Any] = [gate_up, out[0], strides[0]]
        return kernels().silu_mul_kernel, (num_rows, -(-size // tile)), args, constants, out[:1]
    inputs = [
        rows(num_rows, size, stride=s, offset=o, dtype=dtype)
        for s, o in zip(strides, offsets[:2], strict=True)
    ]
    weight = rows(1, size, stride=size, offset=offsets[2], dtype=dtype)
    constants = {
        "SIZE": size,
        "SIZE_PAD": 1024,
        "HAS_UPDATE": choice.random() < 0.5,
        "NUM_PARTS": 1,
        **options,
    }
    args = [*inputs, weight, *out, *strides, choice.choice([1e-6, 1.0, 0.0])]
    written = out if constants["HAS_UPDATE"] else out[1:]
    return kernels().rms_norm_kernel, (num_rows,), args, constants, written


def test_a_gpu_has_the_launcher() -> None:
    assert isinstance(launch_module._launcher(), CachedLauncher)


@pytest.mark.parametrize("seed", range(8))
def test_launches_equal_those_of_triton(seed: int) -> None:
    choice = random.Random(seed)
    launches = [a_launch(choice) for _ in range(12)]
    expected = []
    for kernel, grid, args, constants, written in launches:
        kernel[grid](*args, **constants)
        expected.append([tensor.clone() for tensor in written])
    for _ in range(2):  # keys that are new, then keys that are known
        for (kernel, grid, args, constants, written), wanted in zip(launches, expected, strict=True):
            for tensor in written:
                tensor.fill_(float("nan"))
            launch(kernel, grid, args, constants)
            for tensor, result in zip(written, wanted, strict=True):
                assert torch.equal(tensor, result)


def test_an_address_that_loses_its_alignment_is_read_right() -> None:
    memory = torch.randn(3, 4096, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.ones(1024, device=DEVICE, dtype=torch.bfloat16)
    zeros = torch.zeros(3, 1024, device=DEVICE, dtype=torch.bfloat16)
    for offset in (0, 8, 1, 16, 2, 7, 0):
        x = memory[:, offset : offset + 1024]
        total, _ = fused_add_rms_norm(x, zeros, weight, 1e-6)
        assert torch.equal(total, x), offset


def test_a_known_launch_is_captured_on_the_capturing_stream() -> None:
    x = torch.randn(4, 1024, device=DEVICE, dtype=torch.bfloat16)
    residual, weight = torch.zeros_like(x), torch.ones(1024, device=DEVICE, dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            fused_add_rms_norm(x, residual, weight, 1e-6)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        total, _ = fused_add_rms_norm(x, residual, weight, 1e-6)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(total, x)

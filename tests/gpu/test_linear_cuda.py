"""The compiled kernels of small products at real shapes, against float64; under capture; in a chain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gapless.kernels.linear import gate_up_silu, launch_product, small_linear
from gapless.kernels.linear_choice import choose
from gapless.kernels.linear_tiles import Product, Tiles, token_bucket
from gapless.kernels.linear_tuner import candidates
from gapless.kernels.matrices import Matrices, compile_products

pytestmark = pytest.mark.gpu

HALVES = (torch.bfloat16, torch.float16)
TOKENS = (1, 2, 3, 7, 8, 16, 17, 32, 64, 100, 128)
SHAPES = [
    (1024, 4096, False),
    (2048, 1024, False),
    (3072, 1024, False),
    (1024, 3072, True),
    (4096, 4096, False),
    (14336, 4096, False),
    (4096, 14336, True),
    (576, 960, False),
    (1000, 333, False),
    (1001, 77, True),
    (33, 5, False),
]
"""Input features, output features, whether gate and up."""


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Memory that was never written holds NaN: an element that a kernel leaves out is found."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    with torch.no_grad():
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("num_in", "num_out", "is_gated"), SHAPES)
def test_equals_float64(num_in: int, num_out: int, is_gated: bool, dtype: torch.dtype) -> None:
    for num_tokens in TOKENS:
        for has_bias in (False, True):
            x, weight, bias = make_product(num_tokens, num_in, num_out, is_gated, dtype, has_bias=has_bias)
            out = (gate_up_silu if is_gated else small_linear)(x, weight, bias)
            assert_near(out, oracle(x, weight, bias, is_gated), (num_tokens, has_bias))


@pytest.mark.parametrize("num_tokens", [1, 4, 8, 32])
@pytest.mark.parametrize(
    ("num_in", "num_out", "is_gated"),
    [(1024, 1024, False), (3072, 256, True), (1000, 96, False), (1001, 77, True)],
)
def test_every_candidate_of_the_tuner_equals_float64(
    num_tokens: int, num_in: int, num_out: int, is_gated: bool
) -> None:
    x, weight, bias = make_product(num_tokens, num_in, num_out, is_gated, torch.bfloat16, has_bias=True)
    expected = oracle(x, weight, bias, is_gated)
    product = Product(
        num_tokens=token_bucket(num_tokens),
        num_in=num_in,
        num_out=num_out,
        is_gated=is_gated,
        dtype=torch.bfloat16,
    )
    for tiles in candidates(product):
        assert_near(launch_product(x, weight, bias, tiles, is_gated=is_gated), expected, tiles)


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 13, 32, 64, 128])
def test_a_captured_chain_equals_eager_with_fresh_data(num_tokens: int) -> None:
    """Each product starts before the one ahead has ended, and still reads its results."""
    layers = [
        [make_weight(4096, 1024), make_weight(1024, 2048), make_weight(6144, 1024), make_weight(1024, 3072)]
        for _ in range(12)
    ]
    x = torch.randn(num_tokens, 1024, device="cuda").to(torch.bfloat16)

    def chain() -> Tensor:
        hidden = x
        for qkv, out, gate_up, down in layers:
            wide = small_linear(hidden, qkv, None)
            hidden = small_linear(wide[:, :2048], out, None)
            hidden = small_linear(gate_up_silu(hidden, gate_up, None), down, None)
            hidden = torch.nn.functional.rms_norm(hidden, (1024,))
        return hidden

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(20):
        x.copy_(torch.randn(num_tokens, 1024, device="cuda"))
        graph.replay()
        assert captured.isfinite().all()
        assert torch.equal(captured, chain())


@pytest.mark.parametrize("num_tokens", [5, 8, 32])
def test_a_row_does_not_depend_on_its_neighbours(num_tokens: int) -> None:
    x, weight, _ = make_product(num_tokens, 1024, 4096, False, torch.bfloat16, has_bias=False)
    others = x.clone()
    others[0], others[2:] = float("nan"), 1e4
    assert torch.equal(small_linear(x, weight, None)[1], small_linear(others, weight, None)[1])


def test_a_hopper_gpu_has_its_own_kernel_for_one_token() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the built-in rule is for Hopper GPUs")
    for num_in, num_out, is_gated in SHAPES:
        product = Product(
            num_tokens=1, num_in=num_in, num_out=num_out, is_gated=is_gated, dtype=torch.bfloat16
        )
        if num_in % 16 == 0:
            assert isinstance(choose(product, torch.device("cuda", 0)), Tiles)


def test_compiling_ahead_leaves_nothing_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = (make_weight(512, 1280),)
    compile_products([Matrices(weights=weights, bias=None, is_gated=gated) for gated in (0, 1)])
    from triton.runtime.jit import JITFunction

    def no_compilation(*args: object, **kwargs: object) -> None:
        raise AssertionError("a kernel was compiled at its launch")

    monkeypatch.setattr(JITFunction, "_do_compile", no_compilation)
    monkeypatch.setattr("triton.runtime.build._build", no_compilation)  # of the C that calls it
    for num_tokens in TOKENS:
        if token_bucket(num_tokens) == num_tokens:
            x = torch.randn(num_tokens, 1280, device="cuda").to(torch.bfloat16)
            small_linear(x, weights[0], None)
            product = Matrices(weights=weights, bias=None, is_gated=True).product(num_tokens)
            tiles = choose(product, x.device)
            if tiles is not None:
                launch_product(x, weights[0], None, tiles, is_gated=True)


def make_weight(num_rows: int, num_in: int) -> Tensor:
    return (torch.randn(num_rows, num_in, device="cuda") * num_in**-0.5).to(torch.bfloat16)


def make_product(
    num_tokens: int, num_in: int, num_out: int, is_gated: bool, dtype: torch.dtype, *, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    num_rows = 2 * num_out if is_gated else num_out
    x = torch.randn(num_tokens, num_in + 16, device="cuda").to(dtype)[:, :num_in]
    weight = (torch.randn(num_rows, num_in, device="cuda") * num_in**-0.5).to(dtype)
    return x, weight, torch.randn(num_rows, device="cuda").to(dtype) if has_bias else None


def oracle(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, is_gated: bool) -> Tensor:
    """In float64, rounded where two steps round."""
    bias = None if bias_O is None else bias_O.double()
    out = torch.nn.functional.linear(x_TI.double(), weight_OI.double(), bias).to(x_TI.dtype)
    if not is_gated:
        return out
    gate, up = out.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def assert_near(actual: Tensor, expected: Tensor, case: object) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    step = 4 * torch.finfo(actual.dtype).eps  # cuBLAS adds parts of a sum, and the bias, after rounding
    torch.testing.assert_close(actual, expected, atol=step, rtol=step, msg=lambda text: f"{case}: {text}")

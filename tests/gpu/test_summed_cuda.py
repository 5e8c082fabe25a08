"""Products whose columns are shared between programs, and the norms that add the parts up, compiled, at real
shapes: against float64, against the separate steps, and in captured chains with early launches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.kernels.linear import launch_parts, launch_product, small_linear
from gapless.kernels.linear_choice import choose
from gapless.kernels.linear_rules import default_tiles
from gapless.kernels.linear_tiles import Product, Tiles, token_bucket
from gapless.kernels.linear_tuner import candidates
from gapless.kernels.matrices import Matrices, compile_products
from gapless.kernels.norm import add_parts_rms_norm_into, fused_add_rms_norm
from gapless.kernels.summed_product import launch_summed, linear_add_rms_norm

pytestmark = pytest.mark.gpu

HALVES = (torch.bfloat16, torch.float16)
TOKENS = (1, 7, 16, 31, 33, 65, 128, 200, 256, 300)
SHAPES = [(2048, 1024), (3072, 1024), (2048, 2048), (576, 576), (1536, 576), (4096, 4096)]
"""Input features and hidden size."""


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Memory that was never written holds NaN: an element that a kernel leaves out is found."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    with torch.no_grad():
        yield
    torch.use_deterministic_algorithms(False)


def make_operands(num_tokens: int, num_in: int, size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows of wider tensors, but for the weights."""
    x = torch.randn(num_tokens, num_in + 16, device="cuda").to(dtype)[:, :num_in]
    residual = torch.randn(num_tokens, size + 8, device="cuda").to(dtype)[:, :size]
    return x, make_weight(size, num_in, dtype), residual, torch.rand(size, device="cuda").to(dtype)


def make_weight(size: int, num_in: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(size, num_in, device="cuda") * num_in**-0.5).to(dtype)


def make_product(num_tokens: int, num_in: int, size: int, dtype: torch.dtype) -> Product:
    return Product(
        num_tokens=token_bucket(num_tokens),
        num_in=num_in,
        num_out=size,
        is_gated=False,
        is_summed=True,
        dtype=dtype,
    )


def assert_near(actual: Tensor, expected: Tensor, case: object) -> None:
    step = 4 * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, atol=step, rtol=step, msg=lambda text: f"{case}: {text}")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("num_in", "size"), SHAPES)
def test_equals_float64(num_in: int, size: int, dtype: torch.dtype) -> None:
    for num_tokens in TOKENS:
        x, weight, residual, norm_weight = make_operands(num_tokens, num_in, size, dtype)
        total, normed = linear_add_rms_norm(x, weight, residual, norm_weight, 1e-6)
        assert_near(total, residual + (x.double() @ weight.double().t()).to(dtype), num_tokens)
        wanted = F.rms_norm(total.double(), (size,), norm_weight.double(), 1e-6).to(dtype)
        assert_near(normed, wanted, num_tokens)


@pytest.mark.parametrize("num_tokens", [7, 16, 32, 33, 128, 200])
@pytest.mark.parametrize(("num_in", "size"), [(2048, 1024), (3072, 1024), (768, 576)])
def test_every_candidate_in_parts_equals_float64(num_in: int, size: int, num_tokens: int) -> None:
    """Also those that no rule takes; and the parts are added in order, rounded, added and normed."""
    x, weight, residual, norm_weight = make_operands(num_tokens, num_in, size, torch.bfloat16)
    for tiles in candidates(make_product(num_tokens, num_in, size, torch.bfloat16)):
        if tiles.parts == 1:
            continue
        parts = launch_parts(x, weight, tiles)
        columns = zip(x.double().chunk(tiles.parts, 1), weight.double().chunk(tiles.parts, 1), strict=True)
        expected = torch.stack([part @ matrix.t() for part, matrix in columns])
        torch.testing.assert_close(
            parts.double(), expected, atol=1e-4, rtol=1e-4, msg=lambda text, t=tiles: f"{t}: {text}"
        )
        in_order = parts[0].clone()
        for part in parts[1:]:
            in_order += part
        total, normed = launch_summed(x, weight, residual, norm_weight, 1e-6, tiles)
        wanted = fused_add_rms_norm(in_order.to(x.dtype), residual, norm_weight, 1e-6)
        assert torch.equal(total, wanted[0]), tiles
        # With more warps a norm adds the squares of a row in another order.
        assert (normed != wanted[1]).sum() <= max(2, 0.02 * normed.numel()), tiles
        assert_near(normed, wanted[1], tiles)


@pytest.mark.parametrize("num_tokens", [16, 32, 128])
def test_equal_calls_give_equal_bits(num_tokens: int) -> None:
    operands = make_operands(num_tokens, 3072, 1024, torch.bfloat16)
    first = linear_add_rms_norm(*operands, 1e-6)
    for _ in range(50):
        for once, again in zip(first, linear_add_rms_norm(*operands, 1e-6), strict=True):
            assert torch.equal(once, again)


@pytest.mark.parametrize("num_tokens", [5, 16, 32, 64, 77, 128, 256])
def test_a_captured_chain_equals_the_separate_kernels_with_fresh_data(num_tokens: int) -> None:
    """Each kernel starts before the one ahead has ended: of the replays none reads what is not there yet. The
    separate kernels are the same two launches, one after the other, each waited for."""
    layers = [(make_weight(2048, 1024), make_weight(1024, 2048), make_weight(1024, 3072)) for _ in range(12)]
    norm_weight = torch.linspace(0.5, 1.5, 1024, device="cuda").bfloat16()
    x = torch.randn(num_tokens, 1024, device="cuda").bfloat16()

    def chain(summed: object) -> Tensor:
        hidden, residual = x, x
        for wide, out, down in layers:
            heads = small_linear(hidden, wide, None)
            residual, hidden = summed(heads, out, residual, norm_weight, 1e-6)  # type: ignore[operator]
            act = torch.cat([hidden, hidden, hidden], 1)
            residual, hidden = summed(act, down, residual, norm_weight, 1e-6)  # type: ignore[operator]
        return hidden

    chain(linear_add_rms_norm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(linear_add_rms_norm)
    for _ in range(20):
        x.copy_(torch.randn(num_tokens, 1024, device="cuda"))
        graph.replay()
        assert captured.isfinite().all()
        assert torch.equal(captured, chain(in_two_steps))


def in_two_steps(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """What the operator launches, with the device idle in between. Up to 256 tokens."""
    tiles = choose(make_product(x.shape[0], weight.shape[1], weight.shape[0], x.dtype), x.device)
    if isinstance(tiles, Tiles) and tiles.parts > 1:
        parts = launch_parts(x, weight, tiles)
        total, normed = (x.new_empty(len(x), len(weight)) for _ in range(2))
        torch.cuda.synchronize()
        add_parts_rms_norm_into(parts, residual, norm_weight, eps, total, normed)
    else:
        ours = isinstance(tiles, Tiles)
        update = launch_product(x, weight, None, tiles, is_gated=False) if ours else F.linear(x, weight)
        torch.cuda.synchronize()
        total, normed = fused_add_rms_norm(update, residual, norm_weight, eps)
    torch.cuda.synchronize()
    return total, normed


def test_a_hopper_gpu_cuts_few_rows_into_parts() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the built-in rule is for Hopper GPUs")
    for num_in in (2048, 3072):
        for num_tokens in (8, 16, 32, 64, 128):
            product = make_product(num_tokens, num_in, 1024, torch.bfloat16)
            tiles = default_tiles(product)
            assert tiles is not None
            assert tiles.parts > 1


def test_compiling_ahead_leaves_nothing_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make_weight(512, 4096)  # of no other test
    compile_products([Matrices(weights=(weight,), bias=None, is_gated=False, is_summed=True)])
    residual, norm_weight = torch.zeros(1, 512, device="cuda").bfloat16(), weight.new_ones(512)
    fused_add_rms_norm(residual, residual, norm_weight, 1e-6)  # compiled by any warm-up
    from triton.runtime.jit import JITFunction

    def no_compilation(*args: object, **kwargs: object) -> None:
        raise AssertionError("a kernel was compiled at its launch")

    monkeypatch.setattr(JITFunction, "_do_compile", no_compilation)
    monkeypatch.setattr("triton.runtime.build._build", no_compilation)  # of the C that calls it
    for num_tokens in (1, 2, 8, 16, 32, 64, 128, 256):
        x = torch.randn(num_tokens, 4096, device="cuda").bfloat16()
        linear_add_rms_norm(
            x, weight, torch.zeros(num_tokens, 512, device="cuda").bfloat16(), norm_weight, 1e-6
        )

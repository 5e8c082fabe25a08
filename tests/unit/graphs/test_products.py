"""Matrix products left out: shapes and everything else as ever, and no product is made."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.graphs.products import ProductsLeftOut


class Ran(TorchDispatchMode):
    """Names of the operators that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (0, 8)])
def test_linear_layers_have_their_shapes_and_make_no_product(bias: bool, shape: tuple[int, ...]) -> None:
    layer = nn.Linear(8, 12, bias=bias, dtype=torch.bfloat16)
    x = torch.zeros(shape, dtype=torch.bfloat16)
    expected = layer(x)
    with torch.no_grad(), Ran() as ran, ProductsLeftOut():
        found = layer(x)
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
    assert not {"aten::mm", "aten::addmm", "aten::bmm"} & set(ran.names)


def test_products_of_batches_have_their_shapes() -> None:
    left, right = torch.zeros(4, 2, 3), torch.zeros(4, 3, 5)
    with torch.no_grad(), Ran() as ran, ProductsLeftOut():
        assert (left @ right).shape == (4, 2, 5)
    assert "aten::bmm" not in ran.names


def test_products_with_their_activation_have_their_shapes() -> None:
    layer, x = nn.Linear(8, 12), torch.zeros(5, 8)
    with torch.no_grad(), Ran() as ran, ProductsLeftOut():
        found = torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True)
    assert found.shape == (5, 12)
    assert "aten::_addmm_activation" not in ran.names


def test_everything_else_is_as_ever_and_so_are_products_after_it() -> None:
    x, layer = torch.randn(3, 4), nn.Linear(4, 4)
    expected = layer(x)
    with torch.no_grad(), ProductsLeftOut():
        assert torch.equal(torch.relu(x) + 1, x.clamp(min=0) + 1)
        assert torch.equal(torch.addmm(x[:, :2], x, torch.eye(4)[:, :2], beta=0), x[:, :2])  # not a layer's
    assert torch.equal(layer(x), expected)

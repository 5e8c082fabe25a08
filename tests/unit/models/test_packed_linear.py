"""Packed products: right, the same at every address, row by row, and under recording one opaque operation."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gapless.graphs.ops import implementation_of
from gapless.models import packed_linear as module
from gapless.models.layers import Linear
from gapless.models.packed_linear import PackedWeight, can_pack, packed_linear

if not can_pack(torch.empty(4, 4)):
    pytest.skip("this PyTorch has no oneDNN packing", allow_module_level=True)


@pytest.fixture(params=[1, 4], autouse=True)
def fewest_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Few rows as they are, as on Intel's CPUs, and padded, as on others."""
    monkeypatch.setattr(module, "_fewest_rows", lambda: request.param)
    return request.param


@pytest.mark.parametrize(
    ("processor", "fewest"), [("Intel64 Family 6 Model 143, GenuineIntel", 1), ("AMD64, AuthenticAMD", 4)]
)
def test_the_cpu_decides_whether_few_rows_are_padded(
    processor: str, fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the fixture above
    monkeypatch.setattr(module.platform, "processor", lambda: processor)
    monkeypatch.setattr("builtins.open", _no_such_file)
    assert module._fewest_rows.__wrapped__() == fewest


def _no_such_file(*args: object, **options: object) -> None:
    raise FileNotFoundError


SHAPES = [(24, 16), (16, 24), (96, 64), (1, 8), (8, 1), (33, 17), (960, 576)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 13, 64])
def test_product_equals_plain_linear(shape: tuple[int, int], bias: bool, rows: int) -> None:
    weight, hidden = torch.randn(shape), torch.randn(rows, shape[1])
    offset = torch.randn(shape[0]) if bias else None
    product = PackedWeight(weight, offset)(hidden)
    assert product.shape == (rows, shape[0])
    torch.testing.assert_close(product, F.linear(hidden, weight, offset), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 16])
@pytest.mark.parametrize("shape", [(96, 64), (576, 1536)])
def test_bits_do_not_depend_on_the_address_of_the_input(shape: tuple[int, int], rows: int) -> None:
    packed, hidden = PackedWeight(torch.randn(shape), None), torch.randn(rows, shape[1])
    expected = packed(hidden)
    for offset in range(1, 9):
        assert torch.equal(packed(_moved(hidden, offset)), expected), offset


@pytest.mark.parametrize("rows", [1, 2, 5, 12])
def test_bits_of_a_row_do_not_depend_on_its_neighbours_or_place(rows: int) -> None:
    packed = PackedWeight(torch.randn(96, 64), torch.randn(96))
    hidden = torch.randn(rows, 64)
    together = packed(hidden)
    for row in range(rows):
        assert torch.equal(packed(hidden[row].expand(rows, -1).contiguous())[0], together[row])


def test_input_is_left_alone_and_may_be_strided() -> None:
    packed = PackedWeight(torch.eye(8), None)
    wide = torch.randn(6, 16)
    copy = wide.clone()
    torch.testing.assert_close(packed(wide[:, ::2]), wide[:, ::2])
    assert torch.equal(wide, copy)


def test_weight_and_bias_are_those_of_the_moment_of_packing() -> None:
    weight = torch.randn(8, 4)
    packed, hidden = PackedWeight(weight, None), torch.randn(5, 4)
    expected = packed(hidden)
    weight.zero_()
    assert torch.equal(packed(hidden), expected)


def test_recording_sees_one_operation_with_the_right_shape() -> None:
    packed = PackedWeight(torch.randn(12, 8), None)
    assert implementation_of(packed_linear) is not None
    with FakeTensorMode():
        fake = packed(torch.empty(3, 8))
    assert (tuple(fake.shape), fake.dtype) == ((3, 12), torch.float32)


def test_compiler_takes_it_as_one_operation_for_any_row_count() -> None:
    layer = Linear(nn.Parameter(torch.randn(12, 8), requires_grad=False))
    layer.pack()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    with torch.no_grad():
        compiled = torch.compile(layer, backend=keep, dynamic=True, fullgraph=True)
        for rows in (6, 9, 2):
            hidden = torch.randn(rows, 8)
            assert torch.equal(compiled(hidden), layer(hidden))
    calls = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert (len(graphs), calls) == (1, [packed_linear])


def test_table_entry_lives_as_long_as_the_weight() -> None:
    gc.collect()
    before = len(module._table)
    packed = PackedWeight(torch.randn(4, 4), None)
    assert len(module._table) == before + 1
    del packed
    gc.collect()
    assert len(module._table) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_stay_plain(dtype: torch.dtype) -> None:
    layer = Linear(nn.Parameter(torch.randn(8, 4).to(dtype), requires_grad=False))
    layer.pack()
    assert layer.packed is None
    assert layer(torch.ones(2, 4, dtype=dtype)).dtype == dtype


def test_packing_frees_the_plain_weight() -> None:
    layer = Linear(nn.Parameter(torch.randn(8, 4), requires_grad=False))
    layer.pack()
    assert layer.weight is None
    assert list(layer.parameters()) == []


def _moved(hidden: Tensor, offset: int) -> Tensor:
    storage = torch.empty(hidden.numel() + 16)
    return storage[offset : offset + hidden.numel()].view_as(hidden).copy_(hidden)

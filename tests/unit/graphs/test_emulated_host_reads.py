"""Whatever brings device data to Python is refused at capture, with the op and the user's source line."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.errors import CaptureError
from gapless.graphs.device.emulated import EmulatedDevice

X = torch.arange(12.0).view(3, 4)
INDEX = torch.tensor([0, 2, 1])


def assign(tensor: Tensor, index: object, value: object) -> Tensor:
    tensor[index] = value
    return tensor


REFUSED = {
    "item": (lambda: X.sum().item(), "Tensor.item"),
    "tolist": (lambda: X.tolist(), "Tensor.tolist"),
    "numpy": (lambda: X.numpy(), "Tensor.numpy"),
    "array_protocol": (lambda: X.__array__(), "Tensor.__array__"),
    "cpu": (lambda: X.cpu(), "Tensor.cpu"),
    "bool": (lambda: bool(X.sum() > 0), "Tensor.__bool__"),
    "branch": (lambda: 1 if X.sum() > 0 else 2, "Tensor.__bool__"),
    "int": (lambda: int(INDEX[0]), "Tensor.__int__"),
    "float": (lambda: float(X[0, 0]), "Tensor.__float__"),
    "range": (lambda: range(INDEX[1]), "Tensor.__index__"),
    "repr": (lambda: repr(X), "Tensor.__repr__"),
    "equal": (lambda: torch.equal(X, X), "aten.equal.default"),
    "allclose": (lambda: torch.allclose(X, X), "aten.allclose.default"),
    "nonzero": (lambda: X.nonzero(), "aten.nonzero.default"),
    "where_one_argument": (lambda: torch.where(X > 0), "aten.nonzero"),
    "masked_select": (lambda: X.masked_select(X > 0), "aten.masked_select.default"),
    "boolean_index": (lambda: X[X > 0], "aten.index.Tensor"),
    "uint8_index": (lambda: X[(X > 0).to(torch.uint8)], "aten.index.Tensor"),
    "boolean_row_index": (lambda: X[X[:, 0] > 0], "aten.index.Tensor"),
    "boolean_assign_tensor": (lambda: assign(X.clone(), X[:, 0] > 0, X[:2]), "aten.index_put_.default"),
    "unique": (lambda: INDEX.unique(), "aten._unique2.default"),
    "bincount": (lambda: INDEX.bincount(), "aten.bincount.default"),
    "repeat_interleave": (lambda: X.repeat_interleave(INDEX, 0), "aten.repeat_interleave.Tensor"),
    "one_hot_unknown_classes": (lambda: F.one_hot(INDEX), ""),
    "inverse": (lambda: torch.linalg.inv(torch.eye(3)), "aten._linalg_check_errors.default"),
    "cholesky": (lambda: torch.linalg.cholesky(torch.eye(3)), "aten._linalg_check_errors.default"),
    "local_scalar": (lambda: torch.ops.aten._local_scalar_dense(X[0, 0]), "aten._local_scalar_dense.default"),
    "scalar_argument": (lambda: X.masked_fill(X > 0, X[0, 0].item()), "Tensor.item"),
    "host_data_to_device": (lambda: torch.tensor([1.0], device="cpu"), "torch.tensor"),
}

ALLOWED = {
    "index": lambda: X[INDEX],
    "masked_fill": lambda: X.masked_fill(X > 0, 1.0),
    "boolean_assign_scalar": lambda: assign(X.clone(), X > 0, 0.0),
    "boolean_assign_one_element": lambda: assign(X.clone(), X > 0, torch.zeros(())),
    "where_three_arguments": lambda: torch.where(X > 0, X, -X),
    "repeat_interleave_size_given": lambda: X.repeat_interleave(INDEX, 0, output_size=3),
    "one_hot_known_classes": lambda: F.one_hot(INDEX, 4),
    "inverse_without_check": lambda: torch.linalg.inv_ex(X[:, :3] + torch.eye(3)).inverse,
    "length": lambda: X * len(X) * X.shape[0] * X.numel(),
    "iterate_rows": lambda: sum(row for row in X),
    "host_constant": lambda: X + torch.tensor(2.0),
    "to_same_device": lambda: X.to("cpu") + X.to(X.device),
}


def run_recording(device: EmulatedDevice, fn) -> None:
    device.begin_segment(device.new_pool())
    try:
        fn()
        device.end_segment().replay()
    finally:
        device.abandon_segment()


@pytest.mark.parametrize("name", REFUSED)
def test_host_read_is_refused_with_op_and_source_line(name, device):
    fn, op = REFUSED[name]
    with pytest.raises(CaptureError) as raised:
        run_recording(device, fn)
    assert op in str(raised.value)
    first_line = inspect.getsourcelines(fn)[1]
    helper_line = inspect.getsourcelines(assign)[1] + 1
    assert any(f"{__file__}:{line} " in str(raised.value) for line in (first_line, helper_line))


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_gpu_can_capture_is_not_refused(name, device):
    run_recording(device, ALLOWED[name])


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", REFUSED)
def test_host_reads_work_outside_a_segment(name, device):
    fn, _ = REFUSED[name]
    run_recording(device, lambda: X * 2)
    fn()


def test_a_swallowed_host_read_still_invalidates_the_segment(device):
    def forward() -> Tensor:
        try:
            return X * X.sum().item()
        except CaptureError:
            return X * 2

    with pytest.raises(CaptureError, match=r"segment is invalid.*Tensor\.item"):
        run_recording(device, forward)


def test_named_generator_is_refused(device):
    generator = torch.Generator()
    with pytest.raises(CaptureError, match=r"torch\.Generator of its own"):
        run_recording(device, lambda: torch.randn(3, generator=generator))


def test_default_generator_may_be_named(device):
    run_recording(device, lambda: torch.empty(3).normal_(generator=torch.default_generator))


def test_refusal_from_a_helper_in_another_function_names_that_line(device):
    def helper(tensor: Tensor) -> float:
        return tensor.sum().item()

    line = inspect.getsourcelines(helper)[1] + 1
    with pytest.raises(CaptureError, match=rf"test_emulated_host_reads\.py:{line} "):
        run_recording(device, lambda: helper(X))

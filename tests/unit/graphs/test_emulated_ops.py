"""Every kind of op, recorded and replayed on fresh inputs, gives the bits and strides of eager execution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.errors import CaptureError, GraphError
from gapless.graphs.device import op_binding
from gapless.graphs.device.emulated import EmulatedDevice
from gapless.graphs.device.op_binding import _FAST_FUNCTIONS, out_variant
from gapless.graphs.device.shapes import ShapeInference
from gapless.graphs.ops import register_custom_op


@dataclass
class Inputs:
    """Static buffers: x, y floats [4, 8]; w [8, 8]; b [8]; i int64 [4] below 4; q [2, 2, 4, 8]."""

    x: Tensor
    y: Tensor
    w: Tensor
    b: Tensor
    i: Tensor
    q: Tensor

    @classmethod
    def make(cls) -> Inputs:
        return cls(
            torch.zeros(4, 8),
            torch.zeros(4, 8),
            torch.zeros(8, 8),
            torch.zeros(8),
            torch.zeros(4, dtype=torch.long),
            torch.zeros(2, 2, 4, 8),
        ).refresh(0)

    def refresh(self, seed: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        for tensor in (self.x, self.y, self.w, self.b, self.q):
            tensor.normal_(generator=generator)
        self.i.random_(0, 4, generator=generator)
        return self


OPS: dict[str, Callable[[Inputs], object]] = {
    "add": lambda n: n.x + n.y,
    "add_alpha": lambda n: torch.add(n.x, n.y, alpha=0.3),
    "add_scalar": lambda n: n.x + 2.5,
    "scalar_sub": lambda n: 1 - n.x,
    "mul_broadcast": lambda n: n.x * n.b,
    "div": lambda n: n.x / n.y,
    "div_int": lambda n: n.i / 3,
    "floor_div": lambda n: n.i // 2,
    "pow": lambda n: n.x.pow(2),
    "addcmul": lambda n: torch.addcmul(n.x, n.y, n.b, value=-1),
    "addcdiv": lambda n: torch.addcdiv(n.x, n.y, n.b, value=0.5),
    "add_scalar_in_place": lambda n: n.x.clone().add_(1.5, alpha=2),
    "neg_exp_cos_sin": lambda n: (-n.x).exp() + n.x.cos() * n.x.sin(),
    "rsqrt": lambda n: torch.rsqrt(n.x.abs() + 1),
    "sigmoid_tanh": lambda n: torch.sigmoid(n.x) + torch.tanh(n.y),
    "silu": lambda n: F.silu(n.x),
    "gelu_tanh": lambda n: F.gelu(n.x, approximate="tanh"),
    "matmul": lambda n: n.x @ n.w,
    "matmul_transposed": lambda n: n.x @ n.w.t(),
    "matmul_3d": lambda n: n.q[0] @ n.w,
    "linear_bias": lambda n: F.linear(n.x, n.w, n.b),
    "linear_3d": lambda n: F.linear(n.q[0], n.w, n.b),
    "bmm": lambda n: torch.bmm(n.q[0], n.q[1].transpose(1, 2)),
    "baddbmm": lambda n: torch.baddbmm(n.q[0, :, :, :4], n.q[0], n.q[1].transpose(1, 2), alpha=0.5),
    "softmax": lambda n: torch.softmax(n.x, -1),
    "softmax_to_double": lambda n: torch.softmax(n.x, -1, dtype=torch.float64),
    "log_softmax": lambda n: F.log_softmax(n.x, -1),
    "sum": lambda n: n.x.sum(),
    "sum_dims": lambda n: n.q.sum((0, 2), keepdim=True),
    "sum_dtype": lambda n: n.i.sum(0, dtype=torch.float32),
    "mean": lambda n: n.x.mean(-1, keepdim=True),
    "amax": lambda n: n.x.amax(0),
    "max_with_index": lambda n: n.x.max(1),
    "argmax": lambda n: n.x.argmax(-1),
    "topk": lambda n: n.x.topk(3),
    "sort": lambda n: n.x.sort(descending=True),
    "cumsum": lambda n: n.x.cumsum(0),
    "var_mean": lambda n: torch.var_mean(n.x, 1),
    "norm": lambda n: torch.linalg.vector_norm(n.x, dim=1),
    "layer_norm": lambda n: F.layer_norm(n.x, (8,), n.b, n.b),
    "rms_norm": lambda n: F.rms_norm(n.x, (8,), n.b),
    "sdpa": lambda n: F.scaled_dot_product_attention(n.q, n.q, n.q),
    "sdpa_causal": lambda n: F.scaled_dot_product_attention(n.q, n.q, n.q, is_causal=True),
    "sdpa_mask": lambda n: F.scaled_dot_product_attention(n.q, n.q, n.q, attn_mask=n.q[0, 0, :, :4] > 0),
    "conv1d": lambda n: F.conv1d(n.q[0], n.w.reshape(4, 4, 4)),
    "conv2d": lambda n: F.conv2d(n.q, n.w[:, :8].reshape(8, 2, 2, 2)),
    "embedding": lambda n: F.embedding(n.i, n.w),
    "index_select": lambda n: n.x.index_select(0, n.i),
    "index": lambda n: n.x[n.i],
    "index_two": lambda n: n.x[n.i, n.i + 1],
    "index_dim_1": lambda n: n.x[:, n.i],
    "gather": lambda n: n.x.gather(1, n.i[:, None]),
    "take_along": lambda n: torch.take_along_dim(n.x, n.i[:, None], 1),
    "where": lambda n: torch.where(n.x > 0, n.x, n.y),
    "where_scalar": lambda n: torch.where(n.x > 0, n.x, 0.0),
    "masked_fill": lambda n: n.x.masked_fill(n.y > 0, -1.0),
    "clamp": lambda n: n.x.clamp(-1, 1),
    "compare_and_logic": lambda n: (n.x > 0) & ~(n.y <= n.b),
    "isnan_any": lambda n: n.x.isnan().any(0),
    "cat": lambda n: torch.cat([n.x, n.y, n.x], 1),
    "cat_empty": lambda n: torch.cat([n.x[:0], n.y]),
    "stack": lambda n: torch.stack([n.x, n.y]),
    "split": lambda n: [part * 2 for part in n.x.split(3, 1)],
    "unbind": lambda n: [row + 1 for row in n.x],
    "chunk_rotate": lambda n: torch.cat([-n.x.chunk(2, -1)[1], n.x.chunk(2, -1)[0]], -1),
    "pad": lambda n: F.pad(n.x, (1, 2), value=3.0),
    "repeat": lambda n: n.x.repeat(2, 1),
    "expand_add": lambda n: n.b.expand(4, 8) + n.x,
    "repeat_interleave": lambda n: n.x.repeat_interleave(2, 0),
    "tril": lambda n: torch.tril(n.w),
    "roll_flip": lambda n: n.x.roll(1, 0).flip(1),
    "contiguous": lambda n: n.x.t().contiguous(),
    "reshape_copy": lambda n: n.x.t().reshape(-1),
    "clone": lambda n: n.x.t().clone(),
    "cast_bf16": lambda n: n.x.to(torch.bfloat16),
    "bf16_chain": lambda n: (n.x.bfloat16() @ n.w.bfloat16()).float() * 2,
    "cast_int": lambda n: (n.x * 10).to(torch.int32),
    "zeros_like": lambda n: torch.zeros_like(n.x) + n.x,
    "ones_full_arange": lambda n: torch.ones(8) + torch.full((8,), 0.5) + torch.arange(8) + n.b,
    "arange_start": lambda n: torch.arange(2, 10) * n.i[0],
    "new_zeros": lambda n: n.x.new_zeros(4, 8) + n.y,
    "scalar_tensor": lambda n: n.x * torch.tensor(3.0),
    "host_constant": lambda n: n.b + torch.tensor([float(k) for k in range(8)]),
    "one_hot": lambda n: F.one_hot(n.i, 5),
    "searchsorted": lambda n: torch.searchsorted(torch.arange(4.0), n.b),
    "einsum": lambda n: torch.einsum("ij,kj->ik", n.x, n.y),
    "outer": lambda n: torch.outer(n.b, n.b),
    "complex_rope": lambda n: torch.view_as_real(
        torch.view_as_complex(n.x.view(4, 4, 2)) * torch.polar(torch.ones(4), n.b[:4])
    ),
    "conj": lambda n: torch.view_as_complex(n.x.view(4, 4, 2)).conj() * 2,
    "conj_imag": lambda n: torch.view_as_complex(n.x.view(4, 4, 2)).conj().imag + 1,
    "index_put": lambda n: n.x.index_put((n.i,), n.y),
    "scatter": lambda n: n.x.scatter(1, n.i[:, None], 5.0),
    "masked_assign": lambda n: _assign(n.x.clone(), n.y > 0, 0.0),
    "slice_assign": lambda n: _assign(n.x.clone(), slice(1, 3), n.y[1:3]),
    "slice_assign_scalar": lambda n: _assign(n.x.clone(), slice(1, 3), 7.0),
    "in_place_chain": lambda n: n.x.clone().add_(n.y).mul_(2).sub_(n.b).div_(3).relu_(),
    "fill_zero": lambda n: torch.cat([torch.empty(8).fill_(2.0), torch.empty(8).zero_(), n.b]),
    "out_argument": lambda n: torch.mm(n.x, n.w, out=torch.empty(4, 8)) + n.y,
    "index_copy": lambda n: torch.zeros(4, 8).index_copy_(0, torch.arange(4).flip(0), n.x),
    "view_in_place": lambda n: n.x.clone().t_().unsqueeze_(0) + 1,
    "bincount_free_count": lambda n: torch.zeros(4).index_add_(0, n.i, torch.ones(4)),
    "foreach": lambda n: torch._foreach_add([n.x, n.y], 1.0),
}


def _assign(tensor: Tensor, index: object, value: object) -> Tensor:
    tensor[index] = value
    return tensor


def leaves(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def record(device: EmulatedDevice, fn: Callable[[], object], pool=None):
    """One segment of ``fn`` and its outputs."""
    device.begin_segment(pool or device.new_pool())
    try:
        with torch.no_grad():
            outputs = fn()
        return device.end_segment(), outputs
    finally:
        device.abandon_segment()


@pytest.fixture(scope="module")
def module_device() -> EmulatedDevice:
    return EmulatedDevice()


@pytest.mark.parametrize("name", OPS)
def test_replay_on_fresh_inputs_equals_eager_bit_for_bit(name, module_device):
    inputs = Inputs.make()
    segment, outputs = record(module_device, lambda: OPS[name](inputs))
    for seed in (1, 2):
        inputs.refresh(seed)
        segment.replay()
        expected = leaves(OPS[name](inputs))
        for actual, wanted in zip(leaves(outputs), expected, strict=True):
            assert (actual.shape, actual.stride(), actual.dtype) == (
                wanted.shape,
                wanted.stride(),
                wanted.dtype,
            )
            assert torch.equal(torch.view_as_real(actual) if actual.is_complex() else actual, _real(wanted))


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


@pytest.mark.parametrize("name", ["add", "matmul", "softmax", "topk", "embedding", "cast_bf16", "sdpa"])
def test_capture_does_not_compute(name, module_device):
    inputs = Inputs.make()
    _, outputs = record(module_device, lambda: OPS[name](inputs))
    first = leaves(outputs)[0]
    assert first.isnan().all()


def test_capture_leaves_inputs_and_buffers_untouched(device):
    x = torch.ones(3)
    segment, _ = record(device, lambda: x.add_(1).mul_(3))
    assert x.tolist() == [1, 1, 1]
    segment.replay()
    assert x.tolist() == [6, 6, 6]


def test_views_and_allocations_are_no_nodes(device):
    x = torch.randn(4, 6)

    def forward() -> Tensor:
        torch.empty(3)
        torch.empty_like(x)
        x.new_empty(2)
        return x.view(6, 4).t()[1:].unsqueeze(0).expand(2, 3, 6)

    segment, view = record(device, forward)
    assert segment.num_nodes == 0
    assert torch.equal(view, x.view(6, 4).t()[1:].unsqueeze(0).expand(2, 3, 6))


def test_composite_ops_are_recorded_as_their_parts(device):
    x, w = torch.randn(2, 3, 4), torch.randn(4, 4)
    segment, _ = record(device, lambda: F.linear(x, w))
    assert segment.op_names == ("aten.mm.default",)


def test_shapes_are_remembered_where_a_number_is_nan(monkeypatch):
    """NaN equals nothing, itself included: as part of a key it was a new one with every capture."""
    device, x, mask = EmulatedDevice(), torch.randn(5), torch.arange(5) > 2
    infer, asked = ShapeInference._run_fake, []
    monkeypatch.setattr(
        ShapeInference, "_run_fake", lambda self, *args: asked.append(1) or infer(self, *args)
    )
    for _ in range(3):
        segment, out = record(device, lambda: x.masked_fill(mask, float("nan")))
        segment.replay()
        assert out.isnan().tolist() == mask.tolist()
    assert len(asked) == 1


def test_composite_ops_are_decomposed_in_inference_mode_too(device):
    x, w = torch.randn(2, 3, 4), torch.randn(4, 4)
    with torch.inference_mode():
        segment, out = record(device, lambda: F.linear(x, w))
    segment.replay()
    assert "aten.linear.default" not in segment.op_names
    assert torch.equal(out, F.linear(x, w))


@pytest.mark.parametrize("op", _FAST_FUNCTIONS, ids=str)
def test_every_fast_binding_has_an_out_variant(op):
    assert out_variant(op) is not None


@pytest.mark.parametrize(
    ("fn", "match"),
    [
        (lambda: torch.mm(torch.zeros(2, 3), torch.zeros(2, 3)), "aten.mm.default"),
        (lambda: torch.zeros(3).add_(torch.zeros(4)), "aten.add_.Tensor"),
        (lambda: torch.mm(torch.zeros(2, 3), torch.zeros(3, 2), out=torch.empty(0)), "would resize"),
        (lambda: torch.zeros(3).to_sparse(), "cannot be captured"),
    ],
    ids=["shapes", "in_place_shapes", "resizing_out", "sparse"],
)
def test_what_cannot_run_is_refused_at_capture_with_the_op_and_line(device, fn, match):
    with pytest.raises(CaptureError, match=match) as raised:
        record(device, fn)
    assert "test_emulated_ops.py:" in str(raised.value)


@register_custom_op(out_shape="x")
def emulated_test_double(x: Tensor) -> Tensor:
    return x * 2


@register_custom_op(mutates_args=["cache"])
def emulated_test_store(cache: Tensor, value: Tensor, slot: Tensor) -> None:
    for row, position in zip(value, slot.tolist(), strict=True):  # a kernel may read its own data
        cache[position] = row


@register_custom_op(mutates_args=["state"], out_shape="state")
def emulated_test_advance(state: Tensor, step: float) -> Tensor:
    state += step
    return state * 10


SEEN: list[float] = []


@register_custom_op
def emulated_test_observe(value: Tensor) -> None:
    SEEN.append(float(value.sum()))


def test_an_op_that_returns_and_declares_nothing_runs_at_every_replay(device):
    x = torch.ones(3)
    segment, _ = record(device, lambda: emulated_test_observe(x * 2))
    assert SEEN == []
    for value in (1.0, 5.0):
        x.fill_(value)
        segment.replay()
    assert SEEN == [6.0, 30.0]


@register_custom_op
def emulated_test_note_autograd(value: Tensor) -> None:
    SEEN.append(float(_is_past_autograd()))
    if value[0] < 0:
        raise ValueError("negative")


def _is_past_autograd() -> bool:
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradCPU)


def test_a_replay_goes_past_autograd_and_leaves_it_as_it_was(device, monkeypatch):
    monkeypatch.setattr(op_binding, "is_built_in", lambda op: True)  # others have autograd inside
    x = torch.ones(3)
    segment, _ = record(device, lambda: emulated_test_note_autograd(x))
    SEEN.clear()
    segment.replay()
    assert SEEN == [1.0]
    x.fill_(-1)
    with pytest.raises(ValueError, match="negative"):
        segment.replay()
    assert not _is_past_autograd()
    weight = torch.ones(2, requires_grad=True)
    (weight * 3).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]


def test_custom_op_is_one_opaque_node_run_at_replay(device):
    x = torch.randn(3)
    segment, out = record(device, lambda: emulated_test_double(x) + 1)
    x.normal_()
    segment.replay()
    assert segment.op_names == ("gapless.emulated_test_double.default", "aten.add.Tensor")
    assert torch.equal(out, x * 2 + 1)


def test_mutating_custom_op_reads_its_indices_when_it_runs(device):
    cache, value, slot = torch.zeros(4, 2), torch.ones(2, 2), torch.tensor([0, 1])
    segment, _ = record(device, lambda: emulated_test_store(cache, value, slot))
    assert not cache.any()
    slot.copy_(torch.tensor([3, 2]))
    segment.replay()
    assert cache[:, 0].tolist() == [0, 0, 1, 1]


def test_custom_op_that_mutates_and_returns(device):
    state = torch.zeros(2)
    segment, out = record(device, lambda: emulated_test_advance(state, 2.0))
    assert state.tolist() == [0, 0]
    segment.replay()
    segment.replay()
    assert (state.tolist(), out.tolist()) == ([4, 4], [40, 40])


def test_torch_library_custom_op_replays(device):
    @torch.library.custom_op("gapless_test::triple", mutates_args=())
    def triple(x: Tensor) -> Tensor:
        return x * 3

    triple.register_fake(lambda x: torch.empty_like(x))
    x = torch.ones(2)
    segment, out = record(device, lambda: triple(x))
    x.fill_(5)
    segment.replay()
    assert out.tolist() == [15, 15]


def _slope(x: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad((leaf**3).sum(), leaf)[0]


def test_custom_ops_may_differentiate_inside(device):
    """A replay goes past autograd; what others have written in Python does not."""
    ours = register_custom_op(_slope, out_shape="x", name="emulated_test_slope")
    library = torch.library.Library("gapless_test", "FRAGMENT")
    library.define("slope(Tensor x) -> Tensor")
    library.impl("slope", _slope, "CompositeExplicitAutograd")
    torch.library.register_fake("gapless_test::slope", lambda x: torch.empty_like(x), lib=library)
    theirs = torch.ops.gapless_test.slope.default
    x = torch.ones(2)
    for op in (ours, theirs):
        x.fill_(1)
        with torch.no_grad():
            segment, out = record(device, lambda op=op: op(x))
            x.fill_(2)
            segment.replay()
        assert out.tolist() == [12, 12]


def test_replays_in_inference_mode_leave_it_on_inside_custom_ops(device):
    x = torch.ones(2)
    segment, _ = record(device, lambda: emulated_test_note_autograd(x))
    SEEN.clear()
    with torch.inference_mode():
        segment.replay()
    segment.replay()
    assert SEEN == [1.0, 0.0]


def test_functional_custom_op_without_fake_is_refused(device):
    @torch.library.custom_op("gapless_test::no_fake", mutates_args=())
    def no_fake(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.raises(CaptureError, match=r"no_fake.*fake"):
        record(device, lambda: no_fake(torch.ones(2)))


def test_reset_segment_cannot_replay(device):
    segment, _ = record(device, lambda: torch.ones(3) * 2)
    segment.reset()
    segment.reset()
    assert segment.num_nodes == 0
    with pytest.raises(GraphError, match="was reset"):
        segment.replay()


def test_error_during_replay_names_the_node(device):
    x, index = torch.randn(4), torch.zeros(2, dtype=torch.long)
    segment, _ = record(device, lambda: (x * 2)[index])
    index.fill_(9)
    with pytest.raises(IndexError) as raised:
        segment.replay()
    assert "node 1 of 2: aten.index.Tensor" in raised.value.__notes__[0]

"""Attention of encoders: every backend against dense attention per segment; padding, capture, refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gapless.attention import varlen
from gapless.attention.encoder_interface import VARLEN_INTERFACE_NAME, attach_varlen
from gapless.attention.tile_rules import encoder_tile
from gapless.attention.varlen import (
    Segments,
    TorchReferenceVarlen,
    TorchSegmentsVarlen,
    TritonVarlen,
    create_varlen_backend,
    varlen_backends,
)
from gapless.errors import ConfigError, ModelError
from gapless.graphs.device import get_device

CPU = get_device("cpu")
BACKENDS = {made.name: made for made in (TorchReferenceVarlen, TorchSegmentsVarlen, TritonVarlen)}
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernel"
)


def segments_of(lens: tuple[int, ...], *, slots: int | None = None, max_len: int | None = None) -> Segments:
    """Boundaries of ``lens``, with empty ones behind them up to ``slots``."""
    filled = [*lens, *[0] * ((slots or len(lens)) - len(lens))]
    starts = torch.tensor([0, *torch.tensor(filled, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)
    return Segments(
        cu_seqlens=starts,
        cu_seqlens_kk=torch.tensor(filled, dtype=torch.int32),
        max_len=max_len or max(lens),
        lengths=lens,
    )


def make(
    num_rows: int,
    lens: tuple[int, ...],
    *,
    head_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of two heads; rows outside all segments hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(num_rows, 2, head_size, generator=generator).to(dtype) for _ in range(3)]
    for tensor in made:
        tensor[sum(lens) :] = float("nan")
    return made[0], made[1], made[2]


def dense(query: Tensor, key: Tensor, value: Tensor, lens: tuple[int, ...], scale: float) -> Tensor:
    out = torch.zeros(query.shape)
    start = 0
    for length in lens:
        own = slice(start, start + length)
        score = torch.einsum("qhd,khd->hqk", query[own].float(), key[own].float()) * scale
        out[own] = torch.einsum("hqk,khd->qhd", score.softmax(-1), value[own].float())
        start += length
    return out


def check(
    backend: Any, num_rows: int, lens: tuple[int, ...], *, segments: Segments | None = None, **options: Any
) -> None:
    query, key, value = make(num_rows, lens, **options)
    segments = segments or segments_of(lens)
    out = torch.full_like(query, float("nan"))
    backend.attend(query, key, value, out, backend.arguments(segments), scale=0.3)
    tolerance = TOLERANCE[query.dtype]
    torch.testing.assert_close(
        out.float(), dense(query, key, value, lens, 0.3), atol=tolerance, rtol=tolerance
    )
    assert (out[sum(lens) :] == 0).all()


@interpreted
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_size", [16, 40, 64, 72, 80, 96, 128])
@pytest.mark.parametrize("name", BACKENDS)
def test_every_head_size_and_dtype_equals_dense_attention(
    name: str, head_size: int, dtype: torch.dtype
) -> None:
    check(BACKENDS[name](), 80, (33, 4, 1, 30), head_size=head_size, dtype=dtype)


@interpreted
@pytest.mark.parametrize(
    ("num_rows", "lens"),
    [
        (1, (1,)),
        (8, (8,)),
        (70, (70,)),
        (64, (32, 32)),
        (130, (64, 64)),
        (36, (1,) * 12),
        (40, (4,) * 9),
        (40, (0, 5, 0, 0, 7, 0)),
        (140, (65, 64, 1)),
        (33, ()),
    ],
)
@pytest.mark.parametrize("name", BACKENDS)
def test_any_segments_equal_dense_attention_and_other_rows_are_zero(name, num_rows, lens) -> None:
    check(BACKENDS[name](), num_rows, lens, segments=segments_of(lens, max_len=max(lens, default=1)))


@interpreted
@pytest.mark.parametrize("name", ["torch_reference", "triton_varlen"])
def test_slots_for_more_segments_and_a_larger_bound_change_nothing(name) -> None:
    lens = (9, 30, 2)
    check(BACKENDS[name](), 60, lens, segments=segments_of(lens, slots=300, max_len=60))


@interpreted
@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(0, 30))
def test_the_kernel_equals_the_reference_on_random_segments(lens, num_pads) -> None:
    num_rows = sum(lens) + num_pads
    if num_rows:
        check(TritonVarlen(), num_rows, tuple(lens), segments=segments_of(tuple(lens), max_len=max(1, *lens)))


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter's numpy
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_segment_that_holds_no_numbers_spoils_no_other(name: str, broken: float) -> None:
    """Images of different requests are packed together: one may overflow in half precision."""
    lens = (20, 7, 40, 13)
    query, key, value = make(90, lens)
    expected = dense(query, key, value, lens, 0.3)
    for tensor in (query, key, value):
        tensor[20 + 3, 1] = broken  # one head of one row of the second segment
    backend, out = BACKENDS[name](), torch.empty_like(query)
    backend.attend(query, key, value, out, backend.arguments(segments_of(lens)), scale=0.3)
    others = torch.ones(90, dtype=torch.bool)
    others[20:27] = False
    torch.testing.assert_close(out[others], expected[others], atol=3e-6, rtol=0)
    assert not out[20:27, 1].isfinite().any()


@interpreted
def test_rows_of_any_stride_are_taken() -> None:
    """Values are a slice of the joint projection in Transformers' towers."""
    lens, num_rows = (20, 13), 40
    qkv = torch.randn(num_rows, 3, 2, 16)
    query, key, value = qkv.unbind(1)
    expected = dense(query, key, value, lens, 0.3)
    for made in BACKENDS.values():
        backend, out = made(), torch.empty(num_rows, 2, 16)
        backend.attend(query, key, value, out, backend.arguments(segments_of(lens)), scale=0.3)
        torch.testing.assert_close(out, expected, atol=3e-6, rtol=0)


def test_windows_cost_what_windows_are() -> None:
    """A bound on the length is a band of keys: no score is computed that no segment can need."""
    widest = []

    lens = (8,) * 64
    query, key, value = make(512, lens)
    out = torch.empty_like(query)
    softmax = torch.Tensor.softmax

    def watch(tensor: Tensor, dim: int) -> Tensor:
        widest.append(tensor.shape[-1])
        return softmax(tensor, dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "softmax", watch)
        TorchReferenceVarlen().attend(query, key, value, out, [segments_of(lens).cu_seqlens, 8], scale=1.0)
    assert max(widest) <= 128 + 2 * 7


@interpreted
@pytest.mark.parametrize("name", ["torch_reference", "triton_varlen"])
def test_a_captured_launch_serves_other_boundaries(name) -> None:
    """Ten rows cut 4 + 6, replayed for 5 + 5, 10 and 1 + 2 + 3: the boundaries are data."""
    backend = BACKENDS[name]()
    query, key, value = make(10, (10,))
    segments, out = segments_of((4, 6), slots=4, max_len=10), torch.zeros(10, 2, 16)
    CPU.begin_segment(CPU.new_pool())
    try:
        backend.attend(query, key, value, out, backend.arguments(segments), scale=0.3)
        recorded = CPU.end_segment()
    finally:
        CPU.abandon_segment()
    for lens in ((4, 6), (5, 5), (10,), (1, 2, 3)):
        fresh = segments_of(lens, slots=4)
        segments.cu_seqlens.copy_(fresh.cu_seqlens)
        segments.cu_seqlens_kk.copy_(fresh.cu_seqlens_kk)
        out.fill_(float("nan"))
        recorded.replay()
        torch.testing.assert_close(out, dense(query, key, value, lens, 0.3), atol=3e-6, rtol=0)
    recorded.reset()


@interpreted
def test_a_launch_depends_on_shapes_and_bounds_never_on_data(monkeypatch) -> None:
    from gapless.attention import triton_varlen

    grids = []
    monkeypatch.setattr(triton_varlen, "launch", lambda kernel, grid, args, constants: grids.append(grid))
    for lens in ((64,), (1,) * 64, (), (30, 34)):
        query, key, value = make(64, lens)
        TritonVarlen().attend(
            query,
            key,
            value,
            query,
            TritonVarlen().arguments(segments_of(lens, slots=64, max_len=64)),
            scale=1.0,
        )
    assert len(set(grids)) == 1


@interpreted
@pytest.mark.parametrize(("head_size", "first", "unit"), [(72, 0, 8), (72, 1, 8), (68, 0, 4), (33, 0, 1)])
def test_a_head_is_split_where_all_of_it_is_read_16_bytes_at_a_time(
    head_size: int, first: int, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``first``: the element of the buffer that the rows start at."""
    from gapless.attention import triton_varlen

    launched = []

    def note(kernel: Any, grid: Any, args: Any, constants: Any) -> None:
        launched.append((args[-8:], constants))
        launch(kernel, grid, args, constants)

    launch = triton_varlen.launch
    monkeypatch.setattr(triton_varlen, "launch", note)
    lens = (33, 7)
    buffer = torch.randn(40 * 6 * head_size + first).to(torch.bfloat16)
    query, key, value = buffer[first:].view(40, 3, 2, head_size).unbind(1)
    out = torch.empty(40, 2, head_size, dtype=torch.bfloat16)
    TritonVarlen().attend(query, key, value, out, TritonVarlen().arguments(segments_of(lens)), scale=0.3)
    torch.testing.assert_close(out.float(), dense(query, key, value, lens, 0.3), atol=3e-2, rtol=3e-2)
    strides, constants = launched[0]
    rows = 6 * head_size // unit
    assert strides == (rows, head_size // unit) * 3 + (rows // 3, head_size // unit)
    assert (constants["STRIDE_UNIT"], constants["HAS_B"]) == (unit, unit == 8 and first == 0)


def test_arguments_are_those_that_encoders_give_elsewhere() -> None:
    segments = segments_of((3, 4))
    assert TritonVarlen().arguments(segments) == [segments.cu_seqlens, segments.cu_seqlens_kk, 4]
    flash = varlen.TorchFlashVarlen()
    assert flash.arguments(segments) == [segments.cu_seqlens, 4]


@pytest.mark.parametrize(
    ("name", "device_type", "expected"),
    [
        ("auto", "cpu", "torch_reference"),
        ("auto", "cuda", "triton_varlen"),
        ("torch_segments", "cpu", "torch_segments"),
        ("torch_varlen", "cuda", "torch_varlen"),
        ("torch_reference", "cuda", "torch_reference"),
    ],
)
def test_names_of_backends(name, device_type, expected) -> None:
    assert create_varlen_backend(name, device_type=device_type).name == expected


def test_auto_without_triton_is_the_reference(monkeypatch) -> None:
    monkeypatch.setattr(varlen.importlib.util, "find_spec", lambda name: None)
    assert create_varlen_backend("auto", device_type="cuda").name == "torch_reference"
    with pytest.raises(ConfigError, match="install triton"):
        create_varlen_backend("triton_varlen", device_type="cuda")


@pytest.mark.parametrize(
    ("name", "device_type", "message"),
    [
        ("flash", "cpu", "does not exist; choose from auto, torch_reference, torch_segments$"),
        ("torch_varlen", "cpu", "does not run on cpu"),
        ("triton_varlen", "cpu", "does not run on cpu"),
    ],
)
def test_backends_that_cannot_run_are_refused(name, device_type, message) -> None:
    with pytest.raises(ConfigError, match=message):
        create_varlen_backend(name, device_type=device_type)
    assert "torch_varlen" in varlen_backends()


def test_flash_attention_of_pytorch_refuses_what_it_cannot_do() -> None:
    backend = varlen.TorchFlashVarlen()
    query, key, value = make(4, (4,))
    with pytest.raises(ConfigError, match="float16 and bfloat16 on CUDA"):
        backend.attend(query, key, value, query, backend.arguments(segments_of((4,))), scale=1.0)


def test_a_pytorch_without_varlen_attention_is_named(monkeypatch) -> None:
    import sys

    varlen._torch_varlen_attn.cache_clear()
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    with pytest.raises(ConfigError, match=r"torch\.nn\.attention\.varlen"):
        varlen.TorchFlashVarlen()
    monkeypatch.undo()
    varlen._torch_varlen_attn.cache_clear()


def test_lengths_on_the_host_are_asked_for_where_they_are_needed() -> None:
    segments = segments_of((3,))
    without = Segments(cu_seqlens=segments.cu_seqlens, cu_seqlens_kk=segments.cu_seqlens_kk, max_len=3)
    with pytest.raises(ConfigError, match="exact mode"):
        TorchSegmentsVarlen().arguments(without)


@interpreted
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q: (torch.zeros(4, 2, 160),) * 4, "head sizes up to 128"),
        (lambda q: (q.transpose(1, 2),) * 4, "contiguous heads"),
    ],
)
def test_the_kernel_refuses_tensors_it_cannot_take(change, message) -> None:
    query, _, _ = make(4, (4,))
    tensors = change(query)
    backend = TritonVarlen()
    with pytest.raises(ConfigError, match=message):
        backend.attend(*tensors, backend.arguments(segments_of((4,))), scale=1.0)


@interpreted
@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan")])
def test_the_kernel_refuses_scales_that_do_not_keep_the_order_of_scores(scale: float) -> None:
    query, key, value = make(4, (4,))
    backend = TritonVarlen()
    with pytest.raises(ConfigError, match="positive scale"):
        backend.attend(query, key, value, query, backend.arguments(segments_of((4,))), scale=scale)


@pytest.mark.parametrize(
    ("num_heads", "num_rows", "max_len", "itemsize", "tile"),
    [
        (16, 1024, 1024, 2, (64, 64, 4, 3)),
        (16, 1056, 1056, 2, (64, 64, 4, 3)),
        (16, 1057, 1057, 2, (64, 128, 4, 2)),
        (12, 1408, 1408, 2, (64, 64, 4, 3)),
        (16, 8192, 64, 2, (64, 64, 4, 3)),
        (16, 8192, 8192, 2, (64, 128, 4, 2)),
        (16, 8192, 8192, 4, (64, 32, 4, 2)),
    ],
)
def test_few_rows_get_small_tiles(num_heads, num_rows, max_len, itemsize, tile) -> None:
    chosen = encoder_tile(num_heads=num_heads, num_rows=num_rows, max_len=max_len, itemsize=itemsize)
    assert (chosen.block_q, chosen.block_n, chosen.num_warps, chosen.num_stages) == tile


class Module(nn.Module):
    """What Transformers' attention of a tower looks like to us."""

    def __init__(self, *, is_causal: bool = False) -> None:
        super().__init__()
        self.scaling, self.is_causal, self.config = 0.3, is_causal, SimpleNamespace()


class Tower(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.config = nn.ModuleList(layers), SimpleNamespace(_attn_implementation="sdpa")


def attend(module: nn.Module, *tensors: Tensor, **options: Any) -> Tensor:
    from transformers import AttentionInterface

    heads_first = [tensor.transpose(0, 1)[None] for tensor in tensors]
    mask = options.pop("mask", None)
    return AttentionInterface()[VARLEN_INTERFACE_NAME](module, *heads_first, mask, **options)[0][0]


def test_a_module_gets_the_varlen_path_with_what_transformers_passes() -> None:
    tower = Tower(Module(), Module())
    assert attach_varlen(tower, TorchReferenceVarlen()) == 2  # type: ignore[arg-type]
    assert "flash" in tower.config._attn_implementation
    query, key, value = make(10, (4, 6))
    starts = torch.tensor([0, 4, 10], dtype=torch.int32)
    out = attend(
        tower.layers[0], query, key, value, scaling=0.3, cu_seq_lens_q=starts, max_length_q=6, is_causal=False
    )
    torch.testing.assert_close(out, dense(query, key, value, (4, 6), 0.3), atol=3e-6, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": torch.zeros(1)}, "mask True"),
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"softcap": 3.0}, "softcap"),
        ({"cu_seq_lens_q": None}, "precomputed"),
    ],
)
def test_what_would_change_the_result_is_refused(options, message) -> None:
    tower = Tower(Module())
    attach_varlen(tower, TorchReferenceVarlen())  # type: ignore[arg-type]
    given = {
        "scaling": 1.0,
        "cu_seq_lens_q": torch.tensor([0, 4], dtype=torch.int32),
        "max_length_q": 4,
        **options,
    }
    with pytest.raises(ModelError, match=message):
        attend(tower.layers[0], *make(4, (4,)), **given)


def test_models_that_are_no_encoders_are_refused() -> None:
    with pytest.raises(ModelError, match="is causal"):
        attach_varlen(Tower(Module(is_causal=True)), TorchReferenceVarlen())  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="no attention modules"):
        attach_varlen(Tower(), TorchReferenceVarlen())  # type: ignore[arg-type]

"""Kernels of steps with images, under Triton's interpreter, against the torch operations they stand for."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from gapless.errors import ConfigError
from gapless.kernels.media import embed_media, fused_add_media_rms_norm
from gapless.kernels.mrope import axis_rows, write_axis_rows
from gapless.kernels.rope_cache import rotate_heads, rotate_into_cache
from gapless.models.mrope import AxisAngles
from gapless.models.rope import RopeConfig
from kernel_oracles import DTYPES, assert_close_to, norm_oracle, poisoned_caches

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"),
]


def angles_of(
    sections: tuple[int, int, int],
    layout: Literal["chunked", "interleaved"],
    dtype: torch.dtype,
    factor: float,
) -> AxisAngles:
    config = RopeConfig(
        rope_type="default",
        theta=5000.0,
        head_size=2 * sum(sections),
        attention_factor=factor,
        axis_sections=sections,
        axis_layout=layout,
    )
    return AxisAngles(config, dtype=dtype, device=torch.device("cpu"))


def rows_of(angles: AxisAngles, positions: Tensor) -> Tensor:
    return axis_rows(positions, angles.frequencies_F, angles.axes_F, angles.factor, angles.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize(
    ("layout", "sections"),
    [
        ("chunked", (16, 24, 24)),
        ("chunked", (3, 2, 2)),
        ("interleaved", (24, 20, 20)),
        ("interleaved", (4, 3, 2)),
        ("interleaved", (6, 1, 1)),
    ],
)
def test_rows_are_those_of_the_torch_operations(
    layout: Literal["chunked", "interleaved"],
    sections: tuple[int, int, int],
    factor: float,
    dtype: torch.dtype,
) -> None:
    angles = angles_of(sections, layout, dtype, factor)
    positions_3T = torch.randint(0, 60_000, (3, 7), dtype=torch.int32)
    assert_close_to(rows_of(angles, positions_3T), angles(positions_3T), fraction=0.05)
    assert_close_to(rows_of(angles, positions_3T[1]), angles(positions_3T[1]), fraction=0.05)


def test_positions_may_be_a_part_of_a_larger_tensor() -> None:
    angles = angles_of((4, 2, 2), "interleaved", torch.float32, 1.0)
    static_3T = torch.randint(0, 900, (3, 40), dtype=torch.int32)
    part_3T, by_token_T3 = static_3T[:, 3:8], static_3T.t().contiguous()
    assert_close_to(rows_of(angles, part_3T), angles(part_3T))
    assert_close_to(rows_of(angles, by_token_T3.t()[:, 3:8]), angles(part_3T))
    assert rows_of(angles, static_3T[:, :0]).shape == (0, 2, 8)


@pytest.mark.parametrize("shape", [(), (3, 2, 1)])
def test_positions_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    angles = angles_of((4, 2, 2), "chunked", torch.float32, 1.0)
    with pytest.raises(ConfigError, match=r"by axis they are \[A, T\], or \[T\]"):
        write_axis_rows(
            torch.zeros(shape, dtype=torch.int32),
            angles.frequencies_F,
            angles.axes_F,
            1.0,
            torch.zeros(4, 2, 8),
        )


@pytest.mark.parametrize(
    "rows", [torch.zeros(4, 2, 8), torch.zeros(3, 2, 16)[:, :, ::2]], ids=["long", "gaps"]
)
def test_rows_go_into_memory_that_fits_them(rows: Tensor) -> None:
    angles = angles_of((4, 2, 2), "chunked", torch.float32, 1.0)
    positions = torch.randint(0, 900, (3, 3), dtype=torch.int32)
    inputs = (positions, angles.frequencies_F, angles.axes_F, 1.0)
    with pytest.raises(ConfigError, match=r"must be \(3, 2, 8\) and contiguous"):
        write_axis_rows(*inputs, rows)
    out = torch.full((3, 2, 8), torch.nan)
    write_axis_rows(*inputs, out)
    assert torch.equal(out, rows_of(angles, positions))


@pytest.mark.parametrize("has_norm", [False, True])
def test_a_table_of_the_step_needs_no_positions(has_norm: bool) -> None:
    torch.manual_seed(0)
    angles = angles_of((4, 2, 2), "interleaved", torch.float32, 1.0)
    table = rows_of(angles, torch.randint(0, 99, (3, 5), dtype=torch.int32))
    qkv, weight = torch.randn(5, 8 * 16), torch.randn(6, 16) if has_norm else None
    row, slots = torch.arange(5, dtype=torch.int32), torch.tensor([17, 3, 20, 1, 31], dtype=torch.int32)
    made = []
    for index in (None, row):
        caches = poisoned_caches(2, 16, 2, 16, dtype=torch.float32)
        query = rotate_into_cache(qkv, weight, 1e-6, table, index, slots, *caches)
        made.append([query, rotate_heads(qkv, weight, 1e-6, table, index, 2), *caches])
    for without, with_rows in zip(*made, strict=True):
        torch.testing.assert_close(without, with_rows, atol=0, rtol=0, equal_nan=True)


MASKS = [torch.tensor([0, 1, 1, 0], dtype=torch.int32), torch.tensor([False, True, True, False])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_media", MASKS, ids=["int32", "bool"])
@pytest.mark.parametrize("size", [24, 1500])
def test_embeddings_are_rows_of_one_or_the_other(size: int, is_media: Tensor, dtype: torch.dtype) -> None:
    embedding, media = torch.randn(9, size).to(dtype), torch.randn(4, 2, size).to(dtype)[:, 1]
    media[~is_media.bool()] = torch.nan
    ids = torch.tensor([3, 0, 8, 8], dtype=torch.int32)
    made = embed_media(ids, embedding, media, is_media)
    assert torch.equal(made, torch.where(is_media.bool()[:, None], media, embedding[ids]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_media", [*MASKS, None], ids=["int32", "bool", "everywhere"])
@pytest.mark.parametrize("size", [24, 1100])
def test_media_joins_the_sum_before_the_norm(size: int, is_media: Tensor | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    update, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((4, size), (4, size), (size,)))
    media = torch.randn(4, 3, size).to(dtype)[:, 1]
    if is_media is not None:
        media[~is_media.bool()] = torch.nan
    total, normed = fused_add_media_rms_norm(update, residual, media, is_media, weight, 1e-6)
    rows = media if is_media is None else torch.where(is_media.bool()[:, None], media, 0.0)
    expected = residual + update + rows
    assert torch.equal(total, expected), "the residual stream is bit-equal"
    assert_close_to(normed, norm_oracle(expected, weight, 1e-6))


def test_no_rows_launch_nothing() -> None:
    none, rows = torch.zeros(0, dtype=torch.int32), torch.zeros(0, 8)
    assert embed_media(none, torch.zeros(3, 8), rows, none).shape == (0, 8)
    total, normed = fused_add_media_rms_norm(rows, rows, rows, none, torch.ones(8), 1e-6)
    assert total.shape == normed.shape == (0, 8)

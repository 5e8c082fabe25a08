"""Kernels of steps with images as compiled, and pixels on their way to the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from gapless.graphs.device.upload import HostRows, RawRows, UploadRing
from gapless.kernels.layer_norm import fused_add_layer_norm
from gapless.kernels.media import embed_media, fused_add_media_rms_norm
from gapless.kernels.mrope import axis_rows
from gapless.kernels.pixels import write_values
from gapless.models.mrope import AxisAngles
from gapless.models.rope import RopeConfig
from gapless.models.vision.pixels import patch_rows
from gapless.multimodal.items import MediaItem, Normalisation
from kernel_oracles import DTYPES, assert_close_to, norm_oracle

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layout", "sections"), [("chunked", (16, 24, 24)), ("interleaved", (24, 20, 20))])
def test_angles_of_far_positions_are_exact(
    layout: Any, sections: tuple[int, int, int], dtype: torch.dtype
) -> None:
    config = RopeConfig(
        rope_type="default", theta=5e6, head_size=128, axis_sections=sections, axis_layout=layout
    )
    angles = AxisAngles(config, dtype=dtype, device=DEVICE)
    positions_3T = torch.randint(262_144, (3, 700), dtype=torch.int32, device=DEVICE)
    made = axis_rows(positions_3T, angles.frequencies_F, angles.axes_F, angles.factor, dtype)
    assert_close_to(made, angles(positions_3T))
    exact_TF = positions_3T.double()[angles.axes_F].t() * angles.frequencies_F.double()
    rounded_TF = exact_TF.float().double()  # the angle is a float32
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    torch.testing.assert_close(made[:, 0].double(), rounded_TF.cos(), atol=tolerance, rtol=0)
    torch.testing.assert_close(made[:, 1].double(), rounded_TF.sin(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("num_tokens", [1, 64, 4096])
@pytest.mark.parametrize("mask_dtype", [torch.int32, torch.bool])
def test_rows_of_media_join_embeddings_and_sums(num_tokens: int, mask_dtype: torch.dtype) -> None:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE).bfloat16()

    is_media = (torch.rand(num_tokens, device=DEVICE) < 0.5).to(mask_dtype)
    chosen = is_media.bool()[:, None]
    embedding, media = draw(999, 4096), draw(num_tokens, 4096).masked_fill(~chosen, torch.nan)
    ids = torch.randint(999, (num_tokens,), dtype=torch.int32, device=DEVICE)
    made = embed_media(ids, embedding, media, is_media)
    assert torch.equal(made, torch.where(chosen, media, embedding[ids]))
    update, residual, weight = draw(num_tokens, 4096), draw(num_tokens, 4096), draw(4096)
    features = draw(num_tokens, 3, 4096).masked_fill(~chosen[:, None], torch.nan)[:, 1]
    total, normed = fused_add_media_rms_norm(update, residual, features, is_media, weight, 1e-6)
    expected = residual + update + torch.where(chosen, features, 0.0)
    assert torch.equal(total, expected)
    assert_close_to(normed, norm_oracle(expected, weight, 1e-6))


@pytest.mark.parametrize("num_rows", [1, 196, 8192])
def test_addition_and_layer_norm_equal_two_steps(num_rows: int) -> None:
    update, residual = (torch.randn(num_rows, 1152, device=DEVICE).bfloat16() for _ in range(2))
    weight, bias = (torch.randn(1152, device=DEVICE).bfloat16() for _ in range(2))
    total, normed = fused_add_layer_norm(update, residual, weight, bias, 1e-6)
    assert torch.equal(total, residual + update)
    assert_close_to(normed, torch.nn.functional.layer_norm(total, (1152,), weight, bias, 1e-6))


def test_pixels_that_are_sent_while_the_device_is_busy_arrive_one_after_the_other() -> None:
    target = torch.zeros(64, 1536, dtype=torch.bfloat16, device=DEVICE)
    ring = UploadRing(target)
    generator = np.random.default_rng(0)
    batches = [generator.standard_normal((64, 1536), np.float32) for _ in range(6)]
    seen = []
    torch.cuda._sleep(50_000_000)
    for batch in batches:
        sent = batch.copy()
        ring.send(HostRows([sent[:20], sent[20:]]))
        sent[:] = np.nan
        seen.append(target.clone())
    for batch, rows in zip(batches, seen, strict=True):
        assert torch.equal(rows.cpu(), torch.from_numpy(batch).bfloat16())


def pixels_item(num_patches: int, size: int, num_repeats: int, *, seed: int) -> MediaItem:
    """Every byte of every channel is among the pixels, where there is room."""
    shape = (num_patches, 3, size)
    random = np.random.default_rng(seed).permutation(np.arange(np.prod(shape)) % 256).astype(np.uint8)
    return MediaItem(
        kind="image",
        patches_PC=random.reshape(num_patches, -1),
        grid_thw=(1, 1, num_patches),
        known_hash=b"",
        ranges=((0, 1),),
        normalisation=Normalisation(
            rescale_factor=1 / 255,
            mean=(0.48145466, 0.4578275, 0.40821073),
            std=(0.26862954, 0.26130258, 0.27577711),
            num_repeats=num_repeats,
        ),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [196, 256, 392, 512, 7])
def test_pixels_become_the_bits_that_the_host_would_have_uploaded(size: int, dtype: torch.dtype) -> None:
    for num_patches, num_repeats in ((1, 1), (333, 2), (1024, 1)):
        item = pixels_item(num_patches, size, num_repeats, seed=size)
        made = patch_rows([item]).to(device=DEVICE, dtype=dtype)
        expected = torch.from_numpy(item.values_PC()).to(dtype)
        assert torch.equal(made.cpu().view(torch.uint8), expected.view(torch.uint8))
        plain = torch.empty_like(made)
        assert item.normalisation is not None
        table = torch.from_numpy(item.normalisation.table()).to(dtype).to(DEVICE)
        raw = torch.from_numpy(item.patches_PC).to(DEVICE)
        write_values(raw, table, num_repeats, plain, is_fused=False)
        assert torch.equal(plain, made)


def test_bytes_that_are_sent_while_the_device_is_busy_become_values_one_after_the_other() -> None:
    """The bytes of all sends are in one place on the device."""
    target = torch.zeros(64, 1536, dtype=torch.bfloat16, device=DEVICE)
    ring, seen, expected = UploadRing(target), [], []
    batches = [[pixels_item(20, 256, 2, seed=n), pixels_item(44, 512, 1, seed=n + 9)] for n in range(6)]
    ring.send(patch_rows(batches[0]))  # compiles, and copies the table
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    for items in batches:
        rows = patch_rows(items)
        assert isinstance(rows, RawRows)
        expected.append(torch.from_numpy(np.concatenate([item.values_PC() for item in items])).bfloat16())
        ring.send(rows)
        for item in items:
            item.patches_PC[:] = 0
        seen.append(target.clone())
    for values, rows in zip(expected, seen, strict=True):
        assert torch.equal(rows.cpu(), values)

"""Pixels that are normalised where a tower runs are the values of Transformers' processors, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from encoder_cases import CONFIGS, GRIDS, assert_equal, fill, media, runner_of, tiny_tower
from gapless.errors import ModelError
from gapless.graphs.device import get_device
from gapless.graphs.device.upload import HostRows, RawRows
from gapless.models.vision import grids
from gapless.models.vision.pixels import patch_rows
from gapless.models.vision.tower import make_tower
from gapless.multimodal.items import MediaItem, Normalisation

CPU = get_device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLIP = Normalisation(
    rescale_factor=1 / 255, mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711)
)
HALF = Normalisation(rescale_factor=1 / 255, mean=(0.5,) * 3, std=(0.5,) * 3)
ODD = Normalisation(rescale_factor=1 / 127.5, mean=(1.0, 0.3, -0.7), std=(0.1, 3.0, -1.3))


def item_of(values_PKA: np.ndarray, normalisation: Normalisation | None) -> MediaItem:
    """Pixels have their channels side by side, values have not."""
    in_order = values_PKA if normalisation is None else values_PKA.transpose(0, 2, 1)
    patches_PC = in_order.reshape(len(values_PKA), -1)
    grid = (1, 1, len(patches_PC))
    return MediaItem(
        kind="image",
        patches_PC=patches_PC,
        grid_thw=grid,
        known_hash=b"",
        ranges=((0, 1),),
        normalisation=normalisation,
    )


def random_pixels(num_patches: int, size: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_patches, 3, size), np.uint8)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_repeats", [1, 2])
@pytest.mark.parametrize("normalisation", [CLIP, HALF, ODD], ids=["clip", "half", "odd"])
def test_every_byte_of_every_channel_has_the_bits_of_the_processor(normalisation, num_repeats, dtype) -> None:
    every = np.arange(256, dtype=np.uint8)
    pixels_PKA = np.stack([np.stack([np.roll(every, s + k) for k in range(3)]) for s in range(2)])
    item = item_of(pixels_PKA, replace(normalisation, num_repeats=num_repeats))
    # As Transformers does it: rescaled in float64 and rounded, then two steps of float32.
    scaled = (pixels_PKA.astype(np.float64) * normalisation.rescale_factor).astype(np.float32)
    mean_K1, std_K1 = (np.array(v, np.float32)[:, None] for v in (normalisation.mean, normalisation.std))
    values_PKA = (scaled - mean_K1) / std_K1
    values_PC = np.repeat(values_PKA[:, :, None], num_repeats, axis=2).reshape(2, -1)
    assert np.array_equal(item.values_PC().view(np.uint32), values_PC.view(np.uint32))
    rows = patch_rows([item])
    assert isinstance(rows, RawRows)
    assert rows.num_bytes == pixels_PKA.size
    made = rows.to(device=torch.device("cpu"), dtype=dtype)
    uploaded_before = HostRows([values_PC]).to(device=torch.device("cpu"), dtype=dtype)
    assert torch.equal(bits(made), bits(uploaded_before))


def test_pictures_and_videos_of_several_normalisations_share_a_run() -> None:
    items = [
        item_of(random_pixels(3, 4, seed=1), replace(CLIP, num_repeats=2)),
        item_of(random_pixels(1, 4, seed=2), replace(CLIP, num_repeats=2)),
        item_of(random_pixels(5, 8, seed=3), CLIP),
        item_of(random_pixels(2, 8, seed=4), ODD),
    ]
    rows = patch_rows(items)
    assert isinstance(rows, RawRows)
    assert rows.shape == (11, 24)
    expected = torch.from_numpy(np.concatenate([item.values_PC() for item in items]))
    assert torch.equal(rows.to(device=torch.device("cpu"), dtype=torch.float32), expected)


def test_pixels_that_share_a_run_with_values_become_values() -> None:
    pixels = item_of(random_pixels(3, 4), replace(CLIP, num_repeats=2))
    values = item_of(np.random.default_rng(0).standard_normal((2, 3, 8), np.float32), None)
    for items in ([pixels, values], [values, pixels], [values]):
        rows = patch_rows(items)
        assert isinstance(rows, HostRows)
        expected = torch.from_numpy(np.concatenate([item.values_PC() for item in items]))
        assert torch.equal(rows.to(device=torch.device("cpu"), dtype=torch.float32), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["budget", "exact", "off"])
@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_a_tower_makes_the_same_of_pixels_and_of_their_values(model_type, mode, dtype) -> None:
    runner = runner_of(tiny_tower(model_type, device=CPU, dtype=dtype), mode, device=CPU)
    tower = runner.adapter
    pixels = [media(tower, grid, seed=3, is_pixels=True) for grid in GRIDS[:5]]
    values = [replace(item, patches_PC=item.values_PC(), normalisation=None) for item in pixels]
    expected = runner.run(values)
    assert_equal(runner.run(pixels), expected)
    assert_equal(runner.run([pixels[0], values[1], *pixels[2:]]), expected)
    assert_equal(runner.eager(pixels), runner.eager(values))
    if mode != "off":
        assert runner._memory is not None
        runner._memory.inputs.poison = True
        assert_equal(runner.run(pixels), expected)


def test_pixels_of_another_type_or_width_are_refused() -> None:
    tower = tiny_tower("qwen3_vl", device=CPU)
    item = media(tower, (1, 4, 4), is_pixels=True)
    assert tower.sizes_of(item)["tokens"] == 16
    with pytest.raises(ModelError, match="type float32"):
        tower.sizes_of(replace(item, patches_PC=item.patches_PC.astype(np.float32)))
    for broken in (
        replace(item, patches_PC=item.patches_PC[:, 1:]),
        replace(item, patches_PC=item.patches_PC[:8]),
        replace(item, normalisation=CLIP),
        replace(item, normalisation=replace(CLIP, num_repeats=7)),
        replace(item, normalisation=None),
    ):
        with pytest.raises(ModelError, match="do not belong to grid"):
            tower.sizes_of(broken)


@pytest.mark.parametrize("num_channels", [1, 4])
@pytest.mark.parametrize("mode", ["budget", "exact", "off"])
@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_a_tower_of_other_than_three_channels_runs_on_values(model_type, mode, num_channels) -> None:
    config = {**CONFIGS[model_type], "in_channels": num_channels}
    tower = make_tower(model_type, config, dtype=torch.float32, device=CPU.torch_device)
    fill(tower)
    runner = runner_of(tower, mode, device=CPU).capture()
    items = [media(tower, grid, seed=3) for grid in GRIDS[:4]]
    for found, expected in zip(runner.run(items), runner.eager(items), strict=True):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    blank = tower.blank((1, 4, 4), pixels=np.random.default_rng(0))
    assert tower.sizes_of(blank)["tokens"] == 16
    assert blank.values_PC().dtype == np.float32
    pixels = media(tiny_tower(model_type, device=CPU), (1, 4, 4), is_pixels=True)
    wide = np.zeros((16, tower.patch_values // 2), np.uint8)
    with pytest.raises(ModelError, match=f"in {num_channels} channels cannot be normalised"):
        runner.run([replace(pixels, patches_PC=wide)])


@pytest.mark.parametrize("max_graphs", [1, 8])
@pytest.mark.parametrize("mode", ["budget", "exact"])
@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_what_is_kept_of_a_grid_never_reaches_another_one(model_type, mode, max_graphs, monkeypatch) -> None:
    """Grids with the same counts share a graph and its inputs; what is kept of them comes and goes."""
    monkeypatch.setattr(grids, "_MAX_KEPT", 2)
    kept = {"max_graphs": max_graphs} if mode == "exact" else {}
    runner = runner_of(tiny_tower(model_type, device=CPU), mode, device=CPU, **kept)
    same_counts = [(1, 4, 6), (1, 6, 4), (1, 2, 12)]
    items = [media(runner.adapter, grid, seed=s, is_pixels=s < 2) for grid in same_counts for s in range(3)]
    alone = [runner.eager([item])[0] for item in items]
    order = np.random.default_rng(0).integers(0, len(items), 40)
    for first, second in zip(order, np.roll(order, 1), strict=True):
        chosen = [first] if (first + second) % 3 else [first, first, second]
        runner._memory.inputs.poison = bool(first % 2)
        found = runner.run([items[index] for index in chosen])
        for rows, index in zip(found, chosen, strict=True):
            for mine, theirs in zip(rows, alone[index], strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)

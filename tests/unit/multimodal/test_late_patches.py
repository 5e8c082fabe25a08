"""Pixels that stay in their picture until an encoder needs them are those that were read at once."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gapless.errors import RequestError
from gapless.graphs.device.upload import HostRows, RawRows
from gapless.models.tokenizer import load_tokenizer
from gapless.models.vision.pixels import patch_rows
from gapless.multimodal import pixels
from gapless.multimodal.items import MediaItem
from gapless.multimodal.opening import open_processor
from gapless.multimodal.pixels import Patches, PixelSettings
from gapless.multimodal.processor import Processor
from vl_checkpoints import IMAGE_PROMPT, VIDEO_PROMPT, random_frames, random_image, write_vl_folder

SIZES = ((32, 24), (1, 1), (17, 99), (64, 64), (300, 200))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    folder = write_vl_folder(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl", has_weights=False)
    made = open_processor(str(folder), load_tokenizer(folder))
    assert made is not None
    return made


def item_of(processor: Processor, image: Any, *, reads_late: bool) -> MediaItem:
    return processor.prompt(IMAGE_PROMPT, images=[image], reads_late=reads_late).items[0]


def both(processor: Processor, image: Any) -> tuple[MediaItem, MediaItem]:
    return item_of(processor, image, reads_late=True), item_of(processor, image, reads_late=False)


@pytest.mark.parametrize(("num_frames", "rows", "columns"), [(1, 2, 3), (4, 3, 1), (3, 1, 2)])
def test_patches_are_the_pixels_in_the_towers_order(num_frames: int, rows: int, columns: int) -> None:
    """``rows`` and ``columns`` of tokens; the last of an odd number of frames fills its step."""
    settings = PixelSettings(
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=1,
        max_pixels=10**6,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )
    size = (num_frames, 8 * rows, 8 * columns, 3)
    frames_FHWC = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    depth = 1 if num_frames == 1 else 2
    steps = -(-num_frames // depth)
    filled = frames_FHWC[np.minimum(np.arange(steps * depth), num_frames - 1)]
    split = filled.reshape(steps, depth, rows, 2, 4, columns, 2, 4, 3)
    expected = split.transpose(0, 2, 5, 3, 6, 1, 4, 7, 8).reshape(steps * rows * columns * 4, -1)
    pictures = [Image.fromarray(frame) for frame in frames_FHWC]
    patches, again = (Patches(settings, pictures, (steps, 2 * rows, 2 * columns)) for _ in range(2))
    np.testing.assert_array_equal(patches.array(), expected)
    assert (patches.shape, patches.nbytes) == (expected.shape, expected.nbytes)
    for source in (again, patches):  # from pictures, and from what was made of them
        memory = np.full(patches.nbytes + 2, 7, np.uint8)
        source.write(memory[1:-1])
        np.testing.assert_array_equal(memory[1:-1], expected.reshape(-1))
        assert (memory[0], memory[-1]) == (7, 7)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_an_item_that_is_read_late_is_the_same_item(processor: Processor, size: tuple[int, int]) -> None:
    late, early = both(processor, random_image(*size, seed=size[0]))
    assert isinstance(late.patches_PC, Patches)
    assert isinstance(early.patches_PC, np.ndarray)
    assert late.num_patches == early.num_patches
    assert late.content_hash == early.content_hash
    np.testing.assert_array_equal(late.array_PC, early.array_PC)
    np.testing.assert_array_equal(late.values_PC(), early.values_PC())
    assert late.array_PC is late.patches_PC.array(), "what a hash has read is not read again"


def test_items_reach_the_device_alike_however_they_are_read(processor: Processor) -> None:
    images = [random_image(*size, seed=size[1]) for size in SIZES[:3]]
    late, early = zip(*(both(processor, image) for image in images), strict=True)
    expected = torch.from_numpy(np.concatenate([item.values_PC() for item in early]))
    for items in (late, (late[0], early[1], late[2])):
        rows = patch_rows(items)
        assert isinstance(rows, RawRows)
        assert torch.equal(rows.to(device=CPU, dtype=torch.float32), expected)
        assert torch.equal(rows.to(device=CPU, dtype=torch.float32), expected), "made anew each time"
    one = patch_rows(late[:1])
    assert torch.equal(one.to(device=CPU, dtype=torch.float32), expected[: late[0].num_patches])
    values = replace(early[1], patches_PC=early[1].values_PC(), normalisation=None)
    joined = patch_rows((late[0], values, early[2]))
    assert isinstance(joined, HostRows)
    assert torch.equal(joined.to(device=CPU, dtype=torch.float32), expected)


def test_a_picture_is_read_when_its_patches_are_needed(processor: Processor) -> None:
    """Which is why whoever may change it meanwhile has it read at once."""
    image = random_image(64, 64)
    late, early = both(processor, image)
    before = early.array_PC.copy()
    image.paste((1, 2, 3), (0, 0, 64, 64))
    np.testing.assert_array_equal(early.array_PC, before)
    assert (late.array_PC.reshape(-1, 3) == (1, 2, 3)).all()


def test_a_picture_is_let_go_when_an_array_was_made_of_it(processor: Processor) -> None:
    image = random_image(64, 64)
    kept, late = weakref.ref(image), item_of(processor, image, reads_late=True)
    del image
    assert kept() is not None
    late.content_hash  # noqa: B018 - reads the picture
    assert kept() is None
    assert patch_rows([late]).shape[0] == late.num_patches


def test_frames_of_a_video_are_read_at_once(processor: Processor) -> None:
    frames = random_frames(4, 64, 64)
    (item,) = processor.prompt(VIDEO_PROMPT, videos=[frames], reads_late=True).items
    assert isinstance(item.patches_PC, np.ndarray)


def test_a_broken_file_is_refused_before_its_pixels_are_needed(processor: Processor, tmp_path: Path) -> None:
    random_image(40, 40).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:600])
    with Image.open(tmp_path / "cut.png") as image, pytest.raises(RequestError, match=r"image 1: .* read"):
        item_of(processor, image, reads_late=True)


def test_a_pillow_without_its_inner_encoder_gives_the_same(
    processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = random_image(96, 64)
    made = item_of(processor, image, reads_late=False).array_PC
    monkeypatch.setattr(pixels, "_make_encoder", None)
    assert np.array_equal(item_of(processor, image, reads_late=False).array_PC, made)

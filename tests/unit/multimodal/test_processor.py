"""Prompts with media against Transformers: patches to the last bit, tokens, positions."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as frame_size
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import (
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as video_size

from gapless.errors import ModelError, RequestError
from gapless.models.tokenizer import load_tokenizer
from gapless.multimodal.items import MediaPrompt
from gapless.multimodal.opening import open_processor
from gapless.multimodal.pixels import PixelSettings, grid_of
from gapless.multimodal.processor import Processor
from gapless.multimodal.videos import VideoFacts, VideoFrames
from vl_checkpoints import (
    FAMILIES,
    IMAGE_ID,
    IMAGE_PROMPT,
    PREPROCESSOR,
    VIDEO_ID,
    VIDEO_PROMPT,
    VISION_END,
    VISION_START,
    random_frames,
    random_image,
    vl_config,
    write_vl_folder,
)

REFERENCE = Qwen2VLImageProcessorPil(**{k: v for k, v in PREPROCESSOR.items() if "type" not in k})
SIZES = ((32, 24), (1, 1), (200, 1), (1, 200), (17, 99), (64, 64), (300, 200), (8, 8), (7, 9), (61, 67))


@functools.cache
def processor_for(family: str) -> Processor:
    with tempfile.TemporaryDirectory() as name:
        folder = write_vl_folder(Path(name), family, has_weights=False)
        processor = open_processor(str(folder), load_tokenizer(folder))
    assert processor is not None
    return processor


@functools.cache
def meta_model(family: str) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(vl_config(family)).model


def timed(frames: np.ndarray, *, fps: float, step: int = 1) -> VideoFrames:
    indices = tuple(range(0, len(frames) * step, step))
    facts = VideoFacts(num_frames=len(frames) * step, fps=fps)
    return VideoFrames(frames_FHWC=frames, indices=indices, facts=facts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", SIZES)
def test_patches_of_an_image_are_those_of_transformers(family: str, size: tuple[int, int]) -> None:
    image = random_image(*size, seed=size[0])
    item = processor_for(family).prompt(IMAGE_PROMPT, images=[image]).items[0]
    expected = REFERENCE(image, return_tensors="np")
    assert item.grid_thw == tuple(expected["image_grid_thw"][0])
    assert item.patches_PC.dtype == np.uint8
    assert item.patches_PC.nbytes * 8 == expected["pixel_values"].nbytes
    assert item.values_PC().dtype == np.float32
    np.testing.assert_array_equal(item.values_PC(), expected["pixel_values"])


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1", "LA", "YCbCr"])
def test_images_of_other_modes_are_converted_as_transformers_does(mode: str) -> None:
    image = random_image(20, 30).convert(mode)
    item = processor_for("qwen3_vl").prompt(IMAGE_PROMPT, images=[image]).items[0]
    np.testing.assert_array_equal(item.values_PC(), REFERENCE(image, return_tensors="np")["pixel_values"])


def test_an_array_is_the_image_of_its_pixels() -> None:
    image = random_image(20, 30)
    items = [
        processor_for("qwen3_vl").prompt(IMAGE_PROMPT, images=[source]).items[0]
        for source in (image, np.asarray(image))
    ]
    np.testing.assert_array_equal(items[0].patches_PC, items[1].patches_PC)
    assert items[0].content_hash == items[1].content_hash


@settings(max_examples=50, deadline=None)
@given(
    width=st.integers(1, 3000),
    height=st.integers(1, 3000),
    num_frames=st.integers(1, 40),
    factor=st.sampled_from([8, 28, 32]),
    low=st.integers(1, 10**6),
    extra=st.integers(0, 10**7),
)
def test_grids_are_those_of_transformers_for_every_size(
    width: int, height: int, num_frames: int, factor: int, low: int, extra: int
) -> None:
    for holds_for in ("image", "frame", "video"):
        made = PixelSettings(
            patch_size=factor // 2,
            merge_size=2,
            temporal_patch_size=2,
            min_pixels=low,
            max_pixels=low + extra,
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
            limits_hold_for=holds_for,
        )
        try:
            if holds_for == "video":
                expected = video_size(
                    max(num_frames, 2), height, width, 2, factor, min_pixels=low, max_pixels=low + extra
                )
            else:
                expected = frame_size(height, width, factor, min_pixels=low, max_pixels=low + extra)
        except ValueError:
            with pytest.raises(RequestError, match="200 times"):
                grid_of(made, height=height, width=width, num_frames=num_frames, name="it")
            continue
        grid = grid_of(made, height=height, width=width, num_frames=num_frames, name="it")
        assert grid == (-(-num_frames // 2), expected[0] // made.patch_size, expected[1] // made.patch_size)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_frames", [2, 4, 3, 1, 5])
def test_patches_of_a_video_are_those_of_transformers(family: str, num_frames: int) -> None:
    frames = random_frames(num_frames, 16, 8)  # a size that needs no resizing, which differs in torchvision
    item = processor_for(family).prompt(VIDEO_PROMPT, videos=[frames]).items[0]
    reference = Qwen3VLVideoProcessor(**{k: v for k, v in PREPROCESSOR.items() if "type" not in k})
    pixels = torch.from_numpy(frames).permute(0, 3, 1, 2)[None].double() / 255
    mean, std = (
        torch.tensor(PREPROCESSOR[key], dtype=torch.float64)[:, None, None]
        for key in ("image_mean", "image_std")
    )
    expected, *grid = reference.patchify((pixels - mean) / std, 4, 2, 2)
    assert item.grid_thw == tuple(grid)
    np.testing.assert_allclose(item.values_PC(), expected[0], atol=1e-6)


def test_a_repeated_frame_is_an_image() -> None:
    image = random_image(16, 24)
    still = processor_for("qwen2_5_vl").prompt(IMAGE_PROMPT, images=[image]).items[0]
    frames = np.stack([np.asarray(image)] * 2)
    video = processor_for("qwen2_5_vl").prompt(VIDEO_PROMPT, videos=[frames]).items[0]
    np.testing.assert_array_equal(still.values_PC(), video.values_PC())
    assert still.content_hash != video.content_hash  # kinds differ, so a cache need not know the models


@settings(max_examples=30, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    parts=st.lists(
        st.one_of(
            st.text(alphabet="ab é<", min_size=1, max_size=5),
            st.tuples(st.integers(1, 60), st.integers(1, 60)),
            st.tuples(
                st.integers(1, 5), st.integers(8, 40), st.integers(8, 40), st.sampled_from([0.4, 1, 3, 24])
            ),
        ),
        max_size=6,
    ),
)
def test_tokens_and_positions_of_random_prompts_are_those_of_transformers(family: str, parts: list) -> None:
    text, images, videos = "", [], []
    for seed, part in enumerate(parts):
        if isinstance(part, str):
            text += part
        elif len(part) == 2:
            text, images = text + IMAGE_PROMPT, [*images, random_image(*part, seed=seed)]
        else:
            count, width, height, fps = part
            text += VIDEO_PROMPT
            videos.append(timed(random_frames(count, width, height, seed=seed), fps=fps, step=2))
    made = processor_for(family).prompt(text + ".", images=images, videos=videos)
    assert list(made.token_ids) == transformers_tokens(family, text + ".", made, videos)
    positions, delta = transformers_positions(family, made, videos)
    np.testing.assert_array_equal(made.rope_positions_3T, positions)
    assert made.rope_delta == delta
    for item in made.items:
        steps, grid_h, grid_w = item.grid_thw
        assert item.num_tokens == steps * grid_h * grid_w // 4
        token = IMAGE_ID if item.kind == "image" else VIDEO_ID
        assert all(set(made.token_ids[start : start + n]) == {token} for start, n in item.ranges)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fps", [0.2, 24.0])
def test_a_long_video_of_small_frames_has_positions_of_transformers(family: str, fps: float) -> None:
    """More steps than rows and columns, and at a low rate times beyond the text behind it."""
    video = timed(random_frames(11, 8, 8), fps=fps)
    made = processor_for(family).prompt(f"a{VIDEO_PROMPT}b", videos=[video])
    positions, delta = transformers_positions(family, made, [video])
    np.testing.assert_array_equal(made.rope_positions_3T, positions)
    assert made.rope_delta == delta
    assert (delta > 0) == (family == "qwen2_5_vl" and fps < 1)


def transformers_tokens(family: str, text: str, made: MediaPrompt, videos: list[VideoFrames]) -> list[int]:
    """The text with every placeholder replaced as their processors do, tokenised in one piece."""
    grids = {kind: [i.grid_thw for i in made.items if i.kind == kind] for kind in ("image", "video")}
    names = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    }
    theirs = SimpleNamespace(**names, video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2))
    theirs._calculate_timestamps = functools.partial(Qwen3VLProcessor._calculate_timestamps, theirs)
    pieces = {"image": [], "video": []}
    for steps, grid_h, grid_w in grids["image"]:
        pieces["image"].append("<|image_pad|>" * (steps * grid_h * grid_w // 4))
    for (steps, grid_h, grid_w), video in zip(grids["video"], videos, strict=True):
        if family == "qwen2_5_vl":
            pieces["video"].append("<|video_pad|>" * (steps * grid_h * grid_w // 4))
            continue
        metadata = SimpleNamespace(fps=video.facts.fps, frames_indices=list(video.indices))
        inputs = {
            "video_grid_thw": np.array([(steps, grid_h, grid_w)]),
            "video_metadata": [metadata],
        }
        pieces["video"].append(Qwen3VLProcessor.replace_video_token(theirs, inputs, 0))
    for kind, token in (("image", "<|image_pad|>"), ("video", "<|video_pad|>")):
        halves = text.split(token)
        assert len(halves) == len(pieces[kind]) + 1
        text = halves[0] + "".join(f"\0{kind}{index}\0" + half for index, half in enumerate(halves[1:]))
    for kind, replacements in pieces.items():
        for index, replacement in enumerate(replacements):
            text = text.replace(f"\0{kind}{index}\0", replacement)
    tokenizer = processor_for(family)._tokenizer
    return tokenizer.encode(text, add_special_tokens=False)


def transformers_positions(
    family: str, made: MediaPrompt, videos: list[VideoFrames]
) -> tuple[np.ndarray, int]:
    ids = torch.tensor([made.token_ids])
    kinds = (ids == IMAGE_ID).int() + 2 * (ids == VIDEO_ID).int()
    grids = {
        kind: torch.tensor([i.grid_thw for i in made.items if i.kind == kind]) if count else None
        for kind in ("image", "video")
        for count in [sum(i.kind == kind for i in made.items)]
    }
    seconds = [2 / (len(v.indices) / v.facts.num_frames * v.facts.fps) for v in videos]
    positions, delta = meta_model(family).get_rope_index(
        ids,
        mm_token_type_ids=kinds,
        image_grid_thw=grids["image"],
        video_grid_thw=grids["video"],
        second_per_grid_ts=seconds or None,
    )
    return positions[:, 0].numpy(), int(delta)


def test_text_alone_has_its_indices_as_positions() -> None:
    made = processor_for("qwen3_vl").prompt("abc")
    assert made.items == ()
    assert made.rope_delta == 0
    np.testing.assert_array_equal(made.rope_positions_3T, np.tile(np.arange(3), (3, 1)))


def test_token_ids_with_placeholders_are_expanded_as_text_is() -> None:
    image = random_image(24, 16)
    processor = processor_for("qwen3_vl")
    ids = [7, VISION_START, IMAGE_ID, VISION_END, 9]
    assert [7, *processor.placeholder("image"), 9] == ids
    made = processor.prompt(ids, images=[image])
    assert made.token_ids == (7, VISION_START, *[IMAGE_ID] * 6, VISION_END, 9)
    assert made.items[0].ranges == ((2, 6),)


def test_frames_of_a_timed_video_are_announced_in_text() -> None:
    video = timed(random_frames(3, 8, 8), fps=4.0, step=2)
    processor = processor_for("qwen3_vl")
    made = processor.prompt(VIDEO_PROMPT, videos=[video])
    text = processor._tokenizer.decode(made.token_ids, skip_special_tokens=False)
    frame = "<|vision_start|><|video_pad|><|vision_end|>"
    assert text == f"<|vision_start|><0.2 seconds>{frame}<1.0 seconds>{frame}<|vision_end|>"
    assert [len(item.ranges) for item in made.items] == [2]


def test_items_follow_their_placeholders_whatever_their_kind() -> None:
    images = [random_image(8, 8, seed=1), random_image(16, 8, seed=2)]
    made = processor_for("qwen2_5_vl").prompt(
        IMAGE_PROMPT + VIDEO_PROMPT + IMAGE_PROMPT, images=images, videos=[random_frames(2, 8, 8)]
    )
    assert [item.kind for item in made.items] == ["image", "video", "image"]
    assert [item.num_tokens for item in made.items] == [1, 1, 2]


@pytest.mark.parametrize("change", ["pixels", "grid", "mean", "kind", "repeats"])
def test_other_contents_have_other_hashes(change: str, tmp_path: Path) -> None:
    first = processor_for("qwen3_vl").prompt(IMAGE_PROMPT, images=[random_image(16, 8)]).items[0]
    processor, image = processor_for("qwen3_vl"), random_image(16, 8)
    if change == "pixels":
        image.putpixel((3, 3), (1, 2, 3))
    elif change == "grid":
        image = Image.fromarray(np.asarray(image).reshape(16, 8, 3))
    else:
        processor = changed_processor(tmp_path, image_mean=[0.1, 0.1, 0.1])
    second = processor.prompt(IMAGE_PROMPT, images=[image]).items[0]
    if change == "kind":
        second = replace(second, kind="video")
    elif change == "repeats":
        assert second.normalisation is not None
        second = replace(second, normalisation=replace(second.normalisation, num_repeats=1))
    again = processor_for("qwen3_vl").prompt("a" + IMAGE_PROMPT, images=[random_image(16, 8)]).items[0]
    assert first.content_hash != second.content_hash
    assert first.content_hash == again.content_hash


@pytest.mark.parametrize(
    ("prompt", "num_images", "num_videos", "said"),
    [
        ("no placeholder", 1, 0, "0 image placeholders .* for 1 images"),
        (IMAGE_PROMPT, 0, 0, "1 image placeholders .* for 0 images"),
        (IMAGE_PROMPT * 2, 1, 0, "2 image placeholders .* for 1 images"),
        (VIDEO_PROMPT, 1, 0, "0 image placeholders .* for 1 images"),
        (VIDEO_PROMPT, 0, 2, "1 video placeholders .* for 2 videos"),
    ],
)
def test_each_placeholder_needs_its_image(prompt: str, num_images: int, num_videos: int, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        processor_for("qwen2_5_vl").prompt(
            prompt,
            images=[random_image(8, 8)] * num_images,
            videos=[random_frames(2, 8, 8)] * num_videos,
        )


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (Image.new("RGB", (0, 5)), "image 1: .* at least 1"),
        (np.zeros((0, 4, 3), np.uint8), "image 1: .* at least 1"),
        (Image.new("RGB", (201, 1)), "image 1: .* 200 times"),
        (np.zeros((4, 4, 3), np.float32), "pass uint8"),
        (np.zeros((4, 4), np.uint8), "pass uint8"),
        ("cat.png", "str is no image"),
    ],
)
def test_what_is_no_usable_image_is_refused(image: object, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        processor_for("qwen2_5_vl").prompt(IMAGE_PROMPT, images=[image])


@pytest.mark.parametrize(
    ("video", "said"),
    [
        (np.zeros((0, 4, 4, 3), np.uint8), "video 1: .* at least 1"),
        (np.zeros((4, 4, 3), np.uint8), "pass uint8"),
        ([1, 2], "list is no video"),
        (np.zeros((2, 1, 300, 3), np.uint8), "video 1: .* 200 times"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_no_usable_video_is_refused(family: str, video: object, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        processor_for(family).prompt(VIDEO_PROMPT, videos=[video])


def test_more_tokens_than_allowed_are_refused_before_pixels_are_touched() -> None:
    class Untouchable(Image.Image):
        size = (64, 64)

    with pytest.raises(RequestError, match=r"67 tokens, 64 of them .* at most 66"):
        processor_for("qwen2_5_vl").prompt("a" + IMAGE_PROMPT, images=[Untouchable()], max_tokens=66)


def test_a_cut_file_is_the_callers_error(tmp_path: Path) -> None:
    random_image(40, 40).save(tmp_path / "cat.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cat.png").read_bytes()[:600])
    with Image.open(tmp_path / "cut.png") as image, pytest.raises(RequestError, match=r"image 1: .* read"):
        processor_for("qwen2_5_vl").prompt(IMAGE_PROMPT, images=[image])


def changed_processor(folder: Path, **changes: object) -> Processor:
    write_vl_folder(folder, "qwen3_vl", has_weights=False)
    (folder / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSOR, **changes}))
    processor = open_processor(str(folder), load_tokenizer(folder))
    assert processor is not None
    return processor


@pytest.mark.parametrize(
    "changes",
    [
        {"do_resize": False},
        {"do_normalize": False},
        {"patch_size": 14},
        {"merge_size": 3},
        {"size": {"height": 3, "width": 3}},
        {"size": {"shortest_edge": 100, "longest_edge": 10}},
        {"min_pixels": 0},
        {"image_mean": [0.5]},
        {"image_std": [0, 1, 1]},
        {"rescale_factor": "x"},
        {"resample": 9},
        {"cap_pixels_per_frame": True},
        {"image_std": [1, float("nan"), 1]},
        {"image_mean": [float("inf"), 0, 0]},
        {"image_mean": [True, 0, 0]},
        {"rescale_factor": float("inf")},
        {"rescale_factor": float("nan")},
    ],
)
def test_settings_that_are_not_implemented_are_refused(tmp_path: Path, changes: dict) -> None:
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        changed_processor(tmp_path, **changes)


def test_pixel_limits_have_old_and_new_names(tmp_path: Path) -> None:
    new = changed_processor(tmp_path / "new", size={"shortest_edge": 256, "longest_edge": 512})
    old = changed_processor(tmp_path / "old", size=None, min_pixels=256, max_pixels=512)
    assert (new.image.min_pixels, new.image.max_pixels) == (256, 512)
    assert new.image == old.image


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_without_processor_files_has_published_settings(tmp_path: Path, family: str) -> None:
    folder = write_vl_folder(tmp_path, family, has_weights=False)
    (folder / "preprocessor_config.json").unlink()
    (folder / "video_preprocessor_config.json").unlink()
    processor = open_processor(str(folder), None)
    assert processor is not None
    expected = (56 * 56, 28 * 28 * 16384) if family == "qwen2_5_vl" else (65536, 16777216)
    assert (processor.image.min_pixels, processor.image.max_pixels) == expected
    assert processor.image.patch_size == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_one_joint_file_holds_both_settings(tmp_path: Path, family: str) -> None:
    folder = write_vl_folder(tmp_path, family, has_weights=False)
    image = {**PREPROCESSOR, "image_mean": [0.1, 0.2, 0.3]}
    video = {**PREPROCESSOR, "size": {"shortest_edge": 99, "longest_edge": 999}, "fps": 1.0}
    joint = {"image_processor": image, "video_processor": video}
    (folder / "processor_config.json").write_text(json.dumps(joint))
    processor = open_processor(str(folder), None)
    assert processor is not None
    assert processor.image.mean == (0.1, 0.2, 0.3)
    assert (processor.video.min_pixels, processor.video.max_pixels) == (99, 999)
    assert processor.sampling().fps == 1.0
    assert processor.sampling(fps=3.0).fps == 3.0
    fixed = processor.with_settings(image=processor.image, video=processor.video, sampling={"num_frames": 6})
    assert fixed.sampling().num_frames == 6
    assert fixed.sampling(fps=3.0).num_frames is None
    assert processor.sampling().spacing == ("steps" if family == "qwen2_5_vl" else "ends")


def test_a_model_without_vision_has_no_processor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert open_processor(str(tmp_path), None) is None
    assert open_processor("smollm2", None) is None


def test_a_tokenizer_without_placeholders_is_refused(tmp_path: Path) -> None:
    folder = write_vl_folder(tmp_path, "qwen3_vl", has_weights=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "image_token_id": 270}))
    with pytest.raises(ModelError, match="image_token_id=270"):
        open_processor(str(folder), load_tokenizer(folder))


def test_text_and_timestamps_need_a_tokenizer(tmp_path: Path) -> None:
    processor = open_processor(str(write_vl_folder(tmp_path, "qwen3_vl", has_weights=False)), None)
    assert processor is not None
    assert processor.prompt(processor.placeholder("image"), images=[random_image(8, 8)]).items
    with pytest.raises(RequestError, match="no tokenizer"):
        processor.prompt("text")
    with pytest.raises(RequestError, match="no tokenizer"):
        processor.prompt(processor.placeholder("video"), videos=[random_frames(2, 8, 8)])

"""Vision-language models against Transformers: processor, tower and decoder give the logits of theirs.

The reference runs the whole prompt at once, without a cache; ours runs it in chunks through a paged cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from media_forward import MediaForward
from torch import Tensor

from gapless.models.registry import LoadedModel, load_model
from gapless.multimodal.items import MediaPrompt
from vl_checkpoints import (
    FAMILIES,
    IMAGE_ID,
    IMAGE_PROMPT,
    VIDEO_ID,
    VIDEO_PROMPT,
    random_frames,
    random_image,
    vl_model,
    write_vl_folder,
)

TOLERANCE = 1e-4

PROMPTS: dict[str, tuple[str, list[tuple[int, int]], list[tuple[int, int, int]]]] = {
    "text": ("just some text", [], []),
    "image": (f"see {IMAGE_PROMPT} here", [(32, 24)], []),
    "one-token image": (f"{IMAGE_PROMPT}?", [(8, 8)], []),
    "tall image": (f"a{IMAGE_PROMPT}b", [(9, 130)], []),
    "wide image": (f"a{IMAGE_PROMPT}b", [(90, 17)], []),
    "large image": (f"a{IMAGE_PROMPT}b", [(64, 60)], []),
    "two images": (f"first {IMAGE_PROMPT} then {IMAGE_PROMPT}, which?", [(24, 40), (48, 16)], []),
    "images side by side": (IMAGE_PROMPT * 3 + "!", [(8, 8), (16, 16), (24, 8)], []),
    "video": (f"watch {VIDEO_PROMPT} now", [], [(4, 24, 16)]),
    "odd video": (f"{VIDEO_PROMPT}.", [], [(3, 16, 16)]),
    "image and video": (f"{IMAGE_PROMPT} and {VIDEO_PROMPT} end", [(24, 24)], [(4, 16, 16)]),
    "video and image": (f"{VIDEO_PROMPT} and {IMAGE_PROMPT}", [(16, 40)], [(2, 24, 8)]),
}


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_vl_folder(tmp_path_factory.mktemp("vl") / request.param, request.param)
    return load_model(str(folder), device=torch.device("cpu"))


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_of_a_whole_prompt_are_those_of_transformers(loaded: LoadedModel, name: str) -> None:
    prompt, expected = _case(loaded, name)
    (logits,) = MediaForward(loaded, [prompt]).advance([len(prompt.token_ids)])
    assert _difference(logits, expected) <= TOLERANCE


@pytest.mark.parametrize("chunk", [1, 5, 7])
@pytest.mark.parametrize("name", ["image", "two images", "video"])
def test_chunks_that_cut_media_change_nothing(loaded: LoadedModel, name: str, chunk: int) -> None:
    prompt, expected = _case(loaded, name)
    forward, num_tokens = MediaForward(loaded, [prompt]), len(prompt.token_ids)
    parts = [forward.advance([min(chunk, num_tokens - i)])[0] for i in range(0, num_tokens, chunk)]
    assert _difference(torch.cat(parts), expected) <= TOLERANCE


def test_prompts_of_all_kinds_share_a_batch(loaded: LoadedModel) -> None:
    names = ["text", "image", "image and video", "one-token image"]
    cases = [_case(loaded, name) for name in names]
    prompts = [prompt for prompt, _ in cases]
    forward = MediaForward(loaded, prompts)
    firsts = [len(prompt.token_ids) // 2 for prompt in prompts]
    parts = forward.advance(firsts)
    rest = forward.advance([len(p.token_ids) - n for p, n in zip(prompts, firsts, strict=True)])
    for first, second, (_, expected) in zip(parts, rest, cases, strict=True):
        assert _difference(torch.cat([first, second]), expected) <= TOLERANCE


@pytest.mark.parametrize("name", ["image", "two images", "video", "text"])
def test_generated_tokens_go_on_at_the_right_position(loaded: LoadedModel, name: str) -> None:
    prompt, _ = _case(loaded, name)
    forward = MediaForward(loaded, [prompt])
    (logits,) = forward.advance([len(prompt.token_ids)])
    generated = []
    for _ in range(4):
        generated.append(int(logits[-1, :256].argmax()))
        (logits,) = forward.decode([generated[-1]])
    expected = _reference(loaded.model_type, prompt, extra=generated)
    assert _difference(logits, expected[-1:]) <= TOLERANCE


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted kernels; tests/gpu has the compiled ones")
@pytest.mark.parametrize("name", ["images side by side"])
def test_fused_kernels_give_the_same_logits(loaded: LoadedModel, name: str) -> None:
    prompt, expected = _case(loaded, name)
    model, num_tokens = loaded.model, len(prompt.token_ids)
    model.has_fused_kernels = True
    try:
        forward = MediaForward(loaded, [prompt])
        first = forward.advance([num_tokens // 2])[0]
        second = forward.advance([num_tokens - num_tokens // 2])[0]
        last = forward.decode([7])[0]
    finally:
        model.has_fused_kernels = False
    assert _difference(torch.cat([first, second]), expected) <= TOLERANCE
    assert _difference(last, _reference(loaded.model_type, prompt, extra=[7])[-1:]) <= TOLERANCE


@pytest.mark.parametrize(("name", "is_published"), [("text", True), ("image and video", False)])
def test_a_text_model_with_experts_takes_media_too(tmp_path: Path, name: str, is_published: bool) -> None:
    folder = write_vl_folder(tmp_path, "qwen3_vl_moe")
    if not is_published:  # what Transformers saves, it has read turned round
        vl_model("qwen3_vl_moe").save_pretrained(folder)
    loaded = load_model(str(folder), device=torch.device("cpu"))
    assert loaded.info.num_experts == 4
    prompt, expected = _case(loaded, name)
    forward, num_first = MediaForward(loaded, [prompt]), len(prompt.token_ids) // 2
    parts = [forward.advance([count])[0] for count in (num_first, len(prompt.token_ids) - num_first)]
    assert _difference(torch.cat(parts), expected) <= TOLERANCE


def test_an_image_changes_the_logits(loaded: LoadedModel) -> None:
    """Else the tests above could pass without a tower."""
    prompt, logits = _case(loaded, "image")
    assert loaded.processor is not None
    other = loaded.processor.prompt(PROMPTS["image"][0], images=[random_image(32, 24, seed=9)])
    assert other.token_ids == prompt.token_ids
    assert _difference(_reference(loaded.model_type, other), logits) > 0.1


def _case(loaded: LoadedModel, name: str) -> tuple[MediaPrompt, Tensor]:
    text, image_sizes, video_sizes = PROMPTS[name]
    assert loaded.processor is not None
    prompt = loaded.processor.prompt(
        text,
        images=[random_image(*size, seed=seed) for seed, size in enumerate(image_sizes)],
        videos=[random_frames(*size, seed=seed) for seed, size in enumerate(video_sizes)],
    )
    return prompt, _reference(loaded.model_type, prompt)


def _reference(family: str, prompt: MediaPrompt, *, extra: list[int] | None = None) -> Tensor:
    """``[n, V]`` from Transformers, which finds its own positions and embeddings."""
    ids = torch.tensor([[*prompt.token_ids, *(extra or [])]])
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE_ID).int() + 2 * (ids == VIDEO_ID).int(),
    }
    for kind, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        items = [item for item in prompt.items if item.kind == kind]
        if items:
            inputs[pixels] = torch.from_numpy(np.concatenate([item.values_PC() for item in items]))
            inputs[grid] = torch.tensor([item.grid_thw for item in items])
    if family == "qwen2_5_vl" and "video_grid_thw" in inputs:
        inputs["second_per_grid_ts"] = [2 / 24] * len(inputs["video_grid_thw"])
    model = vl_model(family)
    model.model.rope_deltas = None  # kept from call to call
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits[0]


def _difference(ours: Tensor, expected: Tensor) -> float:
    assert ours.shape == expected.shape
    return (ours - expected).abs().max().item()

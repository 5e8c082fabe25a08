"""What one prompt of ``LLM`` may show together: the limit of a server, before a processor sees any of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gapless.errors import RequestError
from gapless.llm_media import make_media_prompt, media_of
from gapless.multimodal.limits import DEFAULT_LIMITS, MediaLimits

PICTURE = np.zeros((10, 10, 3), np.uint8)
FRAMES = np.zeros((4, 5, 5, 3), np.uint8)
DECODED = SimpleNamespace(frames_FHWC=FRAMES)


def counts_of(limit: int, **shown: Any) -> tuple[int, int]:
    """Images and videos that reach the processor."""
    seen: list[tuple[int, int]] = []
    processor: Any = SimpleNamespace(
        prompt=lambda ids, *, images, videos, **_: seen.append((len(images), len(videos)))
    )
    limits = MediaLimits(max_decoded_pixels=limit)
    make_media_prompt(processor, [1], media_of(shown), max_tokens=9, limits=limits)
    return seen[0]


@pytest.mark.parametrize(
    ("shown", "num_pixels", "counts", "last"),
    [
        ({"image": [PICTURE] * 3}, 300, (3, 0), "image 3"),
        ({"video": [FRAMES, FRAMES]}, 200, (0, 2), "video 2"),
        ({"image": PICTURE, "video": [DECODED]}, 200, (1, 1), "video 1"),
    ],
    ids=["images", "videos", "both"],
)
def test_pixels_of_one_prompt_are_limited_together(
    shown: dict[str, Any], num_pixels: int, counts: tuple[int, int], last: str
) -> None:
    assert counts_of(num_pixels, **shown) == counts
    with pytest.raises(RequestError, match=rf"{last}: .* {num_pixels} pixels together, the limit is"):
        counts_of(num_pixels - 1, **shown)


def test_the_limit_is_that_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a picture that is said to be as large as three quarters of the limit, two are too many."""
    large = SimpleNamespace(width=DEFAULT_LIMITS.max_decoded_pixels * 3 // 4, height=1)
    monkeypatch.setattr("gapless.multimodal.loading.open_image", lambda *_, **__: large)
    processor: Any = SimpleNamespace(prompt=lambda *_, **__: "made")
    media = media_of({"image": ["a.png"]})
    assert make_media_prompt(processor, [1], media, max_tokens=9) == "made"
    with pytest.raises(RequestError, match=r"image 2: .* pixels together"):
        make_media_prompt(processor, [1], media_of({"image": ["a.png", "b.png"]}), max_tokens=9)

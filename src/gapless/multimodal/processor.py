"""Text with one placeholder per image or video, and the media themselves, to a ``MediaPrompt``.

A chat template writes one placeholder for each image or video, between the tokens that mark vision. Here each
becomes as many placeholders as the encoder will make rows; Qwen3-VL's videos become frames that are announced
by their time. What is wrong with a request is found from sizes, before any pixel is touched. Invariant:
prompts, patches and positions are those of Transformers' processors and ``get_rope_index``. Needs no torch,
and may be called from many threads. Read ``pixels.py`` and ``positions.py`` for the two halves of the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from gapless.errors import RequestError
from gapless.models.vl_config import VisionLanguageConfig
from gapless.multimodal.items import MediaItem, MediaKind, MediaPrompt
from gapless.multimodal.pixels import Patches, PixelSettings, grid_of
from gapless.multimodal.positions import MediaBlock, rope_positions

if TYPE_CHECKING:
    from gapless.models.tokenizer import Tokenizer
    from gapless.multimodal.sampling import FrameSampling
    from gapless.multimodal.videos import VideoFrames

_FALLBACK_FPS = 24.0
"""Of frames that nothing is known about, as Transformers assumes."""


class Processor:
    """For one model. Without a tokenizer, prompts are token ids and videos with timestamps are refused."""

    def __init__(
        self,
        config: VisionLanguageConfig,
        *,
        image: PixelSettings,
        video: PixelSettings,
        sampling: Mapping[str, Any],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.config, self.image, self.video = config, image, video
        self._sampling, self._tokenizer = dict(sampling), tokenizer

    def sampling(self, **overrides: Any) -> FrameSampling:
        """Which frames of a video the model wants to see; ``fps`` or ``num_frames`` may be overridden."""
        from gapless.multimodal.sampling import FrameSampling  # decoding videos needs a package of its own

        return FrameSampling(**self._sampling_with(overrides))

    def with_settings(
        self, *, image: PixelSettings, video: PixelSettings, sampling: Mapping[str, Any]
    ) -> Processor:
        """Another one of the same model; ``sampling`` replaces what it names."""
        kept = self._sampling_with(sampling)
        return Processor(self.config, image=image, video=video, sampling=kept, tokenizer=self._tokenizer)

    def _sampling_with(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        kept = {**self._sampling, **changes}
        if "fps" in changes and "num_frames" not in changes:
            kept.pop("num_frames", None)  # which would override it
        return kept

    def placeholder(self, kind: MediaKind) -> list[int]:
        """What stands for one image or video in a prompt, marks included."""
        token = self.config.image_token_id if kind == "image" else self.config.video_token_id
        return [self.config.vision_start_token_id, token, self.config.vision_end_token_id]

    def prompt(
        self,
        prompt: str | Sequence[int],
        *,
        images: Sequence[Image.Image | np.ndarray] = (),
        videos: Sequence[VideoFrames | np.ndarray] = (),
        max_tokens: int | None = None,
        reads_late: bool = False,
    ) -> MediaPrompt:
        """``images`` and ``videos`` fill the placeholders of their kind, in order.

        An image is one of Pillow's, or uint8 ``[H, W, 3]``; a video is decoded frames, or uint8
        ``[F, H, W, 3]``. ``max_tokens`` bounds the expanded prompt. ``reads_late``: images are read when an
        encoder needs them, and must not change before. Raises ``RequestError``.
        """
        token_ids = self._token_ids(prompt)
        places = self._places(token_ids)
        sources = self._sources([token_ids[place] for place in places], images, videos)
        expanded, plans = self._expand(token_ids, places, sources)
        if max_tokens is not None and len(expanded) > max_tokens:
            num_media = sum(length for plan in plans for _, length in plan.ranges)
            raise RequestError(
                f"the prompt has {len(expanded)} tokens, {num_media} of them for images and videos, and at "
                f"most {max_tokens} fit; send fewer or smaller ones"
            )
        positions_3T, delta = rope_positions(len(expanded), [b for plan in plans for b in plan.blocks])
        return MediaPrompt(
            token_ids=tuple(expanded),
            items=tuple(plan.item(reads_late=reads_late) for plan in plans),
            rope_positions_3T=positions_3T,
            rope_delta=delta,
        )

    def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return list(self._encoded(prompt))
        return list(prompt)

    def _encoded(self, text: str) -> Sequence[int]:
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer, which text and videos with timestamps need")
        # A chat's text has its special tokens already, and timestamps have none.
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _places(self, token_ids: list[int]) -> list[int]:
        """Where placeholders are. The list is searched, which is faster than a look at each token."""
        places = []
        for token in (self.config.image_token_id, self.config.video_token_id):
            place = -1
            for _ in range(token_ids.count(token)):
                place = token_ids.index(token, place + 1)
                places.append(place)
        return sorted(places)

    def _sources(
        self,
        placeholders: Sequence[int],
        images: Sequence[Image.Image | np.ndarray],
        videos: Sequence[VideoFrames | np.ndarray],
    ) -> list[_Source]:
        """One for each placeholder, in the order of the prompt."""
        made: dict[int, list[_Source]] = {
            self.config.image_token_id: [
                _image_source(image, self.image, name=f"image {index}")
                for index, image in enumerate(images, start=1)
            ],
            self.config.video_token_id: [
                _video_source(video, self.video, name=f"video {index}")
                for index, video in enumerate(videos, start=1)
            ],
        }
        for token, kind in ((self.config.image_token_id, "image"), (self.config.video_token_id, "video")):
            num_places = placeholders.count(token)
            if num_places != len(made[token]):
                raise RequestError(
                    f"the prompt has {num_places} {kind} placeholders (token {token}) for "
                    f"{len(made[token])} {kind}s; there must be one for each"
                )
        remaining = {token: iter(sources) for token, sources in made.items()}
        return [next(remaining[token]) for token in placeholders]

    def _expand(
        self, token_ids: list[int], places: Sequence[int], sources: Sequence[_Source]
    ) -> tuple[list[int], list[_Plan]]:
        expanded: list[int] = []
        plans: list[_Plan] = []
        begin = 0
        for place, source in zip(places, sources, strict=True):
            expanded += token_ids[begin:place]
            begin = place + 1
            has_timestamps = source.kind == "video" and self.config.has_timestamps
            put = self._place_frames if has_timestamps else self._place
            plans.append(put(expanded, source, token_ids[place]))
        expanded += token_ids[begin:]
        return expanded, plans

    def _place(self, expanded: list[int], source: _Source, token: int) -> _Plan:
        """All placeholders of ``source`` in one piece."""
        steps, rows, columns = self._grid_of_tokens(source)
        interval = 1
        if source.kind == "video":  # whole seconds, as Transformers counts them
            seconds = int(self.config.temporal_patch_size / source.sampled_fps)
            interval = self.config.tokens_per_second * seconds
        block = MediaBlock(
            start=len(expanded), steps=steps, rows=rows, columns=columns, time_interval=interval
        )
        expanded.extend([token] * block.num_tokens)
        return _Plan(source=source, blocks=(block,))

    def _place_frames(self, expanded: list[int], source: _Source, token: int) -> _Plan:
        """Each step of a video between marks of its own, behind its time."""
        steps, rows, columns = self._grid_of_tokens(source)
        blocks = []
        for seconds in source.step_times(self.config.temporal_patch_size):
            expanded.extend(self._encoded(f"<{seconds:.1f} seconds>"))
            expanded.append(self.config.vision_start_token_id)
            blocks.append(MediaBlock(start=len(expanded), steps=1, rows=rows, columns=columns))
            expanded.extend([token] * (rows * columns))
            expanded.append(self.config.vision_end_token_id)
        assert len(blocks) == steps
        return _Plan(source=source, blocks=tuple(blocks))

    def _grid_of_tokens(self, source: _Source) -> tuple[int, int, int]:
        steps, grid_h, grid_w = source.grid_thw
        return steps, grid_h // self.config.merge_size, grid_w // self.config.merge_size


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Source:
    """One image or video as it came, and the grid it will have."""

    kind: MediaKind
    name: str
    """What begins errors about it."""
    frames: Sequence[Image.Image | np.ndarray]
    settings: PixelSettings
    grid_thw: tuple[int, int, int]
    frame_indices: tuple[int, ...] = (0,)
    fps: float = _FALLBACK_FPS
    """Of the video that the indices count frames of."""
    sampled_fps: float = _FALLBACK_FPS
    """Frames taken in each second."""

    def step_times(self, depth: int) -> list[float]:
        """Seconds from the video's start to the middle of each ``depth`` frames that share patches."""
        indices = list(self.frame_indices)
        indices += [indices[-1]] * (-len(indices) % depth)
        times = [index / self.fps for index in indices]
        return [(times[i] + times[i + depth - 1]) / 2 for i in range(0, len(times), depth)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Plan:
    """A source and its places in the prompt."""

    source: _Source
    blocks: tuple[MediaBlock, ...]

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        return tuple((block.start, block.num_tokens) for block in self.blocks)

    def item(self, *, reads_late: bool) -> MediaItem:
        """``reads_late``: of a picture; a video's frames would take more memory than its patches."""
        source = self.source
        pictures = [_picture(frame, source.name) for frame in source.frames]
        made = Patches(source.settings, pictures, source.grid_thw)
        return MediaItem(
            kind=source.kind,
            patches_PC=made if reads_late and source.kind == "image" else made.array(),
            grid_thw=source.grid_thw,
            ranges=self.ranges,
            normalisation=made.normalisation,
        )


def _image_source(image: Image.Image | np.ndarray, settings: PixelSettings, *, name: str) -> _Source:
    if isinstance(image, np.ndarray):
        _check_pixels(image, ndim=3, name=name)
        height, width = image.shape[:2]
    elif isinstance(image, Image.Image):
        width, height = image.size
    else:
        raise RequestError(f"{name}: {type(image).__name__} is no image; pass a PIL image or an array")
    grid_thw = grid_of(settings, height=height, width=width, name=name)
    return _Source(kind="image", name=name, frames=(image,), settings=settings, grid_thw=grid_thw)


def _picture(image: Image.Image | np.ndarray, name: str) -> Image.Image:
    """RGB; decodes what Pillow has only opened."""
    if isinstance(image, np.ndarray):
        return Image.fromarray(image)
    try:
        image.load()
        return image if image.mode == "RGB" else image.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise RequestError(f"{name}: the image cannot be read ({error})") from None


def _video_source(video: VideoFrames | np.ndarray, settings: PixelSettings, *, name: str) -> _Source:
    if isinstance(video, np.ndarray):
        frames_FHWC, indices, fps, sampled_fps = video, tuple(range(len(video))), _FALLBACK_FPS, _FALLBACK_FPS
    elif hasattr(video, "frames_FHWC"):
        frames_FHWC, indices, fps = video.frames_FHWC, video.indices, video.facts.fps
        sampled_fps = len(indices) / video.facts.num_frames * fps
    else:
        raise RequestError(
            f"{name}: {type(video).__name__} is no video; pass decoded frames or an array of them"
        )
    _check_pixels(frames_FHWC, ndim=4, name=name)
    num_frames, height, width = frames_FHWC.shape[:3]
    grid_thw = grid_of(settings, height=height, width=width, num_frames=num_frames, name=name)
    return _Source(
        kind="video",
        name=name,
        frames=list(frames_FHWC),
        settings=settings,
        grid_thw=grid_thw,
        frame_indices=indices,
        fps=fps,
        sampled_fps=sampled_fps,
    )


def _check_pixels(pixels: np.ndarray, *, ndim: int, name: str) -> None:
    if pixels.dtype != np.uint8 or pixels.ndim != ndim or pixels.shape[-1] != 3:
        wanted = "(height, width, 3)" if ndim == 3 else "(frames, height, width, 3)"
        raise RequestError(
            f"{name}: an array of shape {pixels.shape} and type {pixels.dtype}; pass uint8 of shape {wanted}"
        )

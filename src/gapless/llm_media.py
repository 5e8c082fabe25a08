"""Images and videos in the prompts and chats of ``LLM``: from what a caller passes to what the engine takes.

A prompt may bring ``multi_modal_data`` with images and videos, a chat's messages may have parts that are
some; both become one ``MediaPrompt``. What a caller's own program passes is trusted to be read, a path as
well as an image, but its size is limited as a stranger's. Invariant: what is wrong is a ``RequestError`` that
says where. Needs no torch. Read ``multimodal/processor.py`` for what a prompt becomes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gapless.errors import RequestError
from gapless.multimodal.items import MediaKind, MediaPrompt
from gapless.multimodal.limits import DEFAULT_LIMITS, MediaLimits

if TYPE_CHECKING:
    from gapless.multimodal.processor import Processor

MEDIA_KEY = "multi_modal_data"
_KINDS: Mapping[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "video": "video",
    "video_url": "video",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """What a prompt shows, as it was passed, each with the name that errors call it."""

    images: list[tuple[str, Any]] = field(default_factory=list)
    videos: list[tuple[str, Any]] = field(default_factory=list)

    def add(self, kind: MediaKind, name: str, source: Any) -> None:
        (self.images if kind == "image" else self.videos).append((name, source))

    def to_data(self) -> dict[str, list[Any]]:
        """The form in which a prompt has it."""
        named = {"image": self.images, "video": self.videos}
        return {kind: [source for _, source in found] for kind, found in named.items() if found}

    def __bool__(self) -> bool:
        return bool(self.images or self.videos)


def media_of(data: Any) -> Media:
    """``{"image": one or a list, "video": one or a list}``. Raises ``RequestError``."""
    media = Media()
    if data is None:
        return media
    if not isinstance(data, Mapping) or not set(data) <= {"image", "video"}:
        keys = sorted(map(str, data)) if isinstance(data, Mapping) else repr(data)
        raise RequestError(f"{MEDIA_KEY} has {keys}: give 'image' and 'video', each one or a list of them")
    for kind in ("image", "video"):
        sources = data.get(kind)
        for index, source in enumerate(_as_list(sources)):
            media.add(kind, f"{kind} {index + 1}", source)
    return media


def split_conversation(conversation: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], Media]:
    """Messages as chat templates read them, without what images and videos are, and those in the order of
    their placeholders. Raises ``RequestError``."""
    media = Media()
    messages: list[Mapping[str, Any]] = []
    for number, message in enumerate(conversation):
        content = message.get("content")
        if not isinstance(content, list | tuple):
            messages.append(message)
            continue
        parts = [
            _part(part, f"messages[{number}].content[{index}]", media) for index, part in enumerate(content)
        ]
        messages.append({**message, "content": parts})
    return messages, media


def make_media_prompt(
    processor: Processor | None,
    prompt: Any,
    media: Media,
    *,
    max_tokens: int,
    limits: MediaLimits = DEFAULT_LIMITS,
    reads_late: bool = False,
) -> MediaPrompt:
    """``prompt`` is text or token ids with a placeholder for each of ``media``; ``max_tokens`` bounds what
    becomes of it, ``limits`` what is decoded for it, ``reads_late`` as in ``Processor.prompt``. Raises
    ``RequestError``."""
    if processor is None:
        raise RequestError("this model takes text only: it has no encoder for images and videos")
    if not isinstance(prompt, str):
        prompt = _token_ids(prompt)
    images, videos = [], []
    num_pixels = 0
    for name, source in media.images:
        image = _open_image(source, name, limits)
        images.append(image)
        num_pixels += image.width * image.height
        limits.check_together(num_pixels, name)
    for name, source in media.videos:
        video = _open_video(source, name, processor, limits)
        videos.append(video)
        num_pixels += getattr(video, "frames_FHWC", video).size // 3
        limits.check_together(num_pixels, name)
    return processor.prompt(
        prompt, images=images, videos=videos, max_tokens=max_tokens, reads_late=reads_late
    )


def _part(part: Any, name: str, media: Media) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        return part  # the template's affair
    source = part.get(kind)
    if source is None:
        raise RequestError(f"{name}: a part of type {kind!r} needs the field {kind!r}")
    if kind.endswith("_url"):
        url = source.get("url") if isinstance(source, Mapping) else source
        if not isinstance(url, str) or not url:
            raise RequestError(f'{name}: {kind} must be like {{"url": "data:..."}}')
        if url[:5].lower() != "data:":  # what anybody may name: no path of this machine, and no web server
            own = {"image": "'image': a path or a picture", "video": "'video': a path or frames"}
            raise RequestError(
                f"{name}: {kind} takes data URLs only, not {url[:40]!r}; what your own program has goes into "
                f"a part of type {own[_KINDS[kind]]}"
            )
        source = url
    media.add(_KINDS[kind], name, source)
    return {"type": _KINDS[kind]}


def _open_image(source: Any, name: str, limits: MediaLimits) -> Any:
    from gapless.multimodal.loading import open_image

    return open_image(source, limits=limits, name=name)


def _open_video(source: Any, name: str, processor: Processor, limits: MediaLimits) -> Any:
    import numpy as np

    from gapless.multimodal.loading import open_video

    if isinstance(source, np.ndarray) or hasattr(source, "frames_FHWC"):
        return source  # frames that somebody has decoded
    return open_video(source, processor.sampling().choose, limits=limits, name=name)


def _token_ids(prompt: Any) -> list[int]:
    try:
        return [int(token) for token in prompt]
    except (TypeError, ValueError):
        raise RequestError(f"prompt={prompt!r}: must be a string or a list of token ids") from None


def _as_list(sources: Any) -> list[Any]:
    """None is none, and whatever is no list is one."""
    if sources is None:
        return []
    return list(sources) if isinstance(sources, list | tuple) else [sources]

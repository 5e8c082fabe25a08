"""``--image`` and ``--video``: files that every prompt of a command shows.

Images are opened before the model is loaded, so that a wrong path costs no minutes; which frames of a video
are read is the model's decision. In a chat they come before the text; a raw prompt may place them itself, and
where it has no placeholder they go in front of it. Read ``llm_media.py`` for what becomes of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapless.errors import ConfigError, RequestError
from gapless.llm_media import MEDIA_KEY, Media
from gapless.models.json_file import read_json
from gapless.models.vl_config import is_vision_language

if TYPE_CHECKING:
    from gapless.cli.prompts import Prompt
    from gapless.llm import LLM


def read_media(images: list[str] | None, videos: list[str] | None) -> Media:
    """Raises ``ConfigError`` naming the file."""
    media = Media()
    if images:
        from gapless.multimodal.loading import open_image

        for path in images:
            try:
                media.add("image", f"--image {path}", open_image(Path(path), name=f"--image {path}"))
            except RequestError as error:
                raise ConfigError(str(error)) from None
    for path in videos or []:
        if not Path(path).is_file():
            raise ConfigError(f"--video {path}: there is no such file")
        media.add("video", f"--video {path}", Path(path))
    return media


def check_source(model: str | None, media: Media) -> None:
    """``check_media`` before anything is loaded, for a folder whose config says that it cannot, and for GGUF
    files, which hold no encoder. What is no model at all is said by who loads it."""
    if not media or not model:
        return
    path = Path(model).expanduser()
    config = path / "config.json"
    if model == "smollm2" or (path.is_file() and path.suffix.lower() == ".gguf"):
        _refuse(media)
    if config.is_file() and not is_vision_language(read_json(config)):
        _refuse(media)


def check_media(llm: LLM, media: Media) -> None:
    """Raises ``ConfigError`` when the model cannot see."""
    if llm.processor is None:
        _refuse(media)


def _refuse(media: Media) -> None:
    if media:
        name = (media.images or media.videos)[0][0]
        raise ConfigError(f"{name}: this model takes text only; give a model with a vision encoder")


def chat_content(text: str, media: Media) -> Any:
    """What a user's message says: ``text``, behind everything that ``media`` holds."""
    if not media:
        return text
    images = [{"type": "image", "image": image} for _, image in media.images]
    videos = [{"type": "video", "video": video} for _, video in media.videos]
    return [*images, *videos, {"type": "text", "text": text}]


def raw_prompt(llm: LLM, prompt: Prompt, media: Media) -> Any:
    """``prompt`` as it is, with ``media`` in its placeholders, or in front of it where it has none."""
    if not media:
        return prompt
    processor = llm.processor
    assert processor is not None
    token_ids = prompt
    if isinstance(prompt, str):
        token_ids = llm.core.intake.encode(prompt) if prompt else []
    placeholders = {processor.config.image_token_id, processor.config.video_token_id}
    if placeholders.isdisjoint(token_ids):
        front = processor.placeholder("image") * len(media.images)
        token_ids = [*front, *processor.placeholder("video") * len(media.videos), *token_ids]
    return {"prompt_token_ids": token_ids, MEDIA_KEY: media.to_data()}

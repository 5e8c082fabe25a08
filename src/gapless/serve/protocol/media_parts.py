"""Parts of a message's content: text, an image, a video.

A part has a type and the field of that name, nothing else. What a URL may be is judged where it is read
(``serve/media.py``); here only its form is. Kinds of parts that exist elsewhere and not here are refused by
name. Read ``chat.py`` for the messages.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from gapless.multimodal.items import MediaKind
from gapless.serve.protocol.common import Strict

Detail = Literal["auto", "low", "high"]

_KINDS: dict[str, MediaKind] = {"image_url": "image", "video_url": "video"}
_TEXTS = ("text", "refusal")


class ImageURL(Strict):
    url: str = Field(min_length=1)
    detail: Detail = "auto"
    """``low``: scaled to fit 512 by 512 pixels before all else. Otherwise the model's processor decides."""


class VideoURL(Strict):
    url: str = Field(min_length=1)


class ContentPart(Strict):
    type: Literal["text", "refusal", "image_url", "video_url"]
    text: str | None = None
    refusal: str | None = None
    image_url: ImageURL | None = None
    video_url: VideoURL | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_of_a_known_kind(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in _TEXTS and kind not in _KINDS:
            known = ", ".join((*_TEXTS, *_KINDS))
            raise ValueError(f"content parts of type {kind[:40]!r} are not supported: send {known}")
        return data

    @model_validator(mode="after")
    def _has_its_field(self) -> ContentPart:
        if getattr(self, self.type) is None:
            raise ValueError(f"a content part of type {self.type!r} needs the field {self.type!r}")
        for name in (*_TEXTS, *_KINDS):
            is_other_text = name in _TEXTS and self.type in _TEXTS  # the two have always been taken together
            if name != self.type and not is_other_text and getattr(self, name) is not None:
                raise ValueError(f"a content part of type {self.type!r} has no field {name!r}")
        return self

    @property
    def media_kind(self) -> MediaKind | None:
        return _KINDS.get(self.type)

    @property
    def content(self) -> str:
        """The text; empty for what is none."""
        return self.text if self.text is not None else self.refusal or ""

    @property
    def url(self) -> str:
        """Of an image or a video."""
        return self.image_url.url if self.image_url is not None else self.video_url.url  # type: ignore[union-attr]

    @property
    def detail(self) -> Detail:
        return self.image_url.detail if self.image_url is not None else "auto"

    def for_template(self) -> dict[str, str]:
        """As templates know parts: they put placeholders where images are, and never see a URL."""
        kind = self.media_kind
        return {"type": "text", "text": self.content} if kind is None else {"type": kind}

"""What every endpoint needs, made once per application.

``TextTokenizer`` is the little that the HTTP side asks of a tokenizer. A model may have none: then prompts
are token ids and answers have no text. Read ``app.py`` for where a context is made.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from gapless.serve.client import EngineClient
from gapless.serve.errors import ApiError, of_validation
from gapless.serve.limits import BodyReader, parse_json
from gapless.serve.media import MediaDesk
from gapless.serve.metrics import RequestMetrics
from gapless.serve.protocol.common import EndpointRequest
from gapless.serve.settings import ServerSettings

_INLINE_BYTES = 64 * 1024
"""A few milliseconds of parsing at worst. Larger bodies are parsed on a thread, beside which the streams of
others go on."""

RequestT = TypeVar("RequestT", bound=EndpointRequest)


class TextTokenizer(Protocol):
    """``models/tokenizer.py`` has it; a chat template is an attribute ``chat_template`` or absent."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeContext:
    """``model_names``: the first stands in answers. ``tool_format``: a key of ``tools.PARSERS``. ``media``:
    None for a model that reads text only."""

    client: EngineClient
    settings: ServerSettings
    bodies: BodyReader
    tokenizer: TextTokenizer | None
    metrics: RequestMetrics
    model_names: tuple[str, ...]
    tool_format: str | None
    media: MediaDesk | None
    created: int
    sampling_defaults: Mapping[str, Any]
    """Of requests that do not name their own."""

    async def parse(self, request: Request, model: type[RequestT]) -> RequestT:
        """The body as ``model``. Raises ``ApiError``."""
        async with self.bodies.read(request) as body:
            if len(body) <= _INLINE_BYTES:
                parsed = _parse(body, model)
            else:
                parsed = await asyncio.to_thread(_parse, body, model)
        if parsed.model is not None and parsed.model not in self.model_names:
            raise unknown_model(parsed.model)
        return parsed


def _parse(body: bytes, model: type[RequestT]) -> RequestT:
    try:
        return model.model_validate(parse_json(body))
    except ValidationError as error:
        raise of_validation(error) from None


def unknown_model(name: str) -> ApiError:
    return ApiError(
        f"the model {name[:200]!r} does not exist here; /v1/models lists what is served",
        status=404,
        param="model",
        code="model_not_found",
    )


def new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


def now() -> int:
    """As OpenAI's ``created``: whole seconds since 1970."""
    return int(time.time())

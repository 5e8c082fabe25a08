"""``POST /v1/embeddings``: texts or token ids, one vector for each."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import PlainValidator, WithJsonSchema

from gapless.serve.protocol.common import IGNORED, CacheSalt, EndpointRequest
from gapless.serve.protocol.completions import PROMPT_SCHEMA, as_prompt_list

Inputs = Annotated[
    list[str | list[int]],
    PlainValidator(lambda value: as_prompt_list("input", value)),
    WithJsonSchema(PROMPT_SCHEMA),
]


class EmbeddingRequest(EndpointRequest):
    ignored: ClassVar[tuple[str, ...]] = tuple(IGNORED)
    neutral: ClassVar[tuple[str, ...]] = ("truncate_prompt_tokens", "priority")

    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    """Only the model's own number: cutting a vector is right only for models trained for it."""
    add_special_tokens: bool = True
    cache_salt: CacheSalt | None = None

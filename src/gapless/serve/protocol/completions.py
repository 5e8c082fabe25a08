"""``POST /v1/completions``: a prompt as text or token ids, or a list of either."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import PlainValidator, WithJsonSchema

from gapless.serve.protocol.common import IGNORED
from gapless.serve.protocol.generation import NEUTRAL, GenerationRequest

MAX_PROMPTS = 1024


def as_prompt_list(name: str, value: Any) -> list[str | list[int]]:
    """One prompt or many, brought to many. A list of integers is one prompt. Raises ``ValueError``."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} must be text, a list of token ids, or a non-empty list of either")
    if _are_ids(value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"{name} has {len(value)} items, the limit is {MAX_PROMPTS} in one request")
    for position, item in enumerate(value):
        if not isinstance(item, str) and not (isinstance(item, list) and _are_ids(item)):
            raise ValueError(f"{name}[{position}] must be text or a non-empty list of token ids")
    return value


def _are_ids(value: list[Any]) -> bool:
    """Token ids are integers; which of them exist is checked with the vocabulary at hand."""
    return set(map(type, value)) == {int}


_IDS: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        _IDS,
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string"}},
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _IDS},
    ]
}

Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(lambda value: as_prompt_list("prompt", value)),
    WithJsonSchema(PROMPT_SCHEMA),
]


class CompletionRequest(GenerationRequest):
    ignored: ClassVar[tuple[str, ...]] = tuple(IGNORED)
    neutral: ClassVar[tuple[str, ...]] = (
        *NEUTRAL,
        "suffix",
    )

    prompt: Prompts
    echo: bool = False
    """The prompt comes back before the text; with ``logprobs``, its log-probabilities too."""
    logprobs: int | None = None
    add_special_tokens: bool = True
    """Whether text prompts get the special tokens (such as BOS) that the model wants."""

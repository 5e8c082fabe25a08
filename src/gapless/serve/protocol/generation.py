"""Fields that chat and plain completions have in common: sampling, stopping, streaming, grammars.

Types are checked here, ranges where ``SamplingParams`` is made (``serve/sampling.py``), so that a limit
stands in one place only.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from gapless.serve.protocol.common import CacheSalt, EndpointRequest, FieldError, FirstFault, Strict


def _as_stop(value: Any) -> list[str]:
    """One string or a list of them."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) and item for item in strings):
        raise ValueError("stop must be a non-empty string or a list of them")
    return strings


Stop = Annotated[
    list[str],
    BeforeValidator(_as_stop),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}},
            ]
        }
    ),
]


class StreamOptions(Strict):
    include_usage: bool | None = None
    """One more event with the usage, before the end."""
    include_obfuscation: bool | None = None
    """Accepted without effect: padding against traffic analysis is never added."""


class JsonSchemaFormat(Strict):
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Without effect: the schema is always enforced."""
    description: str | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_belongs_to_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema and type 'json_schema' go together: give both or neither")
        return self


class StructuredOutputs(Strict):
    """What the text must be: exactly one of these (names as in vLLM)."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: FirstFault[str] | None = None
    grammar: str | None = None
    """EBNF, as xgrammar reads it."""

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        given = [self.json_, self.json_object or None, self.regex, self.choice, self.grammar]
        if sum(value is not None for value in given) != 1:
            raise ValueError(
                "structured_outputs needs exactly one of json, json_object, regex, choice, grammar"
            )
        if self.choice == []:
            raise ValueError("choice must have at least one string")
        return self


NEUTRAL = (
    "logit_bias",
    "best_of",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "prompt_logprobs",
    "priority",
    "bad_words",
    "logits_processors",
    "allowed_token_ids",
    "return_token_ids",
    "return_tokens_as_token_ids",
)
"""Fields of both endpoints that only their neutral values may have."""


class GenerationRequest(EndpointRequest):
    """Every field is None when it was left out: defaults are ``SamplingParams``' own."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Stop | None = None
    stop_token_ids: FirstFault[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: CacheSalt | None = None
    regex: str | None = None
    """The whole text matches it; the same as ``structured_outputs.regex``."""

    @model_validator(mode="after")
    def _options_fit_together(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options is only for requests with stream true")
        has_format = self.response_format is not None and self.response_format.type != "text"
        if has_format + (self.structured_outputs is not None) + (self.regex is not None) > 1:
            raise ValueError("give only one of response_format, structured_outputs and regex")
        return self

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

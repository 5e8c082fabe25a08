"""What all requests share: strict fields, and the one table of fields that are accepted without effect.

A field is in one of four classes. *Supported*: a field of the model. ``IGNORED``: it cannot change what is
generated, so any value is taken. ``NEUTRAL``: not supported, but its default (or null) asks for nothing, so
that is taken and any other value is refused. Everything else is refused by name. A null anywhere at the top
level means that the field was left out. Invariant: no field that could change the answer is dropped silently.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

T = TypeVar("T")


class _FirstOnly(FailFast):
    """Usable in unions, whose members must have a hash."""

    __hash__ = object.__hash__


FirstFault = Annotated[list[T], _FirstOnly()]
"""A list of which only the first wrong item is told: a million of them would take gigabytes to describe."""
TEXT_BRANCH, PARTS_BRANCH = "~text", "~parts"
"""Branches of a field that is text or a list; no part of the path of what is wrong (``errors.py``)."""
CacheSalt = Annotated[str, Field(min_length=1)]
"""Requests that name different ones share no cached prefix, so none can learn from its speed what another
has sent."""
MAX_FIELDS = 256
"""Names in one object. No object here has half as many; of more, each would be an error of its own."""

IGNORED: dict[str, str] = {
    "user": "names the end user, for the operator's statistics",
    "safety_identifier": "names the end user, for abuse reports",
    "metadata": "labels for stored answers; nothing is stored",
    "store": "asks to keep the answer; nothing is kept",
    "service_tier": "a price class",
    "prompt_cache_key": "a hint for routing to a cache; there is one cache",
    "prompt_cache_options": "a hint for a cache; this one needs none",
    "prompt_cache_retention": "a hint for a cache; this one keeps what fits",
}
"""Fields that cannot change what is generated, and what they are."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "priority": (0,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "allowed_token_ids": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "documents": (),
    "mm_processor_kwargs": (),
    "chat_template": (),
    "include_reasoning": (True,),
}
"""Fields that are not supported, and the values (beside null) that ask for nothing."""


def _describe_extras(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Put the tables into the OpenAPI document, which otherwise says that such fields are refused."""
    if not issubclass(model, EndpointRequest):
        return
    properties = schema.setdefault("properties", {})
    for name in model.ignored:
        properties.setdefault(name, {"description": f"Accepted without effect: {IGNORED[name]}."})
    for name in model.neutral:
        allowed = [None, *NEUTRAL[name]]
        properties.setdefault(name, {"enum": allowed, "description": "Not supported; only its default."})


class FieldError(ValueError):
    """A check of several fields found ``field`` at fault: an error body names it as ``param``."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Strict(BaseModel):
    """Unknown fields and values of another type are refused; nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_describe_extras)

    @model_validator(mode="before")
    @classmethod
    def _is_not_a_flood(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise ValueError(f"an object has {len(data)} fields, no object here has over {MAX_FIELDS}")
        return data


class EndpointRequest(Strict):
    """The body of one endpoint. ``ignored`` and ``neutral`` name the table rows that apply to it."""

    ignored: ClassVar[tuple[str, ...]] = ()
    neutral: ClassVar[tuple[str, ...]] = ()

    model: str | None = None
    """Left out: the model that is served."""

    @model_validator(mode="before")
    @classmethod
    def _drop_what_has_no_effect(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError("the body must be a JSON object")
        kept: dict[str, Any] = {}
        for name, value in data.items():
            if name in cls.ignored:
                continue
            if name in cls.neutral:
                _refuse_unless_neutral(name, value)
            elif value is not None or name not in cls.model_fields:
                kept[name] = value
        return kept


def _refuse_unless_neutral(name: str, value: Any) -> None:
    if value is None or any(type(value) is type(v) and value == v for v in NEUTRAL[name]):
        return
    defaults = " or ".join(str(v) for v in ("null", *NEUTRAL[name]))
    raise FieldError(name, f"{name} is not supported: leave it out (only {defaults} is accepted)")

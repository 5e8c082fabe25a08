"""From a request's fields to what the engine takes: sampling parameters and a grammar.

Parameters are checked by making a ``SamplingParams`` here, so a bad value is refused before it crosses to the
engine and the limits stand in one place. What crosses are only the values that differ from the defaults.
Invariant: a field left out means what the model's authors recommend (``defaults``, see
``sampling/generation_config.py``), else ``SamplingParams``' own default, but for ``max_tokens`` of a chat,
which then may be as long as the model allows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from gapless.errors import RequestError
from gapless.sampling.params import SamplingParams
from gapless.serve.errors import ApiError
from gapless.serve.messages import Grammar
from gapless.serve.protocol.chat import ChatRequest, NamedTool, Tool
from gapless.serve.protocol.completions import CompletionRequest
from gapless.serve.protocol.generation import GenerationRequest

_SAME_NAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output"),
    *("ignore_eos", "skip_special_tokens"),
)
MAX_STOPS = 64
MAX_STOP_CHARS = 256
"""Each stop string is looked for after every token, in step with everybody's requests."""
MAX_STOP_TOKEN_IDS = 1024
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}


def chat_params(
    request: ChatRequest, *, defaults: Mapping[str, Any], max_n: int, keeps_special_tokens: bool
) -> dict[str, Any]:
    """``keeps_special_tokens``: the tool-call format is written with them."""
    limit = request.max_completion_tokens
    limit = request.max_tokens if limit is None else limit
    params: dict[str, Any] = {} if limit is None else {"max_tokens": limit}
    if request.logprobs:
        params["logprobs"] = request.top_logprobs or 0
    if keeps_special_tokens:
        params["skip_special_tokens"] = False
    defaults = {"max_tokens": None, **defaults}
    return _checked(request, params, defaults=defaults, max_n=max_n, has_tokenizer=True)


def completion_params(
    request: CompletionRequest, *, defaults: Mapping[str, Any], max_n: int, has_tokenizer: bool
) -> dict[str, Any]:
    """``max_tokens`` 0 is for echo alone; the engine then draws one token, which is dropped."""
    params: dict[str, Any] = {}
    if request.max_tokens is not None:
        params["max_tokens"] = 1 if request.max_tokens == 0 and request.echo else request.max_tokens
    if request.logprobs is not None:
        params["logprobs"] = request.logprobs
    return _checked(request, params, defaults=defaults, max_n=max_n, has_tokenizer=has_tokenizer)


def grammar_of(request: GenerationRequest) -> Grammar | None:
    """The constraint that the request puts on its text, tools aside."""
    chosen = request.structured_outputs
    if request.regex is not None:
        return Grammar(kind="regex", text=request.regex)
    if chosen is not None:
        if chosen.regex is not None:
            return Grammar(kind="regex", text=chosen.regex)
        if chosen.grammar is not None:
            return Grammar(kind="ebnf", text=chosen.grammar)
        if chosen.choice is not None:
            options = " | ".join(json.dumps(text, ensure_ascii=False) for text in chosen.choice)
            return Grammar(kind="ebnf", text=f"root ::= {options}")
        if chosen.json_ is not None:
            return Grammar(kind="json_schema", text=_schema_text(chosen.json_))
        return Grammar(kind="json_object")
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None:
        return Grammar(kind="json_object")
    return Grammar(kind="json_schema", text=json.dumps(wanted.json_schema.schema_, ensure_ascii=False))


def forced_call_grammar(request: ChatRequest) -> Grammar | None:
    """The constraint of a forced call: the arguments of one function, or a list of calls."""
    tools, choice = request.tools or [], request.tool_choice
    if isinstance(choice, NamedTool):
        tool = next(tool for tool in tools if tool.function.name == choice.function.name)
        return Grammar(kind="json_schema", text=json.dumps(_parameters(tool), ensure_ascii=False))
    if choice == "required":
        schema = _list_of_calls(tools, max_calls=None if request.parallel_tool_calls else 1)
        return Grammar(kind="json_schema", text=json.dumps(schema, ensure_ascii=False))
    return None


def _checked(
    request: GenerationRequest,
    params: dict[str, Any],
    *,
    defaults: Mapping[str, Any],
    max_n: int,
    has_tokenizer: bool,
) -> dict[str, Any]:
    for name in _SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            params.setdefault(name, value)
    params = {**defaults, **params}
    _check_stops(request)
    if not has_tokenizer:
        params["detokenize"] = False
    try:
        SamplingParams(**params)
    except OverflowError:
        raise ApiError("a number in the request is too large", code="invalid_value") from None
    n = params.get("n", 1)
    if n > max_n:
        raise RequestError(f"n={n}: this server takes at most {max_n} choices")
    return {name: value for name, value in params.items() if value != _DEFAULTS[name]}


def _check_stops(request: GenerationRequest) -> None:
    stops, ids = request.stop or [], request.stop_token_ids or []
    for name, num, limit in (
        ("stop", len(stops), MAX_STOPS),
        ("stop_token_ids", len(ids), MAX_STOP_TOKEN_IDS),
    ):
        if num > limit:
            raise ApiError(
                f"{name} has {num} items, at most {limit} are taken", param=name, code="invalid_value"
            )
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARS:
        raise ApiError(
            f"stop has a string of {longest} characters, at most {MAX_STOP_CHARS} are taken",
            param="stop",
            code="invalid_value",
        )


def _schema_text(schema: dict[str, Any] | str) -> str:
    if isinstance(schema, dict):
        return json.dumps(schema, ensure_ascii=False)
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ApiError(
            "structured_outputs.json must be a JSON schema, as an object or as its text",
            param="structured_outputs",
            code="invalid_value",
        )
    return schema


def _parameters(tool: Tool) -> dict[str, Any]:
    """A function that names no parameters takes none."""
    parameters = tool.function.parameters
    return parameters if parameters else {"type": "object", "properties": {}}


def _list_of_calls(tools: list[Tool], *, max_calls: int | None) -> dict[str, Any]:
    """Definitions move to the root, where references look for them."""
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        parameters = dict(_parameters(tool))
        for name, definition in parameters.pop("$defs", {}).items():
            if definitions.setdefault(name, definition) != definition:
                raise ApiError(
                    f"two tools define {name!r} in different ways; rename one to use tool_choice 'required'",
                    param="tools",
                    code="invalid_value",
                )
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if max_calls is not None:
        schema["maxItems"] = max_calls
    if definitions:
        schema["$defs"] = definitions
    return schema

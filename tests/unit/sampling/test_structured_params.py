"""``StructuredOutputsParams``: one constraint, checked when made."""

from __future__ import annotations

import json

import pytest

import gapless
from gapless import SamplingParams, StructuredOutputsParams
from gapless.errors import RequestError


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"json": '{"type":"object"}'}, "json_schema", '{"type":"object"}'),
        ({"json": {}}, "json_schema", "{}"),
        ({"json_object": True}, "json_object", ""),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"choice": ["yes", "no"]}, "ebnf", 'root ::= "yes" | "no"'),
        ({"choice": ('"',)}, "ebnf", r'root ::= "\""'),
        ({"choice": ["é\n"]}, "ebnf", r'root ::= "é\n"'),
        ({"regex": "a", "json_object": False, "choice": None}, "regex", "a"),
    ],
    ids=str,
)
def test_every_form_has_a_kind_and_a_text(fields: dict, kind: str, text: str) -> None:
    wanted = StructuredOutputsParams(**fields)
    assert (wanted.kind, wanted.text) == (kind, text)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "none of them"),
        ({"regex": "a", "json_object": True}, "regex and json_object"),
        ({"regex": ""}, "regex"),
        ({"regex": 3}, "regex"),
        ({"grammar": ["a"]}, "grammar"),
        ({"choice": []}, "choice"),
        ({"choice": "yes"}, "choice"),
        ({"choice": [""]}, "choice"),
        ({"choice": [1]}, "choice"),
        ({"json": 3}, "json"),
        ({"json": {"enum": [b"bytes"]}}, "not a JSON schema"),
        ({"json": {"const": float("nan")}}, "not a JSON schema"),
        ({"json_object": "yes"}, "json_object"),
    ],
    ids=str,
)
def test_what_is_malformed_is_refused_by_name(fields: dict, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        StructuredOutputsParams(**fields)


def test_a_schema_nested_in_itself_is_refused() -> None:
    schema: dict = {"type": "object"}
    schema["items"] = schema
    with pytest.raises(RequestError, match="not a JSON schema"):
        StructuredOutputsParams(json=schema)


def test_a_schema_given_as_a_dict_may_change_afterwards() -> None:
    schema = {"type": "object"}
    wanted = StructuredOutputsParams(json=schema)
    schema["type"] = "array"
    assert json.loads(wanted.text) == {"type": "object"}


@pytest.mark.parametrize("value", [{"regex": "a"}, "a", True])
def test_sampling_params_take_nothing_else(value: object) -> None:
    with pytest.raises(RequestError, match="StructuredOutputsParams"):
        SamplingParams(structured_outputs=value)  # type: ignore[arg-type]


def test_an_embedding_cannot_be_constrained() -> None:
    with pytest.raises(RequestError, match="embedding"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), pooling="last")


def test_it_is_a_public_name() -> None:
    assert "StructuredOutputsParams" in gapless.__all__

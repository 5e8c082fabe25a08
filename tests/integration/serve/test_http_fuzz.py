"""Generated requests from our own OpenAPI document: valid ones, broken ones, and noise. Never a 5xx.

The engine is a fake that answers at once; ``make soak`` runs the same with many more examples.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from http_fakes import FakeClient, answer, call, chat_body, make_app, post, text_body
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

schemathesis = pytest.importorskip("schemathesis")

IS_SOAK = os.environ.get("GAPLESS_SOAK") == "1"
EXAMPLES = 400 if IS_SOAK else 5
pytestmark = [pytest.mark.soak] if IS_SOAK else []  # a soak runs nothing without the mark
APP = make_app(FakeClient(answer("[{}]")), max_body_bytes=2**20)
DOCUMENT = call(APP, "GET", "/openapi.json").json()
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)
QUIET = list(HealthCheck)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def check(response: Any, *, path: str) -> None:
    """A documented status, and a body in the shape that goes with it."""
    assert response.status_code < 500, response.text
    assert response.headers.get("x-request-id")
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert len(error["message"]) <= 1000


@SCHEMA.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=QUIET)
def test_requests_made_from_the_document_get_documented_answers(case):
    response = case.call(timeout=10)
    check(response, path=case.path)
    operation = DOCUMENT["paths"][case.path].get(case.method.lower())
    documented = operation["responses"] if operation is not None else {"405": None}
    assert str(response.status_code) in documented


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
NAMES = {
    CHAT: sorted(DOCUMENT["components"]["schemas"]["ChatRequest"]["properties"]),
    TEXT: sorted(DOCUMENT["components"]["schemas"]["CompletionRequest"]["properties"]),
}
BODIES = {CHAT: chat_body(), TEXT: text_body()}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@given(data=st.data())
@settings(max_examples=EXAMPLES * 6, deadline=None, suppress_health_check=QUIET)
def test_good_requests_with_some_field_replaced_by_anything(path, data):
    changes = data.draw(st.dictionaries(st.sampled_from(NAMES[path]), JSON, min_size=1, max_size=3))
    check(post(APP, path, {**BODIES[path], **changes}), path=path)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@given(data=st.data())
@settings(max_examples=EXAMPLES * 5, deadline=None, suppress_health_check=QUIET)
def test_good_bodies_with_bytes_changed(path, data):
    raw = bytearray(json.dumps(BODIES[path]).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(raw) - 1))
        raw[position : position + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        if not raw:
            break
    headers = {"content-type": "application/json"}
    check(call(APP, "POST", path, content=bytes(raw), headers=headers), path=path)


@given(
    headers=st.lists(
        st.tuples(
            st.sampled_from(
                [
                    "content-type",
                    "content-length",
                    "content-encoding",
                    "authorization",
                    "x-request-id",
                    "origin",
                    "host",
                ]
            ),
            st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20),
        ),
        max_size=4,
    )
)
@settings(max_examples=EXAMPLES * 5, deadline=None, suppress_health_check=QUIET)
def test_strange_headers(headers):
    app = make_app(FakeClient(answer("x")), cors_origins=("*",), api_keys=("k",))
    check(call(app, "POST", TEXT, content=json.dumps(text_body()), headers=headers), path=TEXT)


def test_the_document_names_every_endpoint_and_refuses_unknown_fields():
    assert set(DOCUMENT["paths"]) >= {
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/tokenize"),
        *("/v1/models/{model_id}", "/detokenize", "/health", "/metrics", "/server_info", "/version"),
    }
    for name in ("ChatRequest", "CompletionRequest", "EmbeddingRequest", "TokenizeRequest"):
        assert DOCUMENT["components"]["schemas"][name]["additionalProperties"] is False

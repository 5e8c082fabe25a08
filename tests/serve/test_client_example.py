"""The example with the ``openai`` package runs as it stands, against the real application."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from live_server import MODEL, FakeClient, Served

FILE = Path(__file__).parents[2] / "examples" / "openai_client.py"


@pytest.mark.parametrize("keys", [(), ("a-key",)])
def test_the_example_gets_the_same_answer_whole_and_streamed(keys):
    spec = importlib.util.spec_from_file_location("openai_client_example", FILE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    served = Served(FakeClient(), api_keys=keys)
    try:
        found = example.main(served.url, *keys)
    finally:
        served.close()
    assert found.pop("first_logprob") == -1.25
    assert found == {
        **{"model": MODEL, "chat": "Hello, wörld!", "streamed": "Hello, wörld!"},
        **{"streamed_tokens": 14, "continued": "Hello, wörld!"},
    }

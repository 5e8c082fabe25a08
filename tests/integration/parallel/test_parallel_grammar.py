"""Rows that follow a grammar, whose masks only the first rank has, beside rows that run ahead without one."""

from __future__ import annotations

from forked_ranks import OPTIONS, open_llm
from tiny_served_model import write_model

from gapless import SamplingParams
from gapless.sampling.structured import StructuredOutputsParams


def test_grammars_penalties_and_plain_rows_in_one_batch(tmp_path):
    write_model(tmp_path)
    prompts = ["abc", "xyz", "hello", "12"]
    words = StructuredOutputsParams(regex="(ab|ba|c){4,9}")
    params = [
        SamplingParams(temperature=1.0, seed=1, max_tokens=12, structured_outputs=words),
        SamplingParams(temperature=1.0, seed=2, max_tokens=30, ignore_eos=True),
        SamplingParams(
            temperature=0.8, seed=3, max_tokens=10, structured_outputs=words, repetition_penalty=1.5
        ),
        SamplingParams(temperature=1.0, seed=4, max_tokens=25, presence_penalty=0.9, ignore_eos=True),
    ]
    results = []
    for ranks in (1, 2):
        options = {"enforce_eager": True, "kv_cache_tokens": 1024}
        with open_llm(str(tmp_path), ranks, **{**OPTIONS, **options}) as llm:
            outputs = llm.generate(prompts, params)
            results.append([(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs])
            texts = [outputs[i].outputs[0].text for i in (0, 2)]
    assert results[0] == results[1]
    assert all(set(text) <= set("abc") and text for text in texts)

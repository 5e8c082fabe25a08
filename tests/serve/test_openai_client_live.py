"""The official client against a real engine: every field of the API has the effect that its name promises."""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tiny_served_model import HIDDEN_SIZE, MAX_MODEL_LEN, NAME

from gapless.llm import LLM
from gapless.sampling.params import SamplingParams

pytest.importorskip("xgrammar")
HI = [{"role": "user", "content": "Hi"}]
LETTERS = {"regex": "[a-z]{40}"}
"""Text that can be read, whatever the weights are."""
PARAMETERS = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS, "strict": True}}
    for name in ("look", "listen")
]


@pytest.fixture(scope="module")
def api(tiny_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def complete(api: openai.OpenAI, prompt: Any = "Once", **fields: Any) -> Any:
    return api.completions.create(
        **{"model": NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}
    )


def chat(api: openai.OpenAI, **fields: Any) -> Any:
    return api.chat.completions.create(
        **{"model": NAME, "messages": HI, "max_tokens": 40, "temperature": 0, **fields}
    )


def test_n_choices_come_in_order_and_seeds_repeat_them(api):
    def texts(seed: int) -> list[str]:
        choices = complete(api, n=3, temperature=1, seed=seed, extra_body=LETTERS, max_tokens=40).choices
        assert [choice.index for choice in choices] == [0, 1, 2]
        return [choice.text for choice in choices]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)
    assert len(set(texts(1))) == 3, "choices of one request differ"


def test_a_stop_string_ends_the_text_and_is_left_out_or_kept(api):
    fields = {"regex": "[a-z]{40}"}
    text = complete(api, extra_body=fields, max_tokens=40).choices[0].text
    stop = text[20:22]
    expected = text[: text.index(stop)]
    for given in (stop, ["never", stop]):
        choice = complete(api, stop=given, extra_body=fields, max_tokens=40).choices[0]
        assert (choice.text, choice.finish_reason, choice.stop_reason) == (expected, "stop", stop)
    kept = complete(api, stop=stop, extra_body={**fields, "include_stop_str_in_output": True}, max_tokens=40)
    assert kept.choices[0].text == expected + stop


def test_a_stop_token_ends_the_text(api):
    third = httpx.post(f"{root(api)}/tokenize", json={"prompt": "c"}).json()["tokens"][0]
    reply = complete(api, extra_body={"structured_outputs": {"regex": "abcd"}, "stop_token_ids": [third]})
    assert (reply.choices[0].finish_reason, reply.choices[0].stop_reason) == ("stop", third)


def test_logprobs_of_a_completion_and_of_its_echo(api):
    choice = complete(api, "Once", echo=True, logprobs=3, max_tokens=2).choices[0]
    assert choice.text.startswith("Once")
    logprobs = choice.logprobs
    assert logprobs.tokens[:4] == list("Once")
    assert len(logprobs.token_logprobs) == 6
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert all(len(top) in (3, 4) for top in logprobs.top_logprobs[1:])
    assert logprobs.text_offset[:4] == [0, 1, 2, 3]
    alone = complete(api, "Once", echo=True, logprobs=1, max_tokens=0)
    assert (alone.choices[0].text, alone.usage.completion_tokens) == ("Once", 0)
    assert alone.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[:4]


def test_logprobs_of_a_chat(api):
    content = chat(api, logprobs=True, top_logprobs=4, max_tokens=5).choices[0].logprobs.content
    assert len(content) == 5
    for entry in content:
        assert len(entry.top_logprobs) == 4
        assert entry.logprob == entry.top_logprobs[0].logprob == max(t.logprob for t in entry.top_logprobs)
        assert len(entry.bytes) <= 4


@pytest.mark.parametrize("extra", [{"top_k": 1}, {"min_p": 1.0}], ids=str)
def test_filters_that_leave_one_token_make_any_temperature_greedy(api, extra):
    text = complete(api, extra_body={"top_k": 1}, temperature=0).choices[0].text
    assert complete(api, extra_body=extra, temperature=2, seed=3).choices[0].text == text
    assert complete(api, temperature=2, top_p=1e-9, seed=3).choices[0].text == text


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"extra_body": {"repetition_penalty": 5.0}},
    ],
    ids=str,
)
def test_penalties_keep_letters_from_coming_again(api, fields):
    def letters(**more: Any) -> int:
        extra = {"regex": "[a-z]{26}", **more.pop("extra_body", {})}
        return len(set(complete(api, max_tokens=26, extra_body=extra, **more).choices[0].text))

    assert letters(**fields) > letters()


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(api, name):
    fields = {"max_tokens": openai.omit, name: 5}
    reply = chat(api, extra_body={"ignore_eos": True}, **fields)
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (5, "length")


def test_min_tokens_and_ignore_eos_go_on(api):
    reply = complete(api, extra_body={"ignore_eos": True, "min_tokens": 30}, max_tokens=30, temperature=2)
    assert reply.usage.completion_tokens == 30


@pytest.mark.parametrize("includes_usage", [True, False])
def test_streams_and_their_usage(api, includes_usage):
    fields = {"max_tokens": 30, "extra_body": {"regex": "[a-z]{30}"}}
    whole = complete(api, **fields)
    options = {"stream_options": {"include_usage": True}} if includes_usage else {}
    chunks = list(complete(api, stream=True, **options, **fields))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert len(usages) == int(includes_usage)
    assert not usages or usages[0].total_tokens == whole.usage.total_tokens


def test_prompts_of_every_form(api):
    ids = [httpx.post(f"{root(api)}/tokenize", json={"prompt": p}).json()["tokens"] for p in ("ab", "cd")]
    texts = [complete(api, p, echo=True).choices[0].text for p in ("ab", "cd")]
    assert complete(api, ids[0], echo=True).choices[0].text == texts[0]
    for prompts in (["ab", "cd"], ids):
        assert [choice.text for choice in complete(api, prompts, echo=True).choices] == texts


def test_what_has_no_effect_is_accepted(api):
    fields = {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True}
    extra = {"prompt_cache_key": "k", "safety_identifier": "s", "logit_bias": None}
    text = chat(api).choices[0].message.content
    assert chat(api, user="u", extra_body=extra, **fields).choices[0].message.content == text


def test_formats_bind_the_text(api):
    class_of = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    value = json.loads(chat(api, response_format=class_of, max_tokens=400).choices[0].message.content)
    assert value.keys() == {"name", "ok"}
    assert re.fullmatch("[0-9]{4}", complete(api, extra_body={"regex": "[0-9]{4}"}).choices[0].text)
    anything = chat(api, response_format={"type": "json_object"}, max_tokens=400, temperature=1, seed=1)
    if anything.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(anything.choices[0].message.content), dict)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "listen"}}], ids=str
)
def test_forced_calls(api, choice):
    reply = chat(api, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=400)
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name in (("look", "listen") if choice == "required" else ("listen",))
    assert json.loads(call.function.arguments).keys() == {"name", "ok"}


CALL = (
    r'<tool_call>\n\{"name": "(look|listen)", "arguments": '
    r'\{"name": "[a-zé]{3}", "ok": (true|false)\}\}\n</tool_call>'
)
ANSWERS = {
    "a call": (CALL, 1, None),
    "text, then a call": (f"[a-z]{{8}}\\. {CALL}", 1, r"[a-z]{8}\."),
    "two calls": (f"{CALL}\n{CALL}", 2, None),
    "text alone": ("[a-z]{8} <tool", 0, "[a-z]{8} <tool"),
}


@pytest.mark.parametrize(
    ("choice", "answer"),
    [*(("auto", name) for name in ANSWERS), pytest.param(openai.omit, "a call", id="omitted")],
)
def test_calls_are_found_in_what_a_model_writes_by_itself(api, choice, answer):
    """The grammar makes the random model write what a trained one does; finding calls is the server's."""
    regex, num_calls, content = ANSWERS[answer]
    fields = {"tools": TOOLS, "tool_choice": choice, "extra_body": {"structured_outputs": {"regex": regex}}}
    fields |= {"max_tokens": 300, "temperature": 1, "seed": 7}
    reply = chat(api, **fields).choices[0]
    calls = reply.message.tool_calls or []
    assert len(calls) == num_calls
    assert reply.finish_reason == ("tool_calls" if num_calls else "stop")
    assert all(json.loads(call.function.arguments).keys() == {"name", "ok"} for call in calls)
    assert reply.message.content is None if content is None else re.fullmatch(content, reply.message.content)

    found: list[list[str]] = []
    text, reason = "", None
    for chunk in chat(api, stream=True, **fields):
        (part,) = chunk.choices
        text += part.delta.content or ""
        reason = part.finish_reason or reason
        for delta in part.delta.tool_calls or []:
            if delta.id is not None:
                assert delta.index == len(found)
                found.append([delta.function.name, ""])
            found[delta.index][1] += delta.function.arguments or ""
    assert found == [[call.function.name, call.function.arguments] for call in calls]
    assert (text or None, reason) == (reply.message.content, reply.finish_reason)


HISTORY: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Is"}, {"type": "text", "text": "it?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"name": "é"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "yes"}]},
    {"role": "user", "content": "So?"},
]
RENDERED = (
    "TOOLS look listen <tool_call>|system: Be brief.|user: Is\nit?|assistant:  calls look of é|"
    "tool: yes for c1|user: So?|mood good|assistant: "
)


def test_calls_and_their_results_in_a_history_reach_the_template(api):
    fields = {"messages": HISTORY, "tools": TOOLS, "chat_template_kwargs": {"mood": "good"}}
    tokens = httpx.post(f"{root(api)}/tokenize", json=fields).json()["tokens"]
    text = httpx.post(f"{root(api)}/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == RENDERED
    kwargs = {"chat_template_kwargs": fields.pop("chat_template_kwargs")}
    assert chat(api, extra_body=kwargs, **fields).usage.prompt_tokens == len(tokens)


def test_an_image_is_refused_in_words(api):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What?"}, image]}]
    with pytest.raises(
        openai.BadRequestError,
        match=r"content\[1\]: content parts of type 'image_url' are not supported: this model reads text",
    ):
        chat(api, messages=messages)


@pytest.fixture(scope="module")
def vectors(tiny_folder: Path) -> dict[str, list[float]]:
    """The same weights in this process, one prompt at a time."""
    pooled = {}
    with LLM(str(tiny_folder), load_format="dummy", enforce_eager=True, kv_cache_tokens=4096) as llm:
        for text in ("a", "some text", "ü" * 40):
            params = SamplingParams(max_tokens=1, pooling="last", detokenize=False)
            llm.core.add_request("r", text, params)
            (delta,) = [
                delta for _ in range(3) if llm.core.has_unfinished() for delta in llm.core.step_deltas()
            ]
            assert delta.embedding is not None
            pooled[text] = delta.embedding
    return pooled


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_embeddings_are_the_engines_own_vectors(api, vectors, form):
    fields = {} if form is None else {"encoding_format": form}
    texts = list(vectors)
    reply = api.embeddings.create(model=NAME, input=texts, dimensions=HIDDEN_SIZE, **fields)
    assert [item.index for item in reply.data] == [0, 1, 2]
    assert reply.usage.prompt_tokens == sum(len(text.encode()) for text in texts)
    for item, text in zip(reply.data, texts, strict=True):
        found = item.embedding
        if isinstance(found, str):
            found = struct.unpack(f"<{HIDDEN_SIZE}f", base64.b64decode(found))
        assert found == pytest.approx(vectors[text], abs=1e-5)
        assert sum(value * value for value in found) == pytest.approx(1, abs=1e-4)
    one = api.embeddings.create(model=NAME, input=list(b"some text"), extra_body={"user": "u"})
    assert len(one.data) == 1, "token ids are one input"


def test_prefixes_are_shared_by_those_with_one_salt_until_they_are_forgotten(api):
    ids = [7, 3] * 32

    def cached(salt: str | None = None) -> int:
        extra = {} if salt is None else {"cache_salt": salt}
        return complete(api, ids, max_tokens=1, extra_body=extra).usage.prompt_tokens_details.cached_tokens

    assert (cached(), cached()) == (0, 48)
    assert (cached("one"), cached("two"), cached("one"), cached()) == (0, 0, 48, 48)
    reset = httpx.post(f"{root(api)}/reset_prefix_cache")
    assert (reset.status_code, reset.content) == (200, b"")
    assert (cached(), cached("one")) == (0, 0)
    with pytest.raises(openai.BadRequestError, match="cache_salt"):
        cached("")


def test_models_and_errors(api):
    (model,) = api.models.list().data
    assert (model.id, model.max_model_len) == (NAME, MAX_MODEL_LEN)
    assert api.models.retrieve(NAME) == model
    with pytest.raises(openai.NotFoundError):
        chat(api, model="other")
    with pytest.raises(openai.BadRequestError) as caught:
        complete(api, max_tokens=MAX_MODEL_LEN)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        chat(api, extra_body={"colour": 1})
    assert (caught.value.param, caught.value.code) == ("colour", "unknown_parameter")


def test_health_has_a_head(tiny_url):
    head = httpx.head(f"{tiny_url}/health")
    assert (head.status_code, head.content) == (200, b"")


def root(api: openai.OpenAI) -> str:
    return str(api.base_url).removesuffix("/v1/")

"""Grammars without an engine: what compiles, what is refused and why, and what a matcher allows."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.engine import grammar as module
from gapless.engine.grammar import CompiledGrammar, GrammarCompiler, GrammarMatcher
from gapless.engine.grammar_schema import MAX_NESTING, prepare_schema
from gapless.errors import GaplessError, RequestError
from gapless.sampling.structured import StructuredOutputsParams

pytest.importorskip("xgrammar")
LETTERS = st.characters(exclude_categories=("Cs", "Cc"), include_characters="\n")
"""Those with one spelling only in JSON without needless escapes."""
EOS, SPECIAL = 256, 257
VOCAB_SIZE = 300
"""Wider than the tokenizer, and not a multiple of 32."""


class ByteTokenizer:
    """Token n is byte n; then EOS and one more special token."""

    def token_bytes(self) -> list[bytes]:
        return [bytes([byte]) for byte in range(256)] + [b"", b""]


def make_compiler(**options) -> GrammarCompiler:
    return GrammarCompiler(ByteTokenizer(), **{"vocab_size": VOCAB_SIZE, "eos_token_ids": [EOS], **options})


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return make_compiler()


def allowed(matcher: GrammarMatcher, banned=()) -> set[int]:
    words = np.full(-(-VOCAB_SIZE // 32), 0x55555555, np.int32)
    matcher.fill(words, banned=banned)
    return {t for t in range(32 * len(words)) if int(words[t // 32]) >> t % 32 & 1}


def matcher_of(compiler: GrammarCompiler, end_ids=(EOS,), **fields) -> GrammarMatcher:
    return GrammarMatcher(compiler.compile(StructuredOutputsParams(**fields)), end_ids)


def fits(compiler: GrammarCompiler, text: str, **fields) -> bool:
    matcher = matcher_of(compiler, **fields)
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(EOS)


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"regex": r"a{2,3}"}, ["aa", "aaa"], ["a", "aaaa", "b"]),
        ({"regex": r"^é[0-9]?$"}, ["é", "é7"], ["e", "é77"]),
        ({"choice": ["yes", "no", 'a"b\n']}, ["yes", "no", 'a"b\n'], ["y", "yesno", ""]),
        ({"grammar": 'root ::= "(" root ")" | "x"'}, ["x", "((x))"], ["((x)", "()"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a"}']),
        ({"json": {"type": "array"}}, ["[]", '[1,"a"]'], ["{}"]),
        (
            {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
            ['{"a":1}', '{ "a" : 1 }'],
            ["{}", '{"a":1,"b":2}', '{"a":"x"}', '{"a":01}'],
        ),
        ({"json": {"type": "object", "additionalProperties": {"type": "null"}}}, ['{"x":null}'], ['{"x":1}']),
        (
            {"json": {"properties": {"a": {}}, "type": "object", "additionalProperties": True}},
            ['{"a":1,"b":2}'],
            [],
        ),
        (
            {"json": {"properties": {"not": {"type": "null"}}, "type": "object"}},
            ['{"not":null}'],
            ['{"if":1}'],
        ),
        ({"json": {"enum": ["a", 1, None]}}, ['"a"', "1", "null"], ["2"]),
        ({"json": {"$ref": "#/$defs/n", "$defs": {"n": {"type": "boolean"}}}}, ["true"], ["1"]),
        ({"json": "true"}, [], []),
    ],
    ids=str,
)
def test_texts_that_fit_and_texts_that_do_not(compiler, fields, good, bad):
    if fields == {"json": "true"}:
        with pytest.raises(RequestError, match="must be an object"):
            compiler.compile(StructuredOutputsParams(**fields))
        return
    assert [text for text in good if not fits(compiler, text, **fields)] == []
    assert [text for text in bad if fits(compiler, text, **fields)] == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"regex": "(a"}, "regular expression cannot be used: Regex parsing error at position 3"),
        ({"regex": r"a(?=b)"}, "Lookahead"),
        ({"regex": r"(a)\1"}, "Backreference"),
        ({"grammar": 'root ::= "a" | b'}, 'grammar cannot be used: EBNF parser error .* Rule "b"'),
        ({"grammar": 'start ::= "a"'}, 'root rule with name "root"'),
        ({"json": "{"}, "the JSON schema is not JSON"),
        ({"json": "[]"}, "must be an object"),
        ({"json": {"type": "strnig"}}, 'JSON schema cannot be used: Unsupported type "strnig"'),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum greater than maximum"),
        ({"json": {"$ref": "#/$defs/x"}}, r"\$defs"),
        ({"json": {"$ref": "http://x/y"}}, r"\$ref='http://x/y'"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "Circular"),
        ({"json": {"enum": []}}, "empty"),
        ({"json": {"properties": {"a": {"not": {}}}}}, "#/properties/a: 'not' is not supported"),
        ({"json": {"type": "integer", "multipleOf": 3}}, "'multipleOf'"),
        ({"json": {"items": {"type": "array", "uniqueItems": True}}}, "#/items: 'uniqueItems'"),
        ({"json": {"allOf": [{}, {}]}}, "allOf"),
        ({"json": {"anyOf": [{}], "properties": {}}}, "'properties' beside 'anyOf'"),
        ({"json": {"anyOf": [{"type": "null"}], "type": "null"}}, "'type' beside 'anyOf'"),
        ({"json": {"enum": [1], "$ref": "#"}}, r"'enum' beside '\$ref'"),
        ({"json": {"type": "string", "pattern": "a", "minLength": 2}}, "'pattern' together with a length"),
        ({"json": {"type": "string", "pattern": 'a"'}}, "escapes"),
        ({"json": {"type": "string", "pattern": "[\\t]"}}, "escapes"),
        ({"json": {"type": "object", "patternProperties": {"\\\\u000a": {}}}}, "escapes"),
        ({"regex": "a" * (module.MAX_GRAMMAR_CHARS + 1)}, "more than the 262144"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_used_is_refused_with_the_reason(compiler, fields, words):
    with pytest.raises(RequestError, match=words) as caught:
        compiler.compile(StructuredOutputsParams(**fields))
    assert ".cc:" not in str(caught.value), "a place in the compiler's source tells a user nothing"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "string", "minLength": 1},
        {"type": "string", "maxLength": 2},
        {"type": ["string", "null"], "minLength": 1, "maxLength": 1},
        *({"type": "string", "pattern": p} for p in (".", "[^a]", r"\s", r"\W", r'[^"\\]', "[ -~]", r"\x41")),
        *({"type": "string", "format": name} for name in ("email", "date-time", "uri", "unheard-of")),
        {"type": "object", "properties": {'"': {"enum": ['"\n']}}},
        {"type": "object", "propertyNames": {"maxLength": 1}},
        {"type": "object", "patternProperties": {".": {}}},
    ],
    ids=str,
)
def test_no_schema_lets_bytes_through_that_json_forbids(compiler, schema):
    """After every beginning that fits, a byte that would end up unescaped in a string is not allowed."""
    for beginning in ('"', '{"', '"a', '"\u00e9', '{"a":"', '{"\\""'):
        matcher = matcher_of(compiler, json=schema)
        if all(matcher.accept(byte) for byte in beginning.encode()):
            inside = beginning.replace('\\"', "").count('"') % 2 == 1
            assert not (inside and allowed(matcher) & set(range(0x20)))


NO_CHARACTERS = {
    "surrogate": b"\xed\xa0\x80",
    "last surrogate": b"\xed\xbf\xbf",
    "overlong of two": b"\xc0\x80",
    "overlong of three": b"\xe0\x80\x80",
    "overlong of four": b"\xf0\x80\x80\x80",
    "past the last character": b"\xf4\x90\x80\x80",
    "five bytes": b"\xf8\x88\x80\x80",
    "cut": b"\xe2\x82a",
    "continuation alone": b"\x80",
}


@pytest.mark.parametrize(
    "fields",
    [{"json_object": True}, {"json": {"type": "object", "additionalProperties": {"type": "string"}}}],
)
@pytest.mark.parametrize(
    ("escape", "is_whole"),
    [
        *((r"\u0000", True), (r"\uD7ff", True), (r"\ue000", True), (r"\uFFFF", True)),
        *((r"\ud83d\ude42", True), (r"\uDBFF\uDFFF\n", True), (r"\"\\\/\b\f\n\r\t", True)),
        *((r"\ud800", False), (r"\udc00", False), (r"\uDFFF\uD800", False), (r"\ud83d\ud83d", False)),
        *((r"\ud83d\n", False), (r"\ud83d🙂", False), (r"\x41", False), (r"\u12", False)),
    ],
)
def test_escapes_are_whole_characters(compiler, fields, escape, is_whole):
    """A half of a surrogate pair is no text: strict readers refuse it."""
    for text in (f'{{"{escape}":"a"}}', f'{{"a":"{escape}"}}'):
        assert fits(compiler, text, **fields) == is_whole
    if is_whole:
        json.loads(text)["a"].encode()


@pytest.mark.parametrize("text", NO_CHARACTERS.values(), ids=NO_CHARACTERS)
@pytest.mark.parametrize(
    ("fields", "beginning"),
    [
        ({"json": {"type": "string"}}, b'"'),
        ({"json": {"type": "string", "maxLength": 4}}, b'"'),
        ({"json": {"type": "string", "pattern": "^.{1,4}$"}}, b'"'),
        ({"json": {"type": "string", "pattern": "^[^a]{1,4}$"}}, b'"'),
        ({"json": {"type": "object"}}, b'{"'),
        ({"json_object": True}, b'{"'),
        ({"regex": r"[^a]{1,4}"}, b""),
        ({"regex": r"[\s\S]*"}, b"a"),
        ({"grammar": "root ::= [^a]*"}, b"\xc3\xa9"),
    ],
    ids=str,
)
def test_no_grammar_lets_bytes_through_that_are_no_character(compiler, fields, beginning, text):
    """They would be one character for the grammar and several U+FFFD in the text."""
    matcher = matcher_of(compiler, **fields)
    for byte in beginning + text:
        if byte not in allowed(matcher):
            break
        assert matcher.accept(byte)
    else:
        pytest.fail("all of its bytes were allowed")
    assert not matcher.accept(byte)


@given(st.lists(st.text(LETTERS, min_size=1, max_size=6), min_size=1, max_size=4, unique=True))
@settings(max_examples=50, deadline=None)
def test_names_and_values_are_spelled_as_the_schema_does(compiler, texts):
    """Beside a string of limited length, whose grammar is printed and read again."""
    properties = {text: {"const": text + "é1"} for text in texts}
    schema = {
        "type": "object",
        "properties": {**properties, "limited": {"type": "string", "maxLength": 3}},
        "required": texts,
    }
    value = {text: text + "é1" for text in texts}
    assert fits(compiler, json.dumps(value, ensure_ascii=False), json=schema)


@pytest.mark.parametrize("open_text", ['{"items":', '{"properties":{"a":', '{"anyOf":[', '{"$defs":{"a":'])
def test_deep_schemas_are_refused_before_they_cost_anything(open_text):
    close = "".join({"{": "}", "[": "]"}[c] for c in reversed(open_text) if c in "{[")
    inside = MAX_NESTING - 1
    assert prepare_schema(open_text * inside + "{}" + close * inside)
    for depth in (inside + 1, 100_000):
        with pytest.raises(RequestError, match="nested"):
            prepare_schema(open_text * depth + "{}" + close * depth)


def test_harmless_values_of_unsupported_keywords_pass():
    schema = {
        "type": "array",
        "uniqueItems": False,
        "title": "not",
        "description": "x",
        "default": {"not": 1},
    }
    assert json.loads(prepare_schema(json.dumps(schema))) == schema


def test_the_end_is_allowed_only_where_the_grammar_accepts(compiler):
    matcher = matcher_of(compiler, regex="ab?")
    assert allowed(matcher) == {ord("a")}
    assert matcher.accept(ord("a"))
    assert allowed(matcher) == {ord("b"), EOS}
    assert matcher.accept(ord("b"))
    assert allowed(matcher) == {EOS}
    assert not matcher.is_terminated
    assert matcher.accept(EOS)
    assert matcher.is_terminated


def test_ids_without_text_are_never_allowed(compiler):
    matcher = matcher_of(compiler, regex=r"[\s\S]*")
    assert allowed(matcher) <= {*range(256), EOS}
    assert SPECIAL not in allowed(matcher)


@given(st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=8))
@settings(max_examples=30, deadline=None)
def test_banned_tokens_are_left_out_while_there_are_others(compiler, banned):
    matcher = matcher_of(compiler, regex="[abc]?")
    fitting = {*b"abc", EOS}
    assert allowed(matcher, banned) == (fitting - banned or fitting)


def test_where_only_the_end_fits_it_cannot_be_banned(compiler):
    matcher = matcher_of(compiler, regex="a")
    assert matcher.accept(ord("a"))
    assert allowed(matcher, {EOS}) == {EOS}


@pytest.mark.parametrize("grammar", ["root ::= root", 'root ::= root "a"'])
def test_a_grammar_that_no_text_fits_is_found_at_its_first_mask(compiler, grammar):
    with pytest.raises(GaplessError, match="no text fits"):
        allowed(matcher_of(compiler, grammar=grammar))


def test_an_ambiguous_grammar_ends_before_it_costs_seconds(compiler, monkeypatch):
    monkeypatch.setattr(module, "MAX_MASK_S", 0.005)
    matcher = matcher_of(compiler, regex="((a*)*b*)*c")

    def go_on() -> None:
        for _ in range(300):
            allowed(matcher)
            matcher.accept(ord("a"))

    with pytest.raises(GaplessError, match="less ambiguous"):
        go_on()


def test_one_text_is_compiled_once(compiler):
    first = compiler.compile(StructuredOutputsParams(json={"type": "null"}))
    assert compiler.compile(StructuredOutputsParams(json='{"type": "null"}')) is first
    assert compiler.compile(StructuredOutputsParams(regex="null")) is not first


def test_what_failed_is_forgotten(compiler):
    wanted = StructuredOutputsParams(regex="(((")
    for _ in range(2):
        with pytest.raises(RequestError):
            compiler.compile(wanted)
    deadline = time.monotonic() + 10
    while ("regex", "(((") in compiler._cache:  # the thread forgets it just after it has told the error
        assert time.monotonic() < deadline


def test_the_cache_keeps_the_latest_within_its_limit(monkeypatch):
    monkeypatch.setattr(module, "_CACHE_BYTES", 20_000)
    compiler = make_compiler()
    for number in range(40):
        compiler.compile(StructuredOutputsParams(regex=f"[a-z]{{{number + 1}}}x{{{number}}}"))
    compiled = [future.result() for future in list(compiler._cache.values()) if future.done()]
    assert 1 <= len(compiled) < 40
    assert ("regex", "[a-z]{40}x{39}") in compiler._cache


def test_compiling_waits_for_nobody_else(compiler, monkeypatch):
    """``start`` returns at once, whatever the threads are busy with."""
    release, busy = threading.Event(), make_compiler()
    compile_now = busy._compile
    monkeypatch.setattr(busy, "_compile", lambda *args: (release.wait(20), compile_now(*args))[1])
    futures: list[Future[CompiledGrammar]] = [
        busy.start(StructuredOutputsParams(regex="a" * n)) for n in range(1, 9)
    ]
    assert not any(future.done() for future in futures)
    release.set()
    assert all(future.result(20).num_bytes for future in futures)


@pytest.mark.parametrize("tokenizer", [None, object()])
def test_without_a_vocabulary_there_are_no_grammars(tokenizer):
    compiler = GrammarCompiler(tokenizer, vocab_size=300, eos_token_ids=[EOS])
    with pytest.raises(RequestError, match="tokenizer"):
        compiler.start(StructuredOutputsParams(regex="a"))


def test_what_may_end_a_text():
    compiler = make_compiler(eos_token_ids=[])
    compiler.compile(StructuredOutputsParams(regex="a"))
    assert compiler.end_ids([SPECIAL, ord("a")]) == {SPECIAL}
    with pytest.raises(RequestError, match="names none"):
        compiler.end_ids([ord("a")])


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "xgrammar", None)
    with pytest.raises(RequestError, match="pip install"):
        make_compiler().compile(StructuredOutputsParams(regex="a"))

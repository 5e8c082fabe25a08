"""Tool-call parsers: what comes out of a text, and that it does not depend on where the text is split."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.serve.tools import PARSERS, parser_of_template
from gapless.serve.tools.base import FirstCallOnly, TextPassage, ToolParser
from gapless.serve.tools.call_list import NamedParser, RequiredParser

MAKERS: dict[str, Callable[[], ToolParser]] = {
    **PARSERS,
    "required": RequiredParser,
    "named": lambda: NamedParser("weather"),
}


def read(parser: ToolParser, parts: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and name and arguments of each call; checks the order of the pieces."""
    content = ""
    calls: list[list[str]] = []
    pieces = [piece for part in parts for piece in parser.feed(part)] + parser.finish()
    for piece in pieces:
        if isinstance(piece, TextPassage):
            assert piece.text, "empty pieces are not sent"
            content += piece.text
        elif piece.id is not None:
            assert piece.call == len(calls)
            assert piece.name
            calls.append([piece.name, piece.arguments])
        else:
            assert piece.call == len(calls) - 1, "only the last call goes on"
            assert piece.name is None
            calls[-1][1] += piece.arguments
    return content, [(name, arguments) for name, arguments in calls]


A = '{"city": "Köln", "days": [1, 2], "deep": {"x": "}\\"{"}}'
CALL = f'{{"name": "weather", "arguments": {A}}}'
PARAMETERS = f'{{"name": "weather", "parameters": {A}}}'
CASES = [
    ("hermes", "Hello there", "Hello there", []),
    ("hermes", "  spaces kept  ", "  spaces kept  ", []),
    ("hermes", "", "", []),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [("weather", A)]),
    ("hermes", f"Let me look.\n\n<tool_call>{CALL}</tool_call>", "Let me look.", [("weather", A)]),
    (
        "hermes",
        f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\n",
        "",
        [("weather", A)] * 2,
    ),
    ("hermes", f"<tool_call>{CALL}</tool_call> and more", " and more", [("weather", A)]),
    ("hermes", f"<tool_call>{CALL}", "", [("weather", A)]),
    ("hermes", f"<tool_call>{CALL} stray", "stray", [("weather", A)]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"id": 7, "name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut off', "", [("f", '{"a": "cut off')]),
    ("hermes", "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
    ("hermes", '<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', []),
    ("hermes", '<tool_call>{"nam', '<tool_call>{"nam', []),
    ("hermes", "a <tool_", "a <tool_", []),
    ("hermes", "if a <b> then <tool> <tool_cal>", "if a <b> then <tool> <tool_cal>", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
    ("llama3", "Just text {", "Just text {", []),
    ("llama3", PARAMETERS, "", [("weather", A)]),
    ("llama3", f"<|python_tag|>{PARAMETERS}", "", [("weather", A)]),
    ("llama3", f"\n {PARAMETERS}; {PARAMETERS}", "", [("weather", A)] * 2),
    ("llama3", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3", '{"answer": {"name": "x"}} tail', '{"answer": {"name": "x"}} tail', []),
    ("llama3", "{not json", "{not json", []),
    ("llama3", "<|python", "<|python", []),
    ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama3", "", "", []),
    ("mistral", "Plain [TOOL", "Plain [TOOL", []),
    ("mistral", f"[TOOL_CALLS][{CALL}]", "", [("weather", A)]),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [("weather", A)] * 2),
    ("mistral", f"Sure. [TOOL_CALLS]weather{A}", "Sure.", [("weather", A)]),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{A}[TOOL_CALLS]now{{}}", "", [("weather", A), ("now", "{}")]),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{A}", "", [("weather", A)]),
    ("mistral", f"[TOOL_CALLS]{CALL}", "", [("weather", A)]),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("mistral", "[TOOL_CALLS]weather", "[TOOL_CALLS]weather", []),
    ("mistral", "[TOOL_CALLS][broken", None, []),
    ("required", f"[{PARAMETERS}, {PARAMETERS}]", "", [("weather", A)] * 2),
    ("required", f"  [ {PARAMETERS} ] ", "", [("weather", A)]),
    ("required", f"[{PARAMETERS[:-5]}", "", [("weather", A[: len(A) - 4])]),
    ("named", A, "", [("weather", A)]),
    ("named", "", "", [("weather", "")]),
]


@pytest.mark.parametrize(("format", "text", "content", "calls"), CASES)
def test_a_text_gives_its_content_and_calls_whatever_the_split(format, text, content, calls):
    whole = read(MAKERS[format](), [text])
    assert whole[1] == calls
    assert content is None or whole[0] == content
    assert read(MAKERS[format](), list(text)) == whole
    for size in (2, 3, 5, 7, 11):
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        assert read(MAKERS[format](), parts) == whole


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "{", "}", "[", "]", ","),
        *(":", '"', '"name"', '"arguments"', '"parameters"', '"f"', "\\", "\n", " ", ";", "null", "1", "é"),
        *("🙂", CALL, PARAMETERS, A, "{}", '{"name": "f"'),
    ]
)


@pytest.mark.parametrize("format", sorted(MAKERS))
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_any_text_split_anywhere_reads_the_same(format, data):
    text = "".join(data.draw(st.lists(FRAGMENTS, max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(MAKERS[format](), parts) == read(MAKERS[format](), [text])


@pytest.mark.parametrize("format", ["hermes", "llama3", "mistral"])
@given(text=st.text(max_size=60).filter(lambda t: not t.isspace()))
@settings(max_examples=50, deadline=None)
def test_text_without_a_marker_is_content_to_the_byte(format, text):
    if "{" not in text and "[TOOL" not in text and "<" not in text:
        assert read(PARSERS[format](), list(text)) == (text, [])


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    arguments=st.dictionaries(st.text(max_size=6), JSON_VALUES, max_size=4),
    ascii=st.booleans(),
    indent=st.sampled_from([None, 2]),
    size=st.integers(1, 9),
)
@settings(max_examples=50, deadline=None)
def test_arguments_are_the_models_own_characters(arguments, ascii, indent, size):
    written = json.dumps(arguments, ensure_ascii=ascii, indent=indent)
    call = f'{{"name": "f", "arguments": {written}}}'
    texts = {
        "hermes": f"<tool_call>\n{call}\n</tool_call>",
        "llama3": call,
        "mistral": f"[TOOL_CALLS][{call}]",
        "required": f"[{call}]",
    }
    for format, text in texts.items():
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        assert read(MAKERS[format](), parts) == ("", [("f", written)])
    assert json.loads(written) == arguments


def test_a_call_is_announced_before_its_arguments_are_complete():
    parser = PARSERS["hermes"]()
    assert parser.feed("<tool_call>") == []
    pieces = parser.feed('{"name": "f", "arguments": {"a": ')
    assert [piece.name for piece in pieces] == ["f", None]
    assert parser.feed("123")[0].arguments == "123"


def test_content_is_not_held_back_where_no_marker_can_begin():
    parser = PARSERS["hermes"]()
    assert parser.feed("abc <") == [TextPassage("abc")]
    assert parser.feed("b") == [TextPassage(" <b")]


def test_mistral_ids_have_nine_characters_and_others_the_usual_prefix():
    mistral = PARSERS["mistral"]().feed(f"[TOOL_CALLS][{CALL}]")[0]
    hermes = PARSERS["hermes"]().feed(f"<tool_call>{CALL}")[0]
    assert len(mistral.id) == 9
    assert mistral.id.isalnum()
    assert hermes.id.startswith("call_")


def test_without_parallel_calls_only_the_first_remains():
    text = f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    assert read(FirstCallOnly(PARSERS["hermes"]()), list(text)) == ("", [("weather", A)])


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        ("{% if tools %}<|python_tag|>{% endif %}", "llama3"),
        ('{% if tools %}{"name": x, "parameters": y}{% endif %}', "llama3"),
        ("{% if tools %}other{% endif %}", None),
    ],
)
def test_the_format_is_found_in_the_chat_template(template, format):
    assert parser_of_template(template) == format

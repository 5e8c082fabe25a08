"""Answers that grow together, in a pipe, as JSON lines and on a terminal."""

import io
import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.cli.streaming import Answer, JsonView, LiveView, OrderedView, answer_record, make_view
from gapless.engine.outputs import CompletionOutput, Logprob


class Terminal(io.StringIO):
    def isatty(self):
        return True


def answer(index, text, *, finish=None, choice=0, error=None, token_ids=(), logprobs=None):
    output = CompletionOutput(
        index=choice,
        text=text,
        token_ids=tuple(token_ids),
        finish_reason=finish,
        error=error,
        logprobs=logprobs,
    )
    return Answer(index=index, choice=choice, prompt=f"prompt {index}", output=output)


def test_single_answer_is_printed_bare_as_it_comes():
    out = io.StringIO()
    view = OrderedView(["a"], 1, out)
    view.update(answer(0, "Par"))
    assert out.getvalue() == "Par"
    view.update(answer(0, "Paris", finish="stop"))
    view.close()
    assert out.getvalue() == "Paris\n"


def test_later_answers_wait_for_their_turn():
    out = io.StringIO()
    view = OrderedView(["a", "b"], 1, out)
    view.update(answer(1, "second", finish="stop"))
    assert out.getvalue() == ""
    view.update(answer(0, "fir"))
    assert out.getvalue() == "[1/2] a\nfir"
    view.update(answer(0, "first", finish="length"))
    view.close()
    assert out.getvalue() == "[1/2] a\nfirst\n\n[2/2] b\nsecond\n\n"


def test_failed_answer_says_why_and_the_next_goes_on():
    out = io.StringIO()
    view = OrderedView(["a", "b"], 1, out)
    view.update(answer(0, "", finish="error", error="empty prompt"))
    view.update(answer(1, "fine", finish="stop"))
    view.close()
    assert "(failed: empty prompt)" in out.getvalue()
    assert "[2/2] b\nfine" in out.getvalue()


def test_choices_of_one_prompt_are_numbered():
    out = io.StringIO()
    view = OrderedView(["a"], 2, out)
    view.update(answer(0, "x", finish="stop", choice=0))
    view.update(answer(0, "y", finish="stop", choice=1))
    assert "[1/1 #1] a\nx" in out.getvalue()
    assert "[1/1 #2] a\ny" in out.getvalue()


def test_interrupted_answer_ends_its_line():
    out = io.StringIO()
    view = OrderedView(["a"], 1, out)
    view.update(answer(0, "half an ans"))
    view.close()
    assert out.getvalue() == "half an ans\n"


@settings(max_examples=50, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=1, max_size=4),
    data=st.data(),
)
def test_ordered_text_does_not_depend_on_the_order_of_updates(texts, data):
    """Whatever the interleaving and the cuts, a pipe receives the same bytes."""
    pending = [
        [text[:cut] for cut in sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=3)))] + [None]
        for text in texts
    ]
    out = io.StringIO(newline="")
    view = OrderedView([f"p{i}" for i in range(len(texts))], 1, out)
    while any(pending):
        index = data.draw(st.sampled_from([i for i, rest in enumerate(pending) if rest]))
        part = pending[index].pop(0)
        done = part is None
        view.update(answer(index, texts[index] if done else part, finish="stop" if done else None))
    view.close()
    if len(texts) == 1:
        assert out.getvalue() == texts[0] + "\n"
    else:
        expected = "".join(f"[{i + 1}/{len(texts)}] p{i}\n{text}\n\n" for i, text in enumerate(texts))
        assert out.getvalue() == expected


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_json_lines_are_in_prompt_order_whatever_finishes_first(order):
    out = io.StringIO()
    view = JsonView(3, 1, out)
    for index in order:
        view.update(answer(index, "so far"))
        view.update(answer(index, f"text {index}", finish="stop"))
    view.close()
    records = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [r["index"] for r in records] == [0, 1, 2]
    assert [r["text"] for r in records] == ["text 0", "text 1", "text 2"]


def test_json_line_is_written_as_soon_as_its_turn_comes():
    out = io.StringIO()
    view = JsonView(2, 1, out)
    view.update(answer(0, "done", finish="stop"))
    assert out.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    ("encoding", "text"),
    [("utf-8", "hé 日本"), ("ascii", "hé 日本"), ("utf-8", "half \udcff a pair"), ("latin-1", "日")],
)
def test_json_lines_are_legal_in_every_encoding_of_the_output(encoding, text):
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace")
    JsonView(1, 1, out).update(answer(0, text, finish="stop"))
    line = raw.getvalue().decode(encoding)
    assert json.loads(line)["text"] == text


def test_json_record_has_exactly_the_schema():
    record = answer_record(answer(2, "hé", finish="length", choice=1, token_ids=(5, 6)))
    assert record == {
        "type": "request",
        "index": 2,
        "choice": 1,
        "prompt": "prompt 2",
        "text": "hé",
        "token_ids": [5, 6],
        "finish_reason": "length",
        "logprobs": None,
        "error": None,
    }


def test_logprobs_are_legal_json_even_when_minus_infinity():
    step = {7: Logprob(logprob=-0.5, rank=1, decoded_token="a"), 8: Logprob(logprob=-math.inf, rank=2)}
    record = answer_record(answer(0, "a", finish="stop", logprobs=(step,)))
    parsed = json.loads(json.dumps(record, allow_nan=False))
    assert parsed["logprobs"] == [
        [
            {"token_id": 7, "logprob": -0.5, "rank": 1, "token": "a"},
            {"token_id": 8, "logprob": -9999.0, "rank": 2, "token": None},
        ]
    ]


def test_terminal_shows_answers_together_and_all_in_full_at_the_end():
    out = Terminal()
    view = LiveView(["first prompt", "second prompt"], 1, out)
    view.update(answer(0, "alpha " * 60))
    view.update(answer(1, "beta"))
    view.update(answer(0, "alpha " * 120, finish="stop"))
    view.update(answer(1, "beta gamma", finish="error", error="too long"))
    view.close()
    final = out.getvalue().rpartition("[1/2]")[2]
    assert final.count("alpha") == 120
    assert "beta gamma" in final
    assert "failed: too long" in final


def test_markup_in_answers_is_printed_as_it_is():
    out = Terminal()
    view = LiveView(["[bold]p[/]"], 2, out)
    view.update(answer(0, "[red]x[/red]", finish="stop"))
    view.close()
    assert "[bold]p[/]" in out.getvalue()
    assert "[red]x[/red]" in out.getvalue()


@pytest.mark.parametrize(
    ("out", "titles", "as_json", "expected"),
    [
        (io.StringIO(), ["a", "b"], False, OrderedView),
        (Terminal(), ["a", "b"], False, LiveView),
        (Terminal(), ["a"], False, OrderedView),
        (Terminal(), ["a"] * 200, False, OrderedView),
        (Terminal(), ["a", "b"], True, JsonView),
    ],
)
def test_view_fits_the_output(out, titles, as_json, expected):
    view = make_view(titles, 1, as_json=as_json, out=out)
    view.close()
    assert isinstance(view, expected)

"""Clocks that jump and names that callers invent: neither reaches a timeout, a log line or a metric."""

from __future__ import annotations

import ast
import itertools
import json
import logging
import time
from pathlib import Path

import pytest
from http_fakes import FakeClient, call, chat_body, events_of, make_app, post, text_body

import gapless.serve

SERVE = Path(gapless.serve.__file__).parent
SHOWS_A_DATE = {"context.py", "access_log.py"}
"""OpenAI's ``created`` and the log's time; nothing is computed from them."""


def wall_clock_calls(path: Path) -> list[int]:
    calls = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"):
                calls.append(node.lineno)
    return calls


def test_the_wall_clock_is_read_only_to_show_a_date():
    readers = {path.name for path in SERVE.rglob("*.py") if wall_clock_calls(path)}
    assert readers == SHOWS_A_DATE
    engine = SERVE.parent / "engine"
    assert [path.name for path in engine.rglob("*.py") if wall_clock_calls(path)] == []


@pytest.mark.parametrize("step", [-3600.0, 3600.0, 1e9], ids=["back", "forward", "far forward"])
def test_a_wall_clock_that_jumps_at_every_look_changes_no_answer(monkeypatch, step):
    app = make_app(FakeClient())
    expected = post(app, "/v1/chat/completions", chat_body()).json()["choices"]
    looks = itertools.count()
    monkeypatch.setattr(time, "time", lambda: 1.7e9 + step * next(looks))
    assert post(app, "/v1/chat/completions", chat_body()).json()["choices"] == expected
    events = events_of(post(app, "/v1/chat/completions", chat_body(stream=True)))
    assert len({event["created"] for event in events}) == 1, "one answer, one date"
    assert call(app, "GET", "/health").status_code == 200
    text = call(app, "GET", "/metrics").text
    sums = [line for line in text.splitlines() if "_seconds_sum" in line]
    assert sums
    assert all(0 <= float(line.rpartition(" ")[2]) < 60 for line in sums)


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/a%0AERROR%20all%20is%20lost",
        "/v1/models/%0d%0a%7b%22status%22%3a200%7d",
        "/v1/models/%1b%5b31mred",
        "/%e2%80%a8line%20separator",
        "/" + "a" * 5000,
    ],
    ids=["newline", "a line of its own", "escape", "separator", "long"],
)
def test_a_path_cannot_begin_a_line_of_the_log(path, form, caplog):
    with caplog.at_level(logging.INFO, logger="gapless.access"):
        call(make_app(access_log=form), "GET", path)
    (record,) = [record for record in caplog.records if record.name == "gapless.access"]
    line = record.getMessage()
    assert len(line.splitlines()) == 1
    assert line.isascii()
    assert line.isprintable()
    assert len(line) < 2000


@pytest.mark.parametrize("given", ["a\nb", "a b", 'a"b', "{}", "a" * 129, "ä", ""])
def test_a_strange_request_id_is_replaced_and_not_logged(given, caplog):
    headers = [(b"x-request-id", given.encode("latin-1"))]
    with caplog.at_level(logging.INFO, logger="gapless.access"):
        response = call(make_app(access_log="json"), "GET", "/health", headers=headers)
    (record,) = [record for record in caplog.records if record.name == "gapless.access"]
    made = json.loads(record.getMessage())["request_id"]
    assert made == response.headers["x-request-id"] != given


def test_names_that_callers_invent_make_no_metrics():
    app = make_app()
    call(app, "GET", "/unknown")
    call(app, "GET", "/v1/models/unknown")
    post(app, "/v1/completions", text_body(model="unknown"))
    before = call(app, "GET", "/metrics").text
    before = call(app, "GET", "/metrics").text.count("\n")
    for number in range(50):
        call(app, "GET", f"/unknown{number}")
        call(app, "GET", f"/v1/models/m{number}")
        post(app, "/v1/completions", text_body(model=f"m{number}", user=f"u{number}"))
    assert call(app, "GET", "/metrics").text.count("\n") == before


def test_the_documents_references_all_lead_somewhere():
    document = call(make_app(), "GET", "/openapi.json").json()
    assert document["openapi"].startswith("3.")
    references = set()

    def walk(node):
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                references.add(node["$ref"])
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(document)
    assert references
    for reference in references:
        place = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names))

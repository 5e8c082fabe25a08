"""The page in a real browser: what it shows, what it never runs, and its chat.

The server is the real application on a real socket; only the engine is a script.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser import CHROMIUM, Browser
from live_server import FakeClient, Served, answer, spell, until
from test_http_dashboard import PLAN
from test_http_status import statistics

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")

ATTACK = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
STEPS = [
    ["prefill", "breakable", 64, 50, "", 4.0],
    ["decode", "full", 8, 5, "", 1.5],
    ["decode", "full", 8, 5, "sample: logprobs", 1.6],
    ["prefill", "eager", 0, 900, f"above the largest size {ATTACK}", 8.0],
    ["decode", "full", 8, 6, "", 1.4],
]


def make_client(script: Any = None) -> FakeClient:
    plan = json.loads(json.dumps(PLAN))
    plan["decisions"][0]["reason"] = f"because {ATTACK}"
    client = FakeClient(script, plan=plan, model=f"model {ATTACK}")
    client.statistics = {**statistics(), "recent_steps": STEPS, "num_steps": 1000}
    return client


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    made = Browser()
    yield made
    made.close()


@pytest.fixture
def serve(browser: Browser) -> Iterator[Callable[..., Served]]:
    """Serve and open the page in a window of its own size."""
    running: list[Served] = []

    def start(
        client: FakeClient | None = None, *, width: int = 1200, is_dark: bool = False, **settings: Any
    ) -> Served:
        running.append(Served(client or make_client(), **settings))
        browser.messages.clear()
        browser.set_window(width, 900, is_dark=is_dark)
        browser.open(running[-1].url + "/dashboard")
        return running[-1]

    yield start
    browser.open("about:blank")
    for served in running:
        served.close()


def wait_for_data(browser: Browser) -> None:
    browser.wait_for(
        "document.querySelectorAll('#tiles div').length > 5 && document.querySelector('#plan table')"
    )


def ask(browser: Browser, text: str) -> None:
    browser.value("document.getElementById('chat-text').focus()")
    browser.type_text(text)
    browser.press("Enter")


def test_numbers_ladder_steps_and_plan_are_shown(browser, serve):
    serve()
    wait_for_data(browser)
    text = browser.text()
    for shown in (
        "prefix hits",
        "40.0%",
        "25.0%",
        "16 of 63 blocks",
        'above "largest" size',
        "FULL_AND_PIECEWISE",
    ):
        assert shown in text
    assert "16.7%" in text, "padding of the decode size 8: 12 of 72"
    colours = browser.value("[...document.querySelectorAll('#strip i')].map((bar) => bar.className)")
    assert colours == ["breakable", "full", "full part", "eager", "full"]
    assert browser.messages == []


def test_nothing_from_outside_is_run_or_becomes_markup(browser, serve):
    served = serve(make_client(answer(ATTACK)))
    wait_for_data(browser)
    ask(browser, ATTACK)
    browser.wait_for("document.getElementById('chat-state').textContent.includes('tokens')")
    browser.value("document.getElementById('strip').focus()")
    for _ in range(3):
        browser.press("ArrowLeft")
    assert browser.value("window.hacked") is None
    assert browser.value("document.querySelectorAll('img, body script:not(:last-of-type)').length") == 0
    assert browser.text().count("window.hacked=1") >= 8, (
        "it is shown as text: name, reasons, question, answer"
    )
    assert browser.messages == [], "the policy had nothing to stop"
    assert served.client.requests


def test_the_policy_stops_a_script_that_is_added_all_the_same(browser, serve):
    serve()
    wait_for_data(browser)
    browser.value(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.hacked = 1';"
        " document.body.append(s) })()"
    )
    assert browser.value("window.hacked") is None
    browser.wait_for("true")
    assert any("Content Security Policy" in message for message in browser.messages)


def test_an_answer_is_streamed_and_the_conversation_goes_on(browser, serve):
    def script(request):
        deltas = [[delta] for delta in spell(request, "Grüße! Ça va?")]
        return [*deltas[:4], 0.4, *deltas[4:]]

    served = serve(make_client(script))
    wait_for_data(browser)
    ask(browser, "Hi")
    browser.wait_for("document.querySelector('.turn:last-child span').textContent.startsWith('Gr')")
    assert browser.value("document.getElementById('chat-send').disabled")
    browser.wait_for("document.getElementById('chat-state').textContent.includes('tokens')")
    ask(browser, "And now?")
    browser.wait_for(
        "document.querySelectorAll('.turn').length === 4 && !document.getElementById('chat-send').disabled"
    )
    turns = browser.value("[...document.querySelectorAll('.turn span')].map((turn) => turn.textContent)")
    assert turns == ["Hi", "Grüße! Ça va?", "And now?", "Grüße! Ça va?"]
    prompt = bytes(token for token in served.client.requests[1].prompt_token_ids if token < 256).decode()
    assert "Grüße! Ça va?" in prompt, "the second request has the first answer"


def test_abort_ends_the_request(browser, serve):
    def script(request):
        yield [spell(request, "Once upon")[0]]
        for _ in range(400):
            yield 0.05

    served = serve(make_client(script))
    wait_for_data(browser)
    ask(browser, "Tell me a story")
    browser.wait_for("document.querySelector('.turn:last-child span').textContent === 'O'")
    browser.value("document.getElementById('chat-abort').click()")
    browser.wait_for("document.getElementById('chat-state').textContent === 'aborted'")
    until(lambda: served.client.aborted)
    assert not browser.value("document.getElementById('chat-send').disabled")


@pytest.mark.parametrize("error", [ValueError("a bug"), "refused"])
def test_a_failed_answer_says_why(browser, serve, error):
    def script(request):
        return [error]

    serve(make_client(script if error != "refused" else None), max_n=1)
    wait_for_data(browser)
    if error == "refused":
        browser.value("document.getElementById('chat-max').value = 100000")
    ask(browser, "Hi")
    browser.wait_for("document.getElementById('chat-state').textContent.startsWith('failed: ')")
    assert browser.value("document.querySelectorAll('.turn').length") == 2


def test_the_key_is_asked_for_and_sent(browser, serve):
    served = serve(api_keys=("secret",))
    browser.wait_for("document.activeElement.id === 'key'")
    browser.type_text("wrong")
    browser.press("Enter")
    browser.wait_for("document.getElementById('notice').textContent.includes('does not know this key')")
    browser.type_text("secret")
    browser.press("Enter")
    wait_for_data(browser)
    browser.wait_for("document.getElementById('key-form').hidden")
    ask(browser, "Hi")
    browser.wait_for("document.getElementById('chat-state').textContent.includes('tokens')")
    assert served.client.requests
    browser.value("sessionStorage.clear()")


def test_the_strip_is_used_with_the_keyboard(browser, serve):
    serve()
    wait_for_data(browser)
    browser.value("document.getElementById('strip').focus()")
    browser.press("ArrowLeft")
    detail = browser.value("document.getElementById('strip-detail').textContent")
    assert detail.startswith(
        "step 999, prefill: eager, 900 tokens, 8 ms. Eager because: above the largest size"
    )
    browser.press("Home")
    assert browser.value("document.getElementById('strip').getAttribute('aria-valuenow')") == "996"
    assert browser.value("document.querySelectorAll('#strip .marked').length") == 1
    browser.press("Escape")
    assert browser.value("document.querySelectorAll('#strip .marked').length") == 0


def test_tab_reaches_every_control(browser, serve):
    serve()
    wait_for_data(browser)
    browser.value("document.body.focus()")
    reached = set()
    for _ in range(12):
        browser.press("Tab")
        reached.add(browser.value("document.activeElement.id"))
    assert {"strip", "chat-text", "chat-max", "chat-temperature", "chat-send", "chat-reset"} <= reached


@pytest.mark.parametrize("is_dark", [False, True])
def test_a_narrow_window_needs_no_sideways_scrolling(browser, serve, is_dark):
    serve(width=360, is_dark=is_dark)
    wait_for_data(browser)
    assert browser.value("document.documentElement.scrollWidth") <= 360
    red = browser.value("parseInt(getComputedStyle(document.body).backgroundColor.split('(')[1])")
    assert (red < 60) == is_dark


@pytest.mark.parametrize(
    ("state", "words"),
    [("dead", "has stopped"), ("draining", "shutting down"), ("stale", "no life for 45 s")],
)
def test_trouble_is_announced(browser, serve, state, words):
    client = make_client()
    client.is_healthy = state == "stale"
    client.is_draining = state == "draining"
    client.age_s = 45.0
    serve(client)
    browser.wait_for(f"document.getElementById('notice').textContent.includes({words!r})")


def test_a_server_that_goes_is_noticed(browser, serve):
    served = serve()
    wait_for_data(browser)
    served.close()
    browser.wait_for("document.getElementById('notice').textContent.includes('does not answer')")


@pytest.mark.soak
def test_the_page_stays_light_over_two_minutes_of_changing_data(browser, serve):
    served = serve()
    wait_for_data(browser)

    def heap() -> int:
        browser.value("window.gc && gc()")
        return browser.value("performance.memory.usedJSHeapSize")

    nodes = browser.value("document.querySelectorAll('*').length")
    before = None
    for second in range(120):
        stats = dict(served.client.statistics)
        stats["num_steps"] += 250
        stats["uptime_s"] += 1.0
        stats["generation_tokens"] += 1000 + second
        stats["recent_steps"] = [STEPS[(second + i) % len(STEPS)] for i in range(300)]
        served.client.statistics = stats
        time.sleep(1.0)
        if second == 20:
            before = heap()
    assert heap() < before + 20e6
    assert browser.value("document.querySelectorAll('*').length") < nodes + 400
    assert browser.messages == []

"""The page's data, its policy, and who may see what."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re

import httpx
import pytest
from http_fakes import MODEL, FakeClient, call, make_app, post, text_body
from test_http_status import statistics

from gapless.serve.dashboard import ladder, make_page
from gapless.serve.live import MAX_VALUES, NUM_POINTS, LiveWindow
from gapless.serve.metrics import RequestMetrics

PLAN = {
    "mode": "FULL_AND_PIECEWISE",
    "prefill": {"strategy": "breakable", "unit": "tokens", "sizes": [16, 64], "dropped": []},
    "decode": {"strategy": "full", "unit": "requests", "sizes": [1, 8], "dropped": []},
    "decisions": [
        {"rule": "default", "phase": None, "before": "auto", "after": "full", "reason": "it is the fastest"}
    ],
}
STEP = ["decode", "full", 8, 5, "", 1.5]


def served(**info) -> FakeClient:
    client = FakeClient(plan=PLAN, **info)
    client.statistics = {**statistics(), "recent_steps": [STEP]}
    return client


def data(client: FakeClient, **settings):
    response = call(make_app(client, **settings), "GET", "/dashboard/data")
    assert response.status_code == 200
    return response.json()


def test_the_page_is_whole_and_loads_nothing():
    response = call(make_app(), "GET", "/dashboard")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "/*STYLE*/" not in response.text
    assert "/*SCRIPT*/" not in response.text
    outside = re.findall(
        r"""(?:src|href|url|import|from)\s*[=(]?\s*["']?(?:https?:)?//[^\s"']+""", response.text
    )
    assert outside == []


def test_the_policy_names_exactly_the_script_and_the_style_of_the_page():
    page, headers = make_page()
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page.decode(), re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert "unsafe" not in headers["Content-Security-Policy"]


def test_the_page_has_no_handlers_or_styles_in_its_markup():
    """The policy would block them."""
    markup = re.sub(r"<(script|style)>.*?</\1>", "", make_page()[0].decode(), flags=re.DOTALL)
    assert re.findall(r"\s(?:on\w+|style)=", markup) == []


@pytest.mark.parametrize(
    "way", ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("]
)
def test_the_script_never_parses_text_as_html_or_code(way):
    assert way not in make_page()[0].decode()


def test_the_page_holds_nothing_of_the_model():
    client = FakeClient(model="<script>alert(1)</script>")
    page = call(make_app(client), "GET", "/dashboard")
    assert page.content == make_page()[0]


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"Authorization": "Bearer no"}, 401), ({"Authorization": "Bearer k"}, 200)],
)
def test_the_page_is_open_and_its_data_needs_the_key(headers, status):
    app = make_app(served(), api_keys=("k",))
    assert call(app, "GET", "/dashboard", headers=headers).status_code == 200
    assert call(app, "GET", "/dashboard/data", headers=headers).status_code == status


def test_data_has_the_engines_numbers():
    found = data(served())
    assert found["server"]["model"] == MODEL
    assert found["now"]["num_running"] == 3
    assert found["now"]["kv_usage"] == 0.25
    assert found["now"]["prefix_hit_rate"] == 0.4
    assert found["eager"] == statistics()["eager"]
    assert found["steps"] == [STEP]
    assert found["plan"]["decisions"] == PLAN["decisions"]
    assert found["plan"]["phases"]["decode"]["sizes"] == [1, 8]


def test_data_is_never_cached():
    response = call(make_app(served()), "GET", "/dashboard/data")
    assert response.headers["cache-control"] == "no-store"


def test_data_before_the_first_heartbeat_has_no_numbers():
    found = data(FakeClient())
    assert found["now"]["num_running"] is None
    assert found["now"]["prefix_hit_rate"] is None
    assert found["latency"] == {"ttft_ms": None, "itl_ms": None}
    assert found["steps"] == found["ladder"] == []


def test_data_without_a_prefix_cache_has_no_hit_rate():
    client = served()
    client.statistics["prefix_cache_queries"] = 0
    assert data(client)["now"]["prefix_hit_rate"] is None


@pytest.mark.parametrize(("is_healthy", "age_s"), [(True, 0.5), (False, 40.0), (True, None)])
def test_data_tells_of_the_engines_health(is_healthy, age_s):
    client = served()
    client.is_healthy, client.age_s = is_healthy, age_s
    health = data(client)["health"]
    assert (health["is_healthy"], health["step_age_s"]) == (is_healthy, age_s)


def test_data_names_no_key_prompt_or_answer():
    client = served()
    app = make_app(client, api_keys=("secret-key",))
    head = {"Authorization": "Bearer secret-key"}
    post(app, "/v1/completions", text_body(prompt="a private prompt"), headers=head)
    text = call(app, "GET", "/dashboard/data", headers=head).text
    assert not any(word in text for word in ("secret-key", "private", "Hello"))


@pytest.mark.parametrize(("tokenizer", "can_chat"), [("bytes", True), (None, False)])
def test_data_says_whether_the_model_can_chat(tokenizer, can_chat):
    found = call(make_app(served(), tokenizer), "GET", "/dashboard/data").json()
    assert found["server"]["can_chat"] is can_chat


def test_latencies_of_served_requests_are_in_the_data():
    app = make_app(served())
    assert post(app, "/v1/completions", text_body(max_tokens=5)).status_code == 200
    latency = call(app, "GET", "/dashboard/data").json()["latency"]
    assert latency["ttft_ms"]["samples"] == 1
    assert 0 <= latency["itl_ms"]["p50"] <= latency["itl_ms"]["p95"]


def test_ladder_has_sizes_that_were_never_hit():
    replays = [{"phase": "decode", "strategy": "full", "bucket": 8, "count": 9, "tokens": 60, "padding": 12}]
    rows = ladder(PLAN, replays)
    assert [(row["phase"], row["bucket"], row["count"]) for row in rows] == [
        ("prefill", 16, 0),
        ("prefill", 64, 0),
        ("decode", 1, 0),
        ("decode", 8, 9),
    ]
    assert rows[-1]["padding"] == 12


def test_ladder_has_replays_outside_the_plan_last():
    replays = [{"phase": "head", "strategy": "full", "bucket": 4, "count": 2, "tokens": 6, "padding": 2}]
    assert ladder(PLAN, replays)[-1]["phase"] == "head"


def test_ladder_of_disabled_graphs_is_empty():
    empty = {"strategy": "disabled", "unit": "tokens", "sizes": [], "dropped": []}
    assert ladder({"prefill": empty, "decode": empty}, []) == []


class Engine:
    """Statistics of an engine that counts as it is told."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.stats = {
            **{"uptime_s": 0.0, "prompt_tokens": 0, "generation_tokens": 0},
            **{"num_running": 0, "num_waiting": 0, "kv_usage": 0.0},
        }
        self.metrics = RequestMetrics()
        self.window = LiveWindow(lambda: self.stats, self.metrics, clock=lambda: self.now_s)

    def second(self, *, tokens_in: int = 0, tokens_out: int = 0, is_late: bool = False) -> None:
        self.now_s += 1.0
        if not is_late:
            self.stats = {
                **self.stats,
                "uptime_s": self.stats["uptime_s"] + 1.0,
                "prompt_tokens": self.stats["prompt_tokens"] + tokens_in,
                "generation_tokens": self.stats["generation_tokens"] + tokens_out,
            }
        self.window.sample()


def test_rates_are_differences_of_totals():
    engine = Engine()
    engine.window.sample()
    engine.second(tokens_in=100, tokens_out=5)
    engine.second(tokens_in=0, tokens_out=7)
    series = engine.window.summary()["series"]
    assert series["tokens_in_per_s"] == [100.0, 0.0]
    assert series["tokens_out_per_s"] == [5.0, 7.0]
    assert series["age_s"] == [1.0, 0.0]


def test_a_late_heartbeat_repeats_the_rate_instead_of_showing_a_dip():
    engine = Engine()
    engine.window.sample()
    engine.second(tokens_out=5)
    engine.second(is_late=True)
    assert engine.window.summary()["series"]["tokens_out_per_s"] == [5.0, 5.0]


def test_only_two_minutes_are_kept():
    engine = Engine()
    for _ in range(NUM_POINTS + 50):
        engine.second(tokens_out=1)
    series = engine.window.summary()["series"]
    assert {len(values) for values in series.values()} == {NUM_POINTS}


def test_percentiles_cover_the_last_minute_only():
    engine = Engine()
    engine.metrics.recent_ttft_s.append(9.0)
    engine.second()
    for _ in range(59):
        engine.second()
    assert engine.window.summary()["latency"]["ttft_ms"]["p50"] == 9000.0
    engine.second()
    engine.second()
    assert engine.window.summary()["latency"]["ttft_ms"] is None


def test_percentiles_of_many_values_are_taken_from_an_even_choice():
    engine = Engine()
    engine.metrics.recent_inter_token_s.extend(i / 1e6 for i in range(2000))
    engine.second()
    found = engine.window.summary()["latency"]["itl_ms"]
    assert found["samples"] <= MAX_VALUES
    assert found["p50"] == pytest.approx(1.0, rel=0.05)
    assert found["p95"] == pytest.approx(1.9, rel=0.05)
    assert not engine.metrics.recent_inter_token_s, "each value counts once"


def test_nothing_is_sampled_before_the_engine_says_something():
    window = LiveWindow(dict, RequestMetrics())
    window.sample()
    assert window.summary()["series"]["running"] == []


@pytest.mark.parametrize(("age_s", "num_points"), [(0.2, 1), (0.7, 2)])
def test_a_request_for_data_samples_when_the_last_point_is_old(age_s, num_points):
    engine = Engine()
    engine.window.sample_if_due(0.5)
    engine.now_s += age_s
    engine.window.sample_if_due(0.5)
    assert len(engine.window.summary()["series"]["age_s"]) == num_points - 1


def test_points_are_sampled_while_nobody_looks(monkeypatch):
    monkeypatch.setattr("gapless.serve.dashboard.SAMPLE_S", 0.01)
    app = make_app(served())

    async def go() -> httpx.Response:
        async with app.router.lifespan_context(app):
            await asyncio.sleep(0.15)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
                return await http.get("/dashboard/data")

    assert len(asyncio.run(go()).json()["series"]["running"]) >= 3
